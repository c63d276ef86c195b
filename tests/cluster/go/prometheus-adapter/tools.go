//go:build tools

// Names what is built from this module, so that go.sum locks it.
package adapter

import _ "sigs.k8s.io/prometheus-adapter/cmd/adapter"

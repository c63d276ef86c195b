//go:build tools

// Names what is built from this module, so that go.sum locks it.
package kwok

import _ "sigs.k8s.io/kwok/cmd/kwok"

//go:build tools

// Names what is built from this module, so that go.sum locks it.
package score

import _ "github.com/zegl/kube-score/cmd/kube-score"

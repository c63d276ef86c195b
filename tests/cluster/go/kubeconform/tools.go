//go:build tools

// Names what is built from this module, so that go.sum locks it.
package conform

import _ "github.com/yannh/kubeconform/cmd/kubeconform"

//go:build tools

// Names what is built from this module, so that go.sum locks it.
package helm

import _ "helm.sh/helm/v3/cmd/helm"

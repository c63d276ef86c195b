//go:build tools

// Names what is built from this module, so that go.sum locks it.
package hook

import _ "github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-cdi-hook"

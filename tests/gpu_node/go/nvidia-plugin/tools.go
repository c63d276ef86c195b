//go:build tools

// Names what is built from this module, so that go.sum locks it.
package plugin

import _ "github.com/NVIDIA/k8s-device-plugin/cmd/nvidia-device-plugin"

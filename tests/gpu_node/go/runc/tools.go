//go:build tools

// Names what is built from this module, so that go.sum locks it.
package runc

import (
	_ "github.com/opencontainers/runc"
)

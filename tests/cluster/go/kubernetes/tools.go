//go:build tools

// Locked with Kubernetes: what Helm shares with it is compiled once.
package main

import _ "helm.sh/helm/v3/cmd/helm"

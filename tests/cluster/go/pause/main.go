// Pause holds a pod's namespaces open and reaps the orphans of its containers.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	children := make(chan os.Signal, 8)
	stop := make(chan os.Signal, 1)
	signal.Notify(children, syscall.SIGCHLD)
	signal.Notify(stop, syscall.SIGINT, syscall.SIGTERM)
	for {
		select {
		case <-children:
			reap()
		case <-stop:
			return
		}
	}
}

func reap() {
	for {
		pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
		if pid <= 0 || err != nil {
			return
		}
	}
}

// A device plug-in for nodes that keep the driver in a folder, as those of some clouds do: each device
// is a device file, beside files and one folder that every container gets. The container runtime needs
// to know nothing of GPUs. With /dev/null as its device it plays a GPU where none is.
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	socket    = "kvline-devices.sock"
	reconnect = time.Second
)

type plugin struct {
	api.UnimplementedDevicePluginServer
	devices []string // a device file each; its number is the device's ID
	common  []string // device files of every container
	mount   string   // a folder of every container, read-only
}

func main() {
	folder := flag.String("folder", api.DevicePluginPath, "the kubelet's folder of device plug-ins")
	resource := flag.String("resource", "nvidia.com/gpu", "name of the extended resource")
	devices := flag.String("devices", "", "device files, one a device, separated by commas")
	common := flag.String("common", "", "device files that each container gets too")
	mount := flag.String("mount", "", "a folder that each container gets, at the same path")
	flag.Parse()
	served := &plugin{devices: words(*devices), common: words(*common), mount: *mount}
	if err := serve(served, *folder, *resource); err != nil {
		fmt.Fprintln(os.Stderr, "device-plugin:", err)
		os.Exit(1)
	}
}

func words(text string) []string {
	return slices.DeleteFunc(strings.Split(text, ","), func(word string) bool { return word == "" })
}

func serve(served *plugin, folder, resource string) error {
	path := filepath.Join(folder, socket)
	os.Remove(path)
	listener, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, served)
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	if err := register(folder, resource); err != nil {
		return err
	}
	fmt.Printf("registered %d of %s\n", len(served.devices), resource)
	return waitUntilRemoved(path, failed)
}

func register(folder, resource string) error {
	kubelet := "unix://" + filepath.Join(folder, filepath.Base(api.KubeletSocket))
	connection, err := grpc.NewClient(kubelet, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	request := &api.RegisterRequest{Version: api.Version, Endpoint: socket, ResourceName: resource}
	_, err = api.NewRegistrationClient(connection).Register(ctx, request)
	return err
}

// A kubelet empties its folder when it starts: a plug-in whose socket is gone must begin anew.
func waitUntilRemoved(path string, failed <-chan error) error {
	for {
		select {
		case err := <-failed:
			return err
		case <-time.After(reconnect):
			if _, err := os.Stat(path); err != nil {
				return fmt.Errorf("the kubelet has removed %s", path)
			}
		}
	}
}

func (p *plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

func (p *plugin) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	all := &api.ListAndWatchResponse{}
	for number := range p.devices {
		all.Devices = append(all.Devices, &api.Device{ID: fmt.Sprint(number), Health: api.Healthy})
	}
	if err := stream.Send(all); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (p *plugin) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	answer := &api.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		one := &api.ContainerAllocateResponse{}
		for _, id := range container.DevicesIds {
			number, err := strconv.Atoi(id)
			if err != nil || number < 0 || number >= len(p.devices) {
				return nil, fmt.Errorf("no device %q: there are %d", id, len(p.devices))
			}
			one.Devices = append(one.Devices, device(p.devices[number]))
		}
		for _, path := range p.common {
			one.Devices = append(one.Devices, device(path))
		}
		if p.mount != "" {
			one.Mounts = []*api.Mount{{HostPath: p.mount, ContainerPath: p.mount, ReadOnly: true}}
		}
		answer.ContainerResponses = append(answer.ContainerResponses, one)
	}
	return answer, nil
}

func device(path string) *api.DeviceSpec {
	return &api.DeviceSpec{HostPath: path, ContainerPath: path, Permissions: "rw"}
}

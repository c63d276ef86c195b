"""Configuration files of the node's programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from network import BRIDGE, NODE_ADDRESS, POD_RANGE

PAUSE_IMAGE = "localhost/pause:1"


def audit_policy() -> str:
    """Every request of a ServiceAccount of kvline's, without bodies; nobody else's."""
    ours = {"level": "Metadata", "userGroups": ["system:serviceaccounts:kvline-system"]}
    return json.dumps(
        {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived"],
            "rules": [ours, {"level": "None"}],
        }
    )


def containerd(state: Path) -> str:
    return f"""version = 2
root = "{state}/containerd"
state = "{state}/run/containerd"
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
[grpc]
  address = "{state}/run/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{state}/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true        # sandboxes lack CAP_SYS_RESOURCE
  netns_mounts_under_state_dir = true  # else under /run/netns, shared with everything else
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{state}/conf/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    options = {{ SystemdCgroup = false }}
"""


def cni(state: Path) -> str:
    bridge = {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": True,
        "ipMasq": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": f"{state}/run/cni",
            "ranges": [[{"subnet": POD_RANGE, "gateway": NODE_ADDRESS}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    return json.dumps({"cniVersion": "1.0.0", "name": BRIDGE, "plugins": [bridge, portmap]})


def kubelet(state: Path, cgroup: str) -> str:
    none_kept = dict.fromkeys(("nodefs.available", "imagefs.available", "nodefs.inodesFree"), "0%")
    return json.dumps(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": f"{state}/pki/ca.crt"},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": f"{state}/pki/kubelet.crt",
            "tlsPrivateKeyFile": f"{state}/pki/kubelet.key",
            "containerRuntimeEndpoint": f"unix://{state}/run/containerd.sock",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": cgroup,
            "failCgroupV1": False,
            "failSwapOn": False,
            "oomScoreAdj": 0,
            "makeIPTablesUtilChains": False,
            "podLogsDir": f"{state}/log/pods",
            "volumePluginDir": f"{state}/kubelet/plugins-volume",
            "clusterDomain": "cluster.local",
            "clusterDNS": [NODE_ADDRESS],
            "resolvConf": "",
            # No image garbage collection: no registry could give the images back.
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {"memory.available": "100Mi", **none_kept},
        }
    )


def kube_proxy(state: Path) -> str:
    return json.dumps(
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "clientConnection": {"kubeconfig": f"{state}/pki/kube-proxy.kubeconfig"},
            "clusterCIDR": POD_RANGE,
            "healthzBindAddress": "127.0.0.1:10256",
            "metricsBindAddress": "127.0.0.1:10249",
            "oomScoreAdj": 0,
            "nodePortAddresses": ["primary"],
            "nftables": {"minSyncPeriod": "100ms"},
            "conntrack": {
                "maxPerCore": 0,
                "tcpEstablishedTimeout": "0s",
                "tcpCloseWaitTimeout": "0s",
            },
        }
    )


def corefile(state: Path) -> str:
    return f""".:53 {{
  bind {NODE_ADDRESS}
  errors
  cache 5
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {state}/pki/coredns.kubeconfig
    pods insecure
    ttl 5
  }}
}}
"""


STORAGE_CLASS = "kvline-local"
SPACE = {"storage": "10Gi"}


def claim(namespace: str, name: str, volume: str, folder: str, node: str) -> str:
    """A local volume over a folder of the host, and the claim that it is bound to."""
    access = {"accessModes": ["ReadWriteMany", "ReadOnlyMany"], "storageClassName": STORAGE_CLASS}
    bound = {"claimRef": {"namespace": namespace, "name": name}}
    asks = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {**access, "volumeName": volume, "resources": {"requests": SPACE}},
    }
    return _list([_volume(volume, {**access, **bound}, folder, node), asks])


def spare_volumes(count: int, folder: str, node: str) -> str:
    """Local volumes over a folder of the host for claims that name no storage class, as any cluster
    has them; their class is the default one."""
    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    storage = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": STORAGE_CLASS, "annotations": default},
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "Immediate",
    }
    modes = ["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"]
    access = {"accessModes": modes, "storageClassName": STORAGE_CLASS}
    names = [f"kvline-spare-{number}" for number in range(1, count + 1)]
    return _list([storage, *(_volume(name, access, folder, node) for name in names)])


def _volume(name: str, spec: dict[str, Any], folder: str, node: str) -> dict[str, Any]:
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            **spec,
            "capacity": SPACE,
            "persistentVolumeReclaimPolicy": "Retain",
            "local": {"path": folder},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        },
    }


def _list(items: list[dict[str, Any]]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})

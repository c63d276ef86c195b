"""The local cluster on a machine with a GPU: containerd 2, and a device plug-in.

NVIDIA's own plug-in gives devices by CDI, as NVIDIA's GPU operator sets it up. The plain one gives
device files and a mounted driver folder, as nodes of some clouds do, and plays a GPU where none is.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
from pathlib import Path
from typing import ClassVar

import node_programs
import parts
import settings
import tools
from errors import ClusterError
from local import NODE, LocalCluster, Say
from node_programs import BIN, CNI, NVIDIA_HOOK, NVIDIA_PLUGIN, PLUGIN
from paths import CLUSTERS
from programs import processes

# The kubelet's, whatever its --root-dir: one cluster of a machine can have device plug-ins.
PLUGINS_FOLDER = Path("/var/lib/kubelet/device-plugins")
CHECKPOINT = PLUGINS_FOLDER / "kubelet_internal_checkpoint"  # devices of pods, kept over restarts
KMSG = Path("/dev/kmsg")
DRIVER_FOLDER = "/usr/local/nvidia"
SHARED_DEVICES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")


class GpuNode(LocalCluster):
    path: ClassVar[str] = str(BIN)
    runtime_serves: ClassVar[bytes] = b"containerd successfully booted"

    def __init__(self, name: str = "gpu") -> None:
        super().__init__(name)
        if str(parts.WRAPPERS) not in os.environ["PATH"]:  # ip and nft, if the machine lacks them
            os.environ["PATH"] += f":{parts.WRAPPERS}"

    def ensure_programs(self, say: Say) -> None:
        """Builds them unless packed parts brought them."""
        if not node_programs.UNPACKED.is_file():
            super().ensure_programs(say)
        node_programs.build(say)

    def configuration(self) -> dict[str, str]:
        # A node tells a new resource with its next status, by default every 10 s.
        kubelet = json.loads(settings.kubelet(self.state, f"/{self.cgroup}"))
        return {
            **super().configuration(),
            "containerd.toml": containerd(self.state),
            "cni/10-bridge.conflist": cni(self.state),
            "kubelet.yaml": json.dumps({**kubelet, "nodeStatusUpdateFrequency": "1s"}),
        }

    def up(self, say: Say) -> None:
        tools.ensure_root()
        if not self.is_up():
            check_kubelets()
            CHECKPOINT.unlink(missing_ok=True)  # of a cluster that is gone
            if not KMSG.exists():  # from it the kubelet learns of kills for memory
                os.mknod(KMSG, stat.S_IFCHR | 0o600, os.makedev(1, 11))
        super().up(say)

    def down(self) -> None:
        super().down()
        CHECKPOINT.unlink(missing_ok=True)

    # GPUs --------------------------------------------------------------------------------------

    def start_plugin(self, plain: list[str] | None = None, mount: str = DRIVER_FOLDER) -> None:
        """NVIDIA's device plug-in; with device files, the plain one instead. Returns once the node
        offers the devices. Raises ClusterError."""
        if plain is not None and mount and not list(Path(mount).glob("lib*/libcuda.so.1")):
            raise ClusterError(f"the plain plug-in mounts {mount}, which has no lib64/libcuda.so.1")
        for name in (NVIDIA_PLUGIN, PLUGIN):
            self.programs.stop([name], signal.SIGTERM)
        if plain is None:
            Path("/var/run/cdi").mkdir(parents=True, exist_ok=True)
            self.run(
                NVIDIA_PLUGIN,
                "--device-list-strategy=cdi-cri",
                f"--nvidia-cdi-hook-path={BIN}/{NVIDIA_HOOK}",
                *("--driver-root=/", "--driver-root-ctr-path=/", "--dev-root=/"),
                "--device-discovery-strategy=nvml",
            )
        else:
            shared = [path for path in SHARED_DEVICES if Path(path).exists()]
            self.run(
                PLUGIN,
                f"-devices={','.join(plain)}",
                f"-common={','.join(shared)}",
                f"-mount={mount}",
            )
        wanted = str(len(plain)) if plain is not None else str(count_gpus())
        name = NVIDIA_PLUGIN if plain is None else PLUGIN
        self.programs.wait_for(f"{name}'s devices", 30, lambda: self.allocatable() == wanted)

    def allocatable(self) -> str:
        """How many GPUs the node offers to pods; empty for a resource that it does not have."""
        path = "jsonpath={.status.allocatable.nvidia\\.com/gpu}"
        return self.kubectl("get", "node", NODE, "-o", path, check=False).stdout


def check_kubelets() -> None:
    """Raises ClusterError where a kubelet runs that is not of our clusters: both would use the one
    folder of device plug-ins."""
    for pid, command in processes():
        program = command.partition(" ")[0].rpartition("/")[2]
        if program == "kubelet" and str(CLUSTERS) not in command:
            raise ClusterError(f"this machine is a node already: kubelet runs as {pid}")


def count_gpus() -> int:
    """How many this machine has; 0 without a driver."""
    return len(_nvidia_smi("--query-gpu=index"))


def device_files() -> list[str]:
    """Of the GPUs; in a container they may begin at another number than 0."""
    return sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))


def _nvidia_smi(query: str) -> list[str]:
    try:
        words = ["nvidia-smi", query, "--format=csv,noheader"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    return done.stdout.split() if done.returncode == 0 else []


def containerd(state: Path) -> str:
    """Its configuration; CDI is on by default."""
    runtime = "plugins.'io.containerd.cri.v1.runtime'"
    return f"""version = 3
root = "{state}/containerd"
state = "{state}/run/containerd"
disabled_plugins = ["io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.erofs",
  "io.containerd.nri.v1.nri", "io.containerd.tracing.processor.v1.otlp"]
[grpc]
  address = "{state}/run/containerd.sock"
[ttrpc]
  address = "{state}/run/containerd.sock.ttrpc"
[plugins.'io.containerd.internal.v1.opt']
  path = "{state}/containerd/opt"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "{settings.PAUSE_IMAGE}"
[{runtime}]
  restrict_oom_score_adj = true        # sandboxes lack CAP_SYS_RESOURCE
  netns_mounts_under_state_dir = true  # else under /run/netns, shared with everything else
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
  [{runtime}.cni]
    bin_dirs = ["{CNI}"]
    conf_dir = "{state}/conf/cni"
    use_internal_loopback = true
  [{runtime}.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [{runtime}.containerd.runtimes.runc.options]
      BinaryName = "{BIN}/runc"
      SystemdCgroup = false
"""


def cni(state: Path) -> str:
    """As the usual cluster's, by nftables alone and without port maps."""
    made = json.loads(settings.cni(state))
    bridge = {**made["plugins"][0], "ipMasqBackend": "nftables"}
    return json.dumps({**made, "plugins": [bridge]})

"""A cluster's own network namespace: a bridge for node and pods, a veth pair to the host.

Nothing of the host's firewall, ports or links changes; deleting the namespace takes it all away.
Ranges are 198.18.0.0/15, the benchmark range, which meets nobody's network, and documentation
addresses for the pair.
"""

from __future__ import annotations

import subprocess
import zlib
from dataclasses import dataclass
from pathlib import Path

from errors import ClusterError

NODE_ADDRESS = "198.18.0.1"
POD_RANGE = "198.18.0.0/16"
SERVICE_RANGE = "198.19.0.0/16"
FIRST_SERVICE = "198.19.0.1"
BRIDGE = "kube0"
# Networks of the clusters that the project starts.
NAMES = (
    *("demo", "integration", "e2e", "bench", "integration-2", "integration-3"),
    *("gpu", "e2e-gpu", "e2e-2"),
)
LINKS = "198.51.100"  # documentation range TEST-NET-2; TEST-NET-1 was in use on a machine seen


@dataclass(frozen=True, slots=True)
class Network:
    name: str  # of the cluster

    @property
    def namespace(self) -> str:
        return f"kvline-{self.name}"

    @property
    def file(self) -> Path:
        return Path("/run/netns") / self.namespace

    @property
    def _block(self) -> int:
        """The /30 of the link range that the veth pair uses; fixed for our clusters, which run side
        by side."""
        if self.name in NAMES:
            return NAMES.index(self.name)
        return len(NAMES) + zlib.crc32(self.name.encode()) % (64 - len(NAMES))

    @property
    def outer(self) -> str:
        return f"{LINKS}.{4 * self._block + 1}"

    @property
    def inner(self) -> str:
        """The namespace's address as the host sees it: the API server answers there."""
        return f"{LINKS}.{4 * self._block + 2}"

    @property
    def _link(self) -> str:
        return f"kvl{zlib.crc32(self.name.encode()) % 10**9:09d}"

    def up(self) -> None:
        self.down()
        self._check_free()
        self._ip("netns", "add", self.namespace)
        self._ip(
            "link",
            "add",
            self._link,
            "type",
            "veth",
            "peer",
            "name",
            "host0",
            "netns",
            self.namespace,
        )
        self._ip("addr", "add", f"{self.outer}/30", "dev", self._link)
        self._ip("link", "set", self._link, "up")
        inside = (
            f"addr add {self.inner}/30 dev host0",
            "link set lo up",
            "link set host0 up",
            f"route add default via {self.outer}",
            f"link add {BRIDGE} type bridge",
            f"addr add {NODE_ADDRESS}/16 dev {BRIDGE}",
            f"link set {BRIDGE} up",
        )
        for command in inside:
            self._ip("-n", self.namespace, *command.split())
        self.run(["sysctl", "-qw", "net.ipv4.ip_forward=1"])
        # Services reach pods over the bridge; without this their answers bypass kube-proxy's rules.
        self.run(["sysctl", "-qw", "net.bridge.bridge-nf-call-iptables=1"], check=False)

    def _check_free(self) -> None:
        """Raises ClusterError if another network has these addresses."""
        shown = subprocess.run(["ip", "-br", "addr"], capture_output=True, text=True, check=True)
        for line in shown.stdout.splitlines():
            if f" {LINKS}." in line and not line.startswith("kvl"):
                raise ClusterError(f"{LINKS}.0/24 is in use here: {line.split()[0]}")

    def route_from_host(self) -> None:
        """Lets the host reach pods and Services; only the demo's cluster takes this route."""
        self._ip("route", "replace", "198.18.0.0/15", "via", self.inner)

    def down(self) -> None:
        for command in (["netns", "del", self.namespace], ["link", "del", self._link]):
            subprocess.run(["ip", *command], capture_output=True, check=False)

    def command(self, command: list[str]) -> list[str]:
        """nsenter and not «ip netns exec», which would hide the cgroups behind a new /sys."""
        return ["nsenter", f"--net={self.file}", *command]

    def run(self, command: list[str], check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(command), check=check, capture_output=True, text=True)

    @staticmethod
    def _ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

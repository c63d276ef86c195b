"""A real one-node Kubernetes in seconds, whole in a network namespace of its own.

Modes: api (etcd and API server), control (and controller manager, scheduler), node (and
containerd, kubelet, kube-proxy, DNS). Every program retries until the one below answers, so all
start at the same moment.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import binaries
import cgroups
import lock
import pki
import settings
import tools
from errors import ClusterError, NotWithin
from images import Images
from network import FIRST_SERVICE, NODE_ADDRESS, SERVICE_RANGE, Network
from paths import BIN, CLUSTERS
from programs import Programs, limit

NODE = "local"
# The defaults of 20 and 50 requests a second slow a small cluster down by seconds.
RAISED = ("--kube-api-qps=500", "--kube-api-burst=1000")
RUNTIME_SECONDS = 20

Say = Callable[[str], None]


@dataclass
class LocalCluster:
    name: str
    mode: str = "node"
    limits: tuple[str, ...] = RAISED  # of the controllers; empty: Kubernetes' defaults
    network: Network = field(init=False)
    state: Path = field(init=False)
    lock: int = field(init=False, default=-1)  # the open file of claim_use
    path: ClassVar[str] = ""  # searched for the node's programs before PATH
    runtime_serves: ClassVar[bytes] = b"Start streaming server"  # in containerd's log

    def __post_init__(self) -> None:
        self.network = Network(self.name)
        self.state = CLUSTERS / self.name
        self.programs = Programs(self.state, self.path)
        self.images = Images(self.state, self.path)

    @property
    def kubeconfig(self) -> Path:
        return self.state / "pki" / "admin.kubeconfig"

    @property
    def audit_log(self) -> Path:
        """A JSON line for each request that kvline's own ServiceAccounts made."""
        return self.state / "log" / "audit.log"

    @property
    def cgroup(self) -> str:
        return f"kvline-{self.name}"

    def claim_use(self) -> None:
        """Keeps other test runs from this cluster as long as this process lives. Raises
        ClusterError where one has it: it would be taken down under its tests."""
        try:
            self.lock = lock.take(self.state.with_name(f"{self.name}.use"))
        except lock.Taken as taken:
            raise ClusterError(
                f"the cluster {self.name} is used by process {taken.holder}, another test run: "
                "wait until that has ended, or end it"
            ) from None

    # Up ----------------------------------------------------------------------------------------

    def is_up(self) -> bool:
        names = {"etcd", "kube-apiserver"}
        if self.mode != "api":
            names |= {"kube-controller-manager", "kube-scheduler"}
        if self.mode == "node":
            names |= {"containerd", "kubelet", "kube-proxy", "coredns"}
        return names <= set(self.programs.running()) and self._answers("/readyz")

    def up(self, say: Say) -> None:
        """Starts the cluster from nothing; does nothing when it is up already."""
        tools.ensure_root()
        self.ensure_programs(say)
        with lock.held(self.state / "lock"):
            if self.is_up():
                return
            self._clean()
            started = time.monotonic()
            self._start_control_plane()
            if self.mode == "node":
                self._start_node()
            self._wait()
            say(f"cluster {self.name} ({self.mode}) is up ({time.monotonic() - started:.1f} s)")

    def ensure_programs(self, say: Say) -> None:
        binaries.build(say)

    def run(self, name: str, *arguments: str) -> None:
        """Starts a program of the cluster, in its network."""
        program = str(BIN / name) if (BIN / name).is_file() else name
        self.programs.start(name, self.network.command([program, *arguments]))

    def _start_control_plane(self) -> None:
        pki_folder = self.state / "pki"
        addresses = ["127.0.0.1", self.network.inner, NODE_ADDRESS, FIRST_SERVICE]
        pki.make(pki_folder, f"https://{self.network.inner}:6443", addresses, NODE)
        self.network.up()
        self.run(
            "etcd",
            "--log-level=warn",
            f"--data-dir={self.state}/etcd",
            "--unsafe-no-fsync",  # thrown away on down
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--initial-advertise-peer-urls=http://127.0.0.1:2380",
            "--initial-cluster=default=http://127.0.0.1:2380",
        )
        (self.state / "audit-policy.json").write_text(settings.audit_policy())
        self.run("kube-apiserver", *self._apiserver_flags(pki_folder))
        if self.mode == "api":
            return
        self.run(
            "kube-controller-manager",
            *self.limits,
            "--leader-elect=false",
            f"--kubeconfig={pki_folder}/controller-manager.kubeconfig",
            f"--service-account-private-key-file={pki_folder}/sa.key",
            f"--root-ca-file={pki_folder}/ca.crt",
            "--use-service-account-credentials",
            "--bind-address=127.0.0.1",
            "--horizontal-pod-autoscaler-sync-period=3s",
            "--pvclaimbinder-sync-period=1s",  # by default a claim is bound after up to 15 s
        )
        self.run(
            "kube-scheduler",
            *self.limits,
            "--leader-elect=false",
            f"--kubeconfig={pki_folder}/scheduler.kubeconfig",
            "--bind-address=127.0.0.1",
        )

    def _apiserver_flags(self, folder: Path) -> list[str]:
        return [
            "--etcd-servers=http://127.0.0.1:2379",
            "--bind-address=0.0.0.0",
            "--secure-port=6443",
            f"--advertise-address={NODE_ADDRESS}",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged",
            f"--token-auth-file={folder}/tokens.csv",
            f"--client-ca-file={folder}/ca.crt",
            f"--tls-cert-file={folder}/apiserver.crt",
            f"--tls-private-key-file={folder}/apiserver.key",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={folder}/sa.pub",
            f"--service-account-signing-key-file={folder}/sa.key",
            f"--kubelet-certificate-authority={folder}/ca.crt",
            f"--kubelet-client-certificate={folder}/apiserver-kubelet.crt",
            f"--kubelet-client-key={folder}/apiserver-kubelet.key",
            "--kubelet-preferred-address-types=InternalIP",
            # For API servers behind this one, such as that of metrics.
            f"--requestheader-client-ca-file={folder}/ca.crt",
            "--requestheader-allowed-names=front-proxy",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={folder}/front-proxy.crt",
            f"--proxy-client-key-file={folder}/front-proxy.key",
            f"--audit-policy-file={self.state}/audit-policy.json",
            f"--audit-log-path={self.audit_log}",
        ]

    def configuration(self) -> dict[str, str]:
        """The node's configuration files: name -> text."""
        return {
            "containerd.toml": settings.containerd(self.state),
            "cni/10-bridge.conflist": settings.cni(self.state),
            "kubelet.yaml": settings.kubelet(self.state, f"/{self.cgroup}"),
            "kube-proxy.yaml": settings.kube_proxy(self.state),
            "Corefile": settings.corefile(self.state),
        }

    def _start_node(self) -> None:
        conf = self.state / "conf"
        (conf / "cni").mkdir(parents=True, exist_ok=True)
        for name, text in self.configuration().items():
            (conf / name).write_text(text)
        cgroups.make(self.cgroup)
        self._start_containerd(conf)
        self.images.add_pause()
        self.run(
            "kubelet",
            f"--config={conf}/kubelet.yaml",
            f"--kubeconfig={self.state}/pki/kubelet.kubeconfig",
            f"--root-dir={self.state}/kubelet",
            f"--hostname-override={NODE}",
            f"--node-ip={NODE_ADDRESS}",
        )
        self.run("kube-proxy", f"--config={conf}/kube-proxy.yaml", f"--hostname-override={NODE}")
        self.run("coredns", "-conf", str(conf / "Corefile"))

    def _start_containerd(self, conf: Path) -> None:
        """Waits for containerd's runtime service, which recovers its state first; a kubelet that
        connects before that exits. Only the log shows it; a version with another log line is ready
        long before the time is up."""
        log = self.state / "log" / "containerd.log"
        seen = log.stat().st_size if log.is_file() else 0
        self.run("containerd", f"--config={conf}/containerd.toml")
        self.programs.wait_for("containerd", 30, self.images.answers)
        end = time.monotonic() + limit(RUNTIME_SECONDS)
        while self.runtime_serves not in log.read_bytes()[seen:] and time.monotonic() < end:
            time.sleep(0.1)

    def _wait(self) -> None:
        wait = self.programs.wait_for
        wait("the API server", 60, lambda: self._answers("/readyz"))
        if self.mode == "api":
            return
        wait("the default ServiceAccount", 60, lambda: self._get("serviceaccount", "default"))
        if self.mode == "node":
            self.kubectl(
                "create", "clusterrolebinding", "coredns", "--clusterrole=view", "--user=coredns"
            )
            wait(
                "the node",
                60,
                lambda: (
                    "True"
                    in self.kubectl(
                        "get",
                        "node",
                        NODE,
                        "-o",
                        "jsonpath={.status.conditions[?(@.type=='Ready')].status}",
                        check=False,
                    ).stdout
                ),
            )
            url = f"https://{FIRST_SERVICE}/readyz"
            wait(
                "Services",
                30,
                lambda: (
                    self.network.run(
                        ["curl", "-sk", "--max-time", "1", url], check=False
                    ).returncode
                    == 0
                ),
            )

    def _answers(self, path: str) -> bool:
        return self.kubectl("get", "--raw", path, check=False).returncode == 0

    def _get(self, kind: str, name: str) -> bool:
        return self.kubectl("get", kind, name, check=False).returncode == 0

    # Use ---------------------------------------------------------------------------------------

    def kubectl(
        self, *arguments: str, input: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        command = [str(BIN / "kubectl"), "--kubeconfig", str(self.kubeconfig), *arguments]
        try:
            done = subprocess.run(command, input=input, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise ClusterError("kubectl is not built yet: the cluster has never been up") from None
        if check and done.returncode:
            error = NotWithin if "timed out waiting" in done.stderr else ClusterError
            raise error(f"kubectl {' '.join(arguments)[:200]}: {done.stderr.strip()}")
        return done

    def enter(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Runs a command in the cluster's network, where Services and pods answer."""
        return subprocess.run(self.network.command(command), text=True, check=False)

    def claim(self, namespace: str, folder: Path, name: str = "models") -> None:
        """A claim in the namespace, bound to a folder of the host."""
        volume = f"kvline-{name}-{namespace}"
        documents = settings.claim(namespace, name, volume, str(folder), NODE)
        self.kubectl("apply", "-f", "-", input=documents)
        # A pod that comes first would wait until the scheduler considers the claim again.
        bound = ("wait", "--for=jsonpath={.status.phase}=Bound", f"pvc/{name}")
        self.kubectl("-n", namespace, *bound, f"--timeout={limit(30):.0f}s")

    def spare_volumes(self, count: int, folder: Path) -> None:
        """Volumes over a folder of the host, for claims of any namespace."""
        self.kubectl("apply", "-f", "-", input=settings.spare_volumes(count, str(folder), NODE))

    def kubeconfig_of(self, namespace: str, account: str) -> Path:
        """Written for a ServiceAccount, with a token of one day."""
        words = ("create", "token", account, "--duration=24h")
        token = self.kubectl("-n", namespace, *words).stdout.strip()
        path = self.state / "pki" / f"{namespace}-{account}.kubeconfig"
        pki.write_kubeconfig(path, f"https://{self.network.inner}:6443", token)
        return path

    # Down --------------------------------------------------------------------------------------

    def down(self) -> None:
        with lock.held(self.state / "lock"):
            self._clean()

    def _clean(self) -> None:
        """Ends all processes of this cluster, after a crash too; keeps binaries, images, keys."""
        # The kubelet first: it would restart what is ended below.
        self.programs.stop(["kubelet", "kube-proxy", "coredns"], signal.SIGTERM)
        cgroups.kill_all(self.cgroup)
        self.images.remove_containers()
        self.programs.stop(list(self.programs.running()), signal.SIGKILL)
        self.images.kill_shims()
        for line in reversed(Path("/proc/mounts").read_text().splitlines()):
            target = line.split()[1]
            if target.startswith(f"{self.state}/"):
                subprocess.run(["umount", "-l", target], capture_output=True, check=False)
        self.network.down()
        cgroups.kill_all(self.cgroup)
        cgroups.remove(self.cgroup)
        for path in Path("/var/log/containers").glob("*"):
            if path.is_symlink() and str(path.readlink()).startswith(f"{self.state}/"):
                path.unlink()
        for name in ("run", "etcd", "kubelet", "log/pods", "pid"):
            shutil.rmtree(self.state / name, ignore_errors=True)
        self.audit_log.unlink(missing_ok=True)


__all__ = ["ClusterError", "LocalCluster"]

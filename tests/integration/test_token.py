"""The operator as a pod has it: its own token in a file that the kubelet writes anew."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from playground import Node, Operator, Space, serve
from waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SYSTEM, ACCOUNT = "kvline-system", "kvline-operator"
HOST, ADDRESS = "kubernetes.default.svc", "127.0.6.1"  # of the operator under test alone
# In a mount namespace of its own: $1 is the pod's volume, $2 its /etc/hosts.
POD = """
mount -t tmpfs none /run && mkdir -p /run/secrets/kubernetes.io/serviceaccount
mount --bind "$1" /run/secrets/kubernetes.io/serviceaccount && mount --bind "$2" /etc/hosts
shift 2 && exec "$@"
"""


class Forwarder:
    """The API server at a Service's address and port. TLS passes through."""

    def __init__(self, behind: tuple[str, int]) -> None:
        self.behind = behind
        self.open: set[socket.socket] = set()
        self.listening = socket.create_server((ADDRESS, 443), backlog=128)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self.listening.accept()[0]
                server = socket.create_connection(self.behind)
                self.open |= {client, server}
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=_copy, args=pair, daemon=True).start()

    def cut(self) -> None:
        """Ends every connection, as an API server does with those that are old."""
        while self.open:
            with suppress(OSError):
                self.open.pop().shutdown(socket.SHUT_RDWR)


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with closing(source):
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def api_server(space: Space) -> Iterator[Forwarder]:
    given = yaml.safe_load(space.cluster.kubeconfig.read_text())
    url = urlsplit(given["clusters"][0]["cluster"]["server"])
    made = Forwarder((str(url.hostname), int(url.port or 443)))
    with closing(made.listening):
        yield made
        made.listening.shutdown(socket.SHUT_RDWR)
        made.cut()


@pytest.fixture
def volume(space: Space, tmp_path: Path) -> Path:
    """What the kubelet mounts into a pod, the token left out."""
    folder = tmp_path / "serviceaccount"
    folder.mkdir()
    (folder / "ca.crt").write_bytes((space.cluster.kubeconfig.parent / "ca.crt").read_bytes())
    (folder / "namespace").write_text(SYSTEM)
    return folder


def issue(space: Space, volume: Path, number: int) -> Callable[[], None]:
    """Replaces the token at once, as the kubelet does; calls back to end its life, which is ten
    minutes at least where nobody revokes it."""
    kubectl, name = space.cluster.kubectl, f"{space.name}-{number}"
    kubectl("-n", SYSTEM, "create", "secret", "generic", name)
    bound = ("--duration=10m", "--bound-object-kind=Secret", f"--bound-object-name={name}")
    made = kubectl("-n", SYSTEM, "create", "token", ACCOUNT, *bound).stdout
    (volume / "next").write_text(made)
    (volume / "next").rename(volume / "token")

    def revoke() -> None:
        kubectl("-n", SYSTEM, "delete", "secret", name)
        who = ("--token", made, "auth", "whoami")
        eventually(lambda: "Unauthorized" in space.cluster.kubectl(*who, check=False).stderr)

    return revoke


@pytest.fixture
def operator(
    space: Space, api_server: Forwarder, volume: Path, tmp_path: Path
) -> Iterator[Operator]:
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{ADDRESS} {HOST}\n")
    made = Operator(space, tmp_path / "operator.log")
    made.prefix = ["unshare", "--mount", "sh", "-ec", POD, "pod", str(volume), str(hosts)]
    made.extra = {"KUBERNETES_SERVICE_HOST": HOST, "KUBERNETES_SERVICE_PORT": "443"}
    made.resync = 300  # a shorter one would hide a watch that is dead
    yield made
    made.stop()
    assert "Traceback" not in made.log.read_text()


def renewed(space: Space) -> None:
    """Waits for two renewals of the Lease: the second is a call that began after this one."""
    for _ in range(2):
        last = space.lease["renewTime"]
        eventually(partial(is_renewed, space, last))


def is_renewed(space: Space, last: str) -> bool:
    return bool(space.lease["renewTime"] != last)


def has_pods(node: Node, number: int) -> bool:
    return len(node.pods()) == number


@pytest.mark.fault(
    "F16",
    shows="three tokens, each revoked once the Lease has been renewed with the next, and all "
    "connections cut (not 1 h): no call is refused, changes are heard by events alone",
)
def test_a_token_that_is_rotated_is_read_anew(
    space: Space, api_server: Forwarder, operator: Operator, volume: Path, node: Node
) -> None:
    revoke = issue(space, volume, 0)
    operator.start()
    space.apply()
    eventually(node.pods, 90)
    serve(space, node)
    for number in (1, 2):
        before, revoke = revoke, issue(space, volume, number)
        renewed(space)
        before()
        api_server.cut()
        space.apply(replicas=1 + number)
        eventually(partial(has_pods, node, 1 + number), 60)
    log = operator.log.read_text()
    assert "HTTP 401" not in log and "Unauthorized" not in log, log[-2000:]
    revoke()

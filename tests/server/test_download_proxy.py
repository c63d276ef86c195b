"""The download step behind a proxy and with a certificate authority of one's own: real TLS, a real
CONNECT proxy, and the environment that the operator gives the step."""

from __future__ import annotations

import os
import select
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hub import COMMIT, Hub
from servers import launch_config
from waiting import limit

from kvline_operator.api.source import source_of
from kvline_operator.plan.podspec import DIRECT, PROXIES, TRUSTED, download_container
from kvline_operator.settings import Settings

pytestmark = pytest.mark.process

SOURCE = f"hf://org/tiny@{COMMIT}"
FILES = {"config.json": b'{"a": 1}', "model.safetensors": bytes(range(256)) * 4096}
NAME = "hub.invalid"  # no resolver knows it: the proxy alone connects to it
HUB_VARIABLES = {"HF_ENDPOINT", DIRECT, *PROXIES, *TRUSTED}
# huggingface_hub waits 23 s in all between its tries.
STEP = (
    "import sys, time; time.sleep = lambda seconds: None; "
    "from kvline_server.command import cli; sys.exit(cli.main(sys.argv[1:]))"
)


def openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ca.crt, another.crt, and the hub's tls.crt and tls.key, which ca.crt signed."""
    folder = tmp_path_factory.mktemp("issued")
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "another"):
        key, made = folder / f"{name}.key", folder / f"{name}.crt"
        openssl("req", "-x509", *new, "-subj", f"/CN={name}", "-keyout", key, "-out", made)
    request, names = folder / "tls.csr", folder / "names"
    names.write_text(f"subjectAltName=DNS:{NAME},IP:127.0.0.1")
    openssl("req", *new, "-subj", f"/CN={NAME}", "-keyout", folder / "tls.key", "-out", request)
    signer = ("-CA", folder / "ca.crt", "-CAkey", folder / "ca.key", "-CAcreateserial")
    out = ("-extfile", names, "-out", folder / "tls.crt")
    openssl("x509", "-req", "-in", request, *signer, *out)
    return folder


def served(server: ThreadingHTTPServer) -> Iterator[Any]:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def hub(issued: Path) -> Iterator[Hub]:
    made = Hub(FILES, "")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued / "tls.crt", issued / "tls.key")
    made.socket = context.wrap_socket(made.socket, server_side=True, do_handshake_on_connect=False)
    yield from served(made)


class Proxy(ThreadingHTTPServer):
    """Connects to the port that it is asked for on this machine, whatever the host's name."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.received = 0  # bytes, from hubs
        self.refuses = 0  # a status
        super().__init__(("127.0.0.1", 0), Tunnel)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Tunnel(BaseHTTPRequestHandler):
    server: Proxy

    def log_message(self, *_: Any) -> None:
        return

    def do_CONNECT(self) -> None:
        self.server.asked.append(self.path)
        self.close_connection = True
        if self.server.refuses:
            self.send_error(self.server.refuses, "secret-reason")
            return
        port = int(self.path.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as behind:
            self.send_response(200)
            self.end_headers()
            self.relay(behind)

    def relay(self, behind: socket.socket) -> None:
        while ready := select.select([self.connection, behind], [], [], limit(30))[0]:
            for end in ready:
                data = end.recv(65536)
                if not data:
                    return
                if end is behind:
                    self.server.received += len(data)
                (self.connection if end is behind else behind).sendall(data)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    yield from served(Proxy())


@pytest.fixture
def fetch(hub: Hub, issued: Path, tmp_path: Path) -> Callable[..., Any]:
    """Runs the step as the operator's settings have it."""

    def run(
        host: str = NAME, authority: str = "ca.crt", **settings: Any
    ) -> subprocess.CompletedProcess[str]:
        endpoint = f"https://{host}:{hub.server_address[1]}"
        made = Settings("image", hub_endpoint=endpoint, hub_ca=authority, **settings)
        container = download_container(source_of({"source": SOURCE}), "image", made)
        given = {e["name"]: e["value"] for e in container["env"] if e["name"] in HUB_VARIABLES}
        given |= {n: str(issued / authority) for n in TRUSTED if n in given}
        launch = launch_config(tmp_path / "cache" / COMMIT, source=SOURCE)
        config = tmp_path / "launch.json"
        config.write_text(launch.dumps())
        outside = {k: v for k, v in os.environ.items() if k.upper() not in HUB_VARIABLES}
        outside = {k: v for k, v in outside.items() if not k.lower().endswith("_proxy")}
        environment = {**outside, **given, "HOME": str(tmp_path), "HF_HUB_DOWNLOAD_TIMEOUT": "5"}
        command = [sys.executable, "-c", STEP, "download", "--config", str(config)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit(60), check=False
        )
        is_there = (tmp_path / "cache" / COMMIT / "model.safetensors").is_file()
        assert is_there == (done.returncode == 0), done.stderr
        return done

    return run


def failed(done: subprocess.CompletedProcess[str]) -> str:
    """What becomes the condition's message."""
    assert done.returncode == 33, done.stderr
    return done.stderr.splitlines()[-1]


def test_all_bytes_go_through_the_proxy_with_an_authority_of_one_s_own(
    hub: Hub, proxy: Proxy, fetch: Callable[..., Any]
) -> None:
    done = fetch(hub_proxy=proxy.url)
    assert done.returncode == 0, done.stderr
    assert set(proxy.asked) == {f"{NAME}:{hub.server_address[1]}"}
    assert proxy.received > sum(map(len, FILES.values()))


def test_a_host_without_proxy_is_reached_directly(proxy: Proxy, fetch: Callable[..., Any]) -> None:
    direct = failed(fetch(hub_proxy=proxy.url, hub_no_proxy=(".invalid",)))
    assert f"no connection to {NAME}: " in direct and "proxy" not in direct
    none = {"hub_proxy": proxy.url, "hub_no_proxy": ("other.example", "127.0.0.1")}
    done = fetch(host="127.0.0.1", **none)
    assert done.returncode == 0, done.stderr
    assert proxy.asked == []


@pytest.mark.parametrize("authority", ["", "another.crt"])
def test_a_certificate_that_is_not_trusted_names_the_setting(
    fetch: Callable[..., Any], authority: str
) -> None:
    message = failed(fetch(host="127.0.0.1", authority=authority))
    assert "certificate of 127.0.0.1" in message and "hubCA" in message
    assert "unable to get local issuer certificate" in message


def test_an_authority_that_is_missing_or_none_names_the_setting(
    issued: Path, fetch: Callable[..., Any]
) -> None:
    """The mount is optional, so that it may come later."""
    missing = failed(fetch(authority="missing.crt"))
    assert "hubCA" in missing and "ca.crt" in missing and "service's namespace" in missing
    assert "hubCA names has no certificate" in failed(fetch(authority="tls.csr"))


def test_a_dead_proxy_is_named_without_its_credentials(fetch: Callable[..., Any]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{closed.getsockname()[1]}"
        done = fetch(hub_proxy=f"http://user:canary@{where}")
    message = failed(done)
    assert f"no connection to the proxy http://{where} (the chart's hubProxy): " in message
    assert "Connection refused" in message
    assert "canary" not in done.stdout + done.stderr


def test_a_proxy_that_refuses_is_named_with_its_status(
    proxy: Proxy, fetch: Callable[..., Any]
) -> None:
    proxy.refuses = 403
    message = failed(fetch(hub_proxy=proxy.url))
    assert f"the proxy {proxy.url} (the chart's hubProxy) does not connect to {NAME}: " in message
    assert "403 Forbidden" in message and "secret-reason" not in message

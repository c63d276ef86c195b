"""A server in a network that has IPv6 alone, as pods of such a cluster have it: a network namespace
whose loopback interface has lost its IPv4 address."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import limit

pytestmark = pytest.mark.process

POD = "fd00::8"
NETWORK = f"""
ip link set lo up
ip address del 127.0.0.1/8 dev lo
ip address add {POD}/128 dev lo nodad
exec "$@"
"""
STORY = """
import json, re, signal, socket, subprocess, sys
import httpx
pod, model, *words = sys.argv[1:]
process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
for line in process.stderr:
    if ready := re.search(r"API on (.*):(\\d+), probes and metrics on (.*):(\\d+)", line):
        break
host, port, _, internal = ready.groups()
url = f"http://[{pod}]:{port}"
body = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
try:
    socket.create_connection(("127.0.0.1", int(port)), 5).close()
    old = "reached"
except OSError:
    old = "unreachable"
print(json.dumps({
    "host": host,
    "old": old,
    "answer": httpx.post(f"{url}/v1/completions", json=body, timeout=60).json(),
    "probe": httpx.get(f"http://[{pod}]:{internal}/readyz", timeout=60).status_code,
    "load": httpx.get(f"http://[::1]:{internal}/load", timeout=60).json(),
}))
process.send_signal(signal.SIGTERM)
sys.exit(process.wait())
"""


def in_a_network_of_its_own(*words: str) -> list[str]:
    users = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", "--net", *users, *words]


def test_a_server_serves_where_there_is_only_ipv6(tiny_model: Path) -> None:
    if subprocess.run(in_a_network_of_its_own("true"), capture_output=True).returncode:
        pytest.skip("this machine allows no network namespace")
    serve = [sys.executable, "-m", "kvline_server", "serve", "--model", str(tiny_model)]
    serve += ["--served-name", "tiny", "--port", "0", "--internal-port", "0", "--device", "cpu"]
    serve += ["--max-model-len", "256", "--kv-tokens", "2048", "--headroom-mib", "8"]
    serve += ["--memory", "900Mi", "--threads", "1"]
    story = ["sh", "-ec", NETWORK, "sh", sys.executable, "-c", STORY, POD, str(tiny_model), *serve]
    ended = subprocess.run(
        in_a_network_of_its_own(*story), capture_output=True, text=True, timeout=limit(120)
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["host"], found["old"], found["probe"]) == ("[::]", "unreachable", 200)
    assert found["answer"]["usage"]["completion_tokens"] > 0
    assert found["load"]["kvTokens"] == 2048

"""A machine without a network: the server asks for nothing that is elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

# In a network namespace where nothing but the loopback is: what has no route there is counted by
# the kernel, for TCP and UDP alike, whichever library sent it.
SCRIPT = """
import json, socket, subprocess, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parent / "suite")]
from servers import Server

def without_route():
    lines = [line.split() for line in Path("/proc/net/snmp").read_text().splitlines()]
    names, values = (line for line in lines if line[0] == "Ip:")
    newer = dict(line.split() for line in Path("/proc/net/snmp6").read_text().splitlines())
    return int(dict(zip(names, values))["OutNoRoutes"]) + int(newer.get("Ip6OutNoRoutes", 0))

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
server = Server(Path(sys.argv[2]), Path(sys.argv[3]))
try:
    server.start().wait(seconds=180)
    answer = server.complete(prompt="Hello", max_tokens=4, ignore_eos=True)
    tried = without_route()
finally:
    server.stop()
try:
    socket.create_connection(("192.0.2.1", 443), 1)
except OSError:
    pass
tokens = answer["usage"]["completion_tokens"]
print(json.dumps({"tokens": tokens, "tried": tried, "counted": without_route() - tried}))
"""


@pytest.mark.fault("F58", shows="in a network namespace of loopback alone: serves, 0 packets leave")
def test_a_server_without_a_network_starts_and_tries_to_reach_nobody(
    tiny_model: Path, tmp_path: Path
) -> None:
    apart = ["unshare", "--net", *(["--map-root-user"] if os.geteuid() else [])]
    command = [*apart, sys.executable, "-c", SCRIPT, str(Path(__file__).parent)]
    done = subprocess.run(
        [*command, str(tiny_model), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen == {"tokens": 4, "tried": 0, "counted": 1}

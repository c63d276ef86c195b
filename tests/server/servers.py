"""A real server over a tiny model: the parent, its HTTP and its engine process, on free ports."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
from waiting import NotInTime, eventually, limit, settles, slowness, spent

from kvline_contract.codec import dumps
from kvline_contract.launch import (
    CapacityOptions,
    Device,
    EngineOptions,
    GateFile,
    LaunchConfig,
    LoadFormat,
    Model,
)
from kvline_server.options.arguments import HttpArguments, RankArguments

T = TypeVar("T")
ENGINE, CAPACITY = EngineOptions(), CapacityOptions()
SIZES = ["hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"]
SIZES += ["vocab_size", "max_position_embeddings"]
# A config.json.
CONFIG = {"architectures": ["LlamaForCausalLM"], "eos_token_id": None, **dict.fromkeys(SIZES, 8)}
FAULTS = Path(__file__).parent / "faults"
# Steps of a pinned start, of which each of several ranks runs every one alone too; a size that is
# searched for is probed with as many before it is validated.
STRESS = 7
# Options of a Server whose size is searched for, and not pinned, in so much memory.
SEARCHED: dict[str, Any] = {"capacity": CapacityOptions(headroom_mib=8), "memory": 900 << 20}
GROWING = ("stage", "liveness", "rank")  # of Timeouts
LAUNCHER = """
import signal, sys
from pathlib import Path
from kvline_contract.launch import LaunchConfig
from kvline_server.options.clients import ClientLimits
from kvline_server.options.options import Options
from kvline_server.options.timeouts import Timeouts
from kvline_server.parent.supervisor import Supervisor
config, state, gate, port, internal, memory, limits, key, clients, tls, http = sys.argv[1:12]
options = Options(
    config=Path(config), state_dir=Path(state), gate=Path(gate) if gate else None,
    host="127.0.0.1", port=int(port), internal_port=int(internal), memory=int(memory) or None,
    termination_log=Path(state) / "termination", threads=1, key=Path(key),
    tls=Path(tls), http_processes=int(http) or None,
    timeouts=Timeouts(**__import__("json").loads(limits)),
    clients=ClientLimits(**__import__("json").loads(clients)),
)
supervisor = Supervisor(options, LaunchConfig.parse(Path(config).read_bytes()))
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: supervisor.stop())
sys.exit(supervisor.run())
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def sockets(pid: int) -> int:
    """That a process has open."""
    files = Path(f"/proc/{pid}/fd")
    return sum(os.readlink(file).startswith("socket:") for file in files.iterdir())


def launch_config(
    folder: Path,
    engine: EngineOptions = ENGINE,
    capacity: CapacityOptions = CAPACITY,
    source: str = "",
    load: LoadFormat = LoadFormat.WEIGHTS,
) -> LaunchConfig:
    model = Model(source or str(folder), str(folder), "tiny", load)
    return LaunchConfig(1, "ns", "svc", "abcde", "image", Device.CPU, 1, model, engine, capacity)


@dataclass
class Server:
    model: Path
    scratch: Path
    engine: EngineOptions = field(
        default_factory=lambda: EngineOptions(max_model_len=256, max_running_requests=4)
    )
    capacity: CapacityOptions = field(
        default_factory=lambda: CapacityOptions(kv_tokens=2048, headroom_mib=8)
    )
    gate: GateFile | None = None
    faults: dict[str, str] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    clients: dict[str, float] = field(default_factory=dict)  # of options.ClientLimits
    drain_seconds: int | None = None
    load: LoadFormat = LoadFormat.WEIGHTS
    memory: int = 0
    gpus: int = 1  # ranks, which are processes on the CPU
    key: Path | None = None  # a file; asked of every request
    tls: Path | None = None  # a folder with a certificate and its key
    http_processes: int = 0  # 0: as many as it takes by itself
    port: int = 0
    internal_port: int = 0
    client: httpx.Client = field(default_factory=httpx.Client)

    def start(self) -> Server:
        self.scratch.mkdir(parents=True, exist_ok=True)
        config = self.scratch / "launch.json"
        launch = launch_config(self.model, self.engine, self.capacity, load=self.load)
        launch = replace(
            launch,
            tensor_parallel=self.gpus,
            require_api_key=self.key is not None,
            require_tls=self.tls is not None or None,
            drain_seconds=self.drain_seconds,
        )
        config.write_text(launch.dumps())
        gate = ""
        if self.gate is not None:
            self.write_gate(self.gate)
            gate = str(self.scratch / "gate.json")
        self.port = self.port or free_port()
        self.internal_port = self.internal_port or free_port()
        path = f"{FAULTS}:{os.environ.get('PYTHONPATH', '')}" if self.faults else ""
        environment = {**os.environ, **self.faults}
        if path:
            environment["PYTHONPATH"] = path
            environment["KVLINE_FAULT_KILLS"] = str(self.scratch / "kills")
        state = self.scratch / "state"
        state.mkdir(exist_ok=True)
        self.log = (self.scratch / "log").open("ab")
        command = [sys.executable, "-c", LAUNCHER, str(config), str(state), gate, str(self.port)]
        # Those that end a hung start, rank or pod: a slow machine is not hung.
        limits = {k: v * slowness() if k in GROWING else v for k, v in self.limits.items()}
        command += [str(self.internal_port), str(self.memory), json.dumps(limits)]
        command += [
            str(self.key or "/nowhere"),
            json.dumps(self.clients),
            str(self.tls or "/nowhere"),
            str(self.http_processes),
        ]
        self.process = subprocess.Popen(command, env=environment, stdout=self.log, stderr=self.log)
        return self

    def write_gate(self, gate: GateFile) -> None:
        (self.scratch / "gate.json").write_text(dumps(gate))

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    def probe(self, path: str, timeout: float | None = None) -> tuple[int, Any]:
        """Within 5 s, the timeout of the kubelet's, where none is given."""
        timeout = limit(5) if timeout is None else timeout
        answer = httpx.get(f"http://127.0.0.1:{self.internal_port}{path}", timeout=timeout)
        return answer.status_code, answer.json() if path != "/metrics" else answer.text

    def sizing(self) -> dict[str, Any]:
        return dict(self.probe("/sizing")[1])

    def wait(self, path: str = "/readyz", status: int = 200, seconds: float = 60) -> None:
        """Waits for a probe; fails with the log when the server ends first."""

        def answers() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"ended with {self.process.returncode}: {self.output()}")
            with suppress(httpx.HTTPError):
                return self.probe(path)[0] == status
            return False

        try:
            wait_for(answers, seconds)
        except NotInTime:
            raise NotInTime(f"{path} is not {status}: {self.output()}") from None

    def children(self) -> dict[str, int]:
        """Pids of the HTTP processes (http, http1, ...), the engine process and those of ranks
        other than 0 (rank1, ...)."""
        out = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                stat = (entry / "stat").read_text()
                line = (entry / "cmdline").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) == self.process.pid:
                if "\0kvline_server.engine_process.rank\0" in line:
                    rank = RankArguments.parse(line.rstrip("\0").rpartition("\0")[2]).rank
                    out[f"rank{rank}"] = int(entry.name)
                elif "\0kvline_server.engine" in line:
                    out["engine"] = int(entry.name)
                elif "\0kvline_server.http" in line:
                    arguments = HttpArguments.parse(line.rstrip("\0").rpartition("\0")[2])
                    out[f"http{arguments.index or ''}"] = int(entry.name)
        return out

    def grammars(self) -> list[int]:
        """Pid of the process of grammars, where it runs."""
        pid = self.process.pid
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        lines = {int(each): Path(f"/proc/{each}/cmdline") for each in found}
        mark = "\0kvline_server.grammars"
        return [pid for pid, line in lines.items() if line.exists() and mark in line.read_text()]

    def ends(self) -> dict[str, float]:
        """Requests by how they ended."""
        lines = self.probe("/metrics")[1].splitlines()
        lines = [x for x in lines if x.startswith("kvline_requests_total")]
        return {x.split('"')[1]: float(x.split()[-1]) for x in lines}

    def held(self) -> list[int]:
        """Sequences that run and that wait, and tokens of the KV cache that they hold."""
        load = self.probe("/load")[1]
        return [load[name] for name in ("running", "waiting", "usedTokens")]

    def rests(self, seconds: float = 20) -> None:
        """Waits until no sequence runs or waits and no page is held. What stays held is a leak, and
        no matter of time."""
        self.counts(self.held, lambda held: not any(held), seconds)

    def ended(self, right: Callable[[dict[str, float]], bool], seconds: float = 20) -> None:
        """Waits until its counts of `ends` are right."""
        self.counts(self.ends, right, seconds)

    @staticmethod
    def counts(value: Callable[[], T], right: Callable[[T], bool], seconds: float = 20) -> None:
        """Waits until a count is right, which one that no longer changes never is."""
        settles(value, right, seconds, on="server", every=0.05)

    def sockets(self) -> int:
        """That its HTTP processes have open."""
        pids = [pid for name, pid in self.children().items() if name.startswith("http")]
        return sum(map(sockets, pids))

    def waits_until_closed(self) -> None:
        """Until a connection is refused; one that the kernel took as the port closed is reset."""

        def is_closed() -> bool:
            try:
                with suppress(httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                    httpx.get(f"{self.url}/v1/models", timeout=limit(5))
            except httpx.ConnectError:
                return True
            return False

        wait_for(is_closed)

    def complete(self, **fields: Any) -> dict[str, Any]:
        """A completion's body; fails at any status but 200."""
        body = {"model": "tiny", **fields}
        answer = self.client.post(f"{self.url}/v1/completions", json=body, timeout=limit(60))
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def resident(self) -> dict[str, float]:
        """Anonymous MiB of the HTTP and engine processes."""
        out = {}
        for name, pid in self.children().items():
            status = Path(f"/proc/{pid}/status").read_text()
            line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
            out[name] = int(line.split()[1]) / 1024
        return out

    def end(self, seconds: float = 20) -> int:
        """Waits for its exit code."""
        with spent("server"):
            return self.process.wait(limit(seconds))

    def termination(self) -> dict[str, Any]:
        return dict(json.loads((self.scratch / "state" / "termination").read_text()))

    def output(self) -> str:
        return (self.scratch / "log").read_text(errors="replace")[-3000:]

    def stop(self) -> None:
        for pid in self.children().values():
            os.kill(pid, signal.SIGCONT)  # a test may have frozen it
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.children().values():
            os.kill(pid, signal.SIGKILL)
        self.client.close()
        self.log.close()


def wait_for(what: Callable[[], Any], seconds: float = 20, every: float = 0.05) -> None:
    """Until it holds."""
    eventually(what, seconds, on="server", every=every)


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """It, started and ready; stopped at the end."""
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.stop()

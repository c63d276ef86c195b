"""The cluster's programs: start, watch, stop, restart. A pid file and a log each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from errors import ClusterError, NotWithin

SLOWNESS = "KVLINE_TEST_SLOWNESS"  # in the environment of tests, by which all limits grow


def limit(seconds: float) -> float:
    """As many seconds as this machine needs for what takes `seconds` at most elsewhere; those where
    no test run has measured it, as for a demo."""
    return seconds * float(os.environ.get(SLOWNESS, "1"))


def alive(pid: int) -> bool:
    """kill -0 says yes to a zombie that nobody has reaped; its executable is gone, though."""
    return os.path.exists(f"/proc/{pid}/exe")


def processes() -> Iterator[tuple[int, str]]:
    """Process id and command line, words separated by spaces, of all of this machine."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
            yield int(folder.name), words.decode(errors="replace")


def environment(path: str) -> dict[str, str]:
    """This process's, with a folder before the others of PATH; none where it is empty."""
    before = f"{path}:" if path else ""
    return {**os.environ, "PATH": before + os.environ["PATH"]}


@dataclass(frozen=True, slots=True)
class Programs:
    state: Path
    path: str = ""  # searched for programs before PATH

    def start(self, name: str, command: list[str]) -> None:
        (self.state / "pid").mkdir(parents=True, exist_ok=True)
        (self.state / "log").mkdir(exist_ok=True)
        (self.state / "pid" / f"{name}.cmd").write_text(json.dumps(command))
        with (self.state / "log" / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.state,
                env=environment(self.path),
            )
        (self.state / "pid" / name).write_text(str(process.pid))
        process.returncode = 0  # it outlives this program on purpose

    def running(self) -> dict[str, int]:
        folder = self.state / "pid"
        files = [p for p in folder.glob("*") if p.suffix != ".cmd"] if folder.is_dir() else []
        return {p.name: int(p.read_text()) for p in files if alive(int(p.read_text()))}

    def wait_for(self, what: str, seconds: float, ready: Callable[[], bool]) -> None:
        """Polls a condition, and fails at once when one of the programs has ended."""
        wanted = {p.name for p in (self.state / "pid").glob("*") if p.suffix != ".cmd"}
        end = time.monotonic() + limit(seconds)
        while not ready():
            for name in wanted - set(self.running()):
                tail = (self.state / "log" / f"{name}.log").read_text(errors="replace")[-1500:]
                raise ClusterError(f"{name} ended while waiting for {what}:\n{tail}")
            if time.monotonic() > end:
                raise NotWithin(
                    f"{what}: not within {limit(seconds):.0f} s; logs in {self.state}/log"
                )
            time.sleep(0.1)

    def stop(self, names: list[str], how: signal.Signals, seconds: float = 5.0) -> None:
        """Terminates all, waits, and kills what is left."""
        pids = {name: pid for name, pid in self.running().items() if name in names}
        for pid in pids.values():
            _signal(pid, how)
        end = time.monotonic() + seconds
        for name, pid in pids.items():
            while alive(pid) and time.monotonic() < end:
                time.sleep(0.02)
            _signal(pid, signal.SIGKILL)
            (self.state / "pid" / name).unlink(missing_ok=True)

    def restart(self, name: str) -> None:
        """Kills a program and starts it again; for failure tests."""
        command = json.loads((self.state / "pid" / f"{name}.cmd").read_text())
        self.stop([name], signal.SIGKILL)
        self.start(name, command)


def _signal(pid: int, how: signal.Signals) -> None:
    try:
        os.kill(pid, how)
    except ProcessLookupError:
        return

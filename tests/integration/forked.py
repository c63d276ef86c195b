"""Operators that are forked off a process which has imported all that they import: a start takes a
second of CPU less. What runs is the main function of `python -m kvline_operator`."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from kubernetes.config import kube_config

from kvline_operator.__main__ import main

MODULE = "kvline_operator"
LOST = -1  # the exit code of one whose own is not known


class Forked:
    """Of a forked operator what subprocess.Popen has of one that was started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def end(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired([MODULE], timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, how: signal.Signals) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, how)


class Source:
    """The process that forks. One test at a time asks it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._made: dict[int, Forked] = {}
        self._begun = threading.Semaphore(0)
        self._newest: Forked | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def fork(self, words: list[str], environment: dict[str, str], log: Path) -> Forked:
        assert self._process.stdin is not None
        log.touch()
        asked = {"words": words, "environment": environment, "log": str(log)}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        self._begun.acquire()
        assert self._newest is not None, "the process that forks operators has ended"
        return self._newest

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            pid, *code = map(int, line.split())
            if code:
                self._made.pop(pid).end(code[0])
            else:
                self._made[pid] = self._newest = Forked(pid)
                self._begun.release()
        # It has ended, and says no more of those that it forked.
        for forked in self._made.values():
            forked.send_signal(signal.SIGKILL)
            forked.end(LOST)
        self._newest = None
        self._begun.release()


@cache
def source() -> Source:
    """Of this worker, for as long as it lives: at the end of its input it ends."""
    return Source()


def serve() -> dict[str, Any] | None:
    """Forks for each line of the input, and writes each pid, and once more with its exit code when
    it has ended. One thread: a fork has none of the others. -> in a fork, what it was asked for;
    None at the end of the input"""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 1 << 10)
            for pid, code in ended():
                print(pid, code, flush=True)
        if 0 in ready:
            line = sys.stdin.readline()
            if not line:
                return None
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(woken)
                os.close(wake)
                return dict(json.loads(line))
            print(pid, flush=True)


def ended() -> Iterator[tuple[int, int]]:
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found[0], os.waitstatus_to_exitcode(found[1])


def become(asked: dict[str, Any]) -> None:
    """Runs the operator in this process, with the environment and the log that it was asked for."""
    os.environ.clear()
    os.environ.update(asked["environment"])
    # The kubernetes client has read it once, when it was imported.
    kube_config.KUBE_CONFIG_DEFAULT_LOCATION = os.environ["KUBECONFIG"]
    with open(os.devnull) as nothing, open(asked["log"], "ab") as log:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.argv = [MODULE, *asked["words"]]
    sys.exit(main())


if __name__ == "__main__":
    asked = serve()
    if asked is not None:
        become(asked)

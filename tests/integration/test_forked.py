"""Operators that are forked off one process: none outlives what knows of its end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from forked import LOST, Source
from programs import alive
from waiting import eventually, limit

pytestmark = pytest.mark.integration


def test_an_operator_ends_with_the_process_that_forked_it(tmp_path: Path) -> None:
    """It never ended for the test, which was then only late, and it went on by itself."""
    source = Source()
    with source._process, ended(source._process):
        log, kubeconfig = tmp_path / "log", tmp_path / "kubeconfig"
        os.mkfifo(kubeconfig)  # which nobody writes: there it waits, with all that it needs
        words = ["--default-image", "x@sha256:" + 64 * "0"]
        operator = source.fork(words, {**os.environ, "KUBECONFIG": str(kubeconfig)}, log)
        output = Path(f"/proc/{operator.pid}/fd/1")
        eventually(lambda: output.readlink() == log)  # and no longer the pipe of the one above
        source._process.kill()
        assert operator.wait(limit(20)) == LOST
        eventually(lambda: not alive(operator.pid))


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever fails: to close its output would wait for the thread that reads it."""
    try:
        yield
    finally:
        process.kill()

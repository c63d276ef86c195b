"""The process of grammars beside a real server: it may end, and nothing else does."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from servers import Server
from waiting import eventually, limit

from kvline_server.grammars.compiler import Compiler
from kvline_server.grammars.grammar import Grammar
from kvline_server.options.arguments import EngineArguments
from kvline_server.parent.grammars import LONGEST_FOLDER, SOCKET, socket_folder


def compiles(path: Path) -> bytes:
    async def work() -> bytes:
        compiler = Compiler(str(path), limit(30))
        with await compiler.compiled(Grammar("regex", "[0-9]+")) as key:
            pass
        await compiler.close()
        return key

    return asyncio.run(work())


@pytest.mark.process
def test_a_process_of_grammars_that_ends_is_started_again_and_the_pod_serves_on(
    start: Callable[..., Server],
) -> None:
    server = start()
    server.wait()
    children = server.children()
    line = Path(f"/proc/{children['engine']}/cmdline").read_text()
    service = EngineArguments.parse(line.rstrip("\0").rpartition("\0")[2]).grammars
    assert service is not None and compiles(service.path) == Grammar("regex", "[0-9]+").key()
    for _ in range(2):
        old = server.grammars()
        os.kill(old[0], signal.SIGKILL)
        assert server.complete(prompt="hi", max_tokens=3)["choices"]
        eventually(lambda old=old: server.grammars() not in (old, []), 20, on="server")
        assert compiles(service.path), "at the same place"
    assert server.probe("/readyz")[0] == 200
    assert "the process of grammars ended with signal 9" in server.output()
    assert server.children() == children
    (last,) = server.grammars()
    server.process.send_signal(signal.SIGTERM)
    assert server.end(20) == 0
    assert not Path(f"/proc/{last}").exists() and not service.path.parent.exists()


def test_a_socket_has_a_short_path_and_those_of_killed_parents_are_removed(tmp_path: Path) -> None:
    state = tmp_path / ("x" * LONGEST_FOLDER)
    state.mkdir()
    elsewhere = socket_folder(state)
    assert elsewhere.is_dir() and state not in elsewhere.parents
    elsewhere.rmdir()
    short = Path("/tmp") / f"kvline-test-{os.getpid()}"
    short.mkdir()
    try:
        living, dead, bare = (socket_folder(short) for _ in range(3))
        with closing(socket.socket(socket.AF_UNIX)) as kept:
            kept.bind(str(living / SOCKET))
            kept.listen()
            with closing(socket.socket(socket.AF_UNIX)) as ended:
                ended.bind(str(dead / SOCKET))
                ended.listen()
            made = socket_folder(short)
            assert set(short.iterdir()) == {living, bare, made}
        for folder in (living, bare, made):
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
    finally:
        short.rmdir()

"""The process of grammars beside a real server: it may end, and nothing else does."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from servers import Server
from waiting import eventually, limit

from kvline_server.errors import ConfigInvalid
from kvline_server.grammars.compiler import Compiler
from kvline_server.grammars.grammar import Grammar
from kvline_server.ipc.messages import Channel
from kvline_server.options.arguments import EngineArguments
from kvline_server.options.grammars import SMALL
from kvline_server.options.options import Options
from kvline_server.parent import grammars
from kvline_server.parent.children import Child
from kvline_server.parent.grammars import FOLDER, LONGEST_FOLDER, socket_folder


def compiles(path: Path) -> bytes:
    async def work() -> bytes:
        compiler = Compiler(str(path), limit(30))
        with await compiler.compiled(Grammar("regex", "[0-9]+")) as key:
            pass
        await compiler.close()
        return key

    return asyncio.run(work())


def another(server: Server, old: list[int]) -> bool:
    return server.grammars() not in (old, [])


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
        eventually(partial(another, server, old), 20, on="server")
        assert compiles(service.path), "at the same place"
    assert server.probe("/readyz")[0] == 200
    assert "the process of grammars ended with signal 9" in server.output()
    assert server.children() == children
    (last,) = server.grammars()
    server.process.send_signal(signal.SIGTERM)
    assert server.end(20) == 0
    assert not Path(f"/proc/{last}").exists() and not service.path.parent.exists()


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder of a short path, whatever the test's are."""
    with tempfile.TemporaryDirectory(prefix="kvline-test-", dir="/tmp") as made:
        yield Path(made)


def opened(state: Path) -> Path:
    """A folder to whose socket nobody listens any more."""
    folder, listener = socket_folder(state)
    listener.close()
    return folder


def test_a_socket_has_a_short_path_and_those_of_killed_parents_are_removed(
    tmp_path: Path, short: Path
) -> None:
    state = tmp_path / ("x" * LONGEST_FOLDER)
    state.mkdir()
    elsewhere = opened(state)
    assert elsewhere.is_dir() and state not in elsewhere.parents
    shutil.rmtree(elsewhere)
    longest = short / ("x" * (LONGEST_FOLDER - 2 - len(str(short))))
    longest.mkdir()
    assert opened(longest).parent == longest
    living, listener = socket_folder(short)
    with closing(listener):
        dead, bare = opened(short), Path(tempfile.mkdtemp(prefix=FOLDER, dir=short))
        made = opened(short)
        assert set(short.iterdir()) == {longest, living, bare, made}
    assert not dead.exists()


def test_folders_of_another_host_stay(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sockets answer nobody here."""
    monkeypatch.setattr(socket, "gethostname", lambda: "server-0")
    first = opened(short)
    monkeypatch.setattr(socket, "gethostname", lambda: "server-1")
    second = opened(short)
    assert set(short.iterdir()) == {first, second}


def test_a_place_without_sockets_is_passed_over_and_none_is_an_error_of_the_settings(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(short / "missing")
    assert folder.parent == Path(tempfile.gettempdir())
    shutil.rmtree(folder)

    def refused(path: Path) -> socket.socket:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(grammars, "listen_for_grammars", refused)
    with pytest.raises(ConfigInvalid, match=f"{short} .Operation not supported.*set TMPDIR"):
        socket_folder(short)
    assert not list(short.iterdir())


def test_a_start_that_fails_is_made_again(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a node that has no process to spare."""
    starts: list[int] = []

    def begin(*_: object) -> Child:
        starts.append(0)
        if len(starts) == 2:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        ours, theirs = socket.socketpair()
        theirs.close()
        return Child(subprocess.Popen(["true"]), Channel(ours), [])

    log: list[str] = []
    monkeypatch.setattr(grammars, "start_grammars", begin)
    monkeypatch.setattr(grammars, "FIRST_PAUSE", 0.01)
    config = short / "launch.json"
    made = grammars.GrammarProcess(Options(config=config, state_dir=short), SMALL, log.append)

    def started() -> bool:
        made.tend()
        return len(starts) >= 3

    eventually(started, 10, on="server")
    assert any("Resource temporarily unavailable; tried again in" in line for line in log)
    made.close()

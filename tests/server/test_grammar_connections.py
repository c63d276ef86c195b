"""Connections of the grammar processes: what their ends count, keep and wait for."""

from __future__ import annotations

import os
import socket
import time
from contextlib import closing
from pathlib import Path

from waiting import limit

from kvline_server.grammars import matchers
from kvline_server.grammars.grammar import Grammar
from kvline_server.grammars.matchers import Matchers
from kvline_server.grammars.messages import Wanted

DIGITS = Grammar("regex", "[0-9]{4}")


def test_a_process_that_does_not_answer_is_waited_for_once(tmp_path: Path) -> None:
    """Not by each sequence, while the engine makes no step."""
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        made = Matchers(str(tmp_path / "socket"), os.memfd_create("rows"), 64)
        began = time.monotonic()
        for id in range(128):
            made.begin(id, b"key")
        assert time.monotonic() - began < limit(1)
        made.ask([Wanted(id, [], [], id) for id in range(64)])
        assert set(made.wait().failed.values()) == {matchers.STARTING}
        made.close()

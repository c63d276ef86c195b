"""Our own server by the check that others can use: its internal port, from the first second."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from servers import SEARCHED, Server

from kvline_contract.report import State

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "conformance"))

from check import check

pytestmark = pytest.mark.process


def test_it_keeps_the_contract_from_its_first_second(start: Callable[..., Server]) -> None:
    server = start(**SEARCHED)
    server.wait("/livez", 200, 10)
    seen = check(f"http://127.0.0.1:{server.internal_port}", 90)
    assert seen.wrong == []
    assert seen.reports[-1].state is State.VALIDATED and len(seen.reports) > 5

"""Our own server by the check that others can use: its internal port, from the first second."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from servers import Server

from kvline_contract.launch import CapacityOptions
from kvline_contract.report import State

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "conformance"))

from check import check

pytestmark = pytest.mark.process


def test_it_keeps_the_contract_from_its_first_second(tiny_model: Path, tmp_path: Path) -> None:
    capacity = CapacityOptions(headroom_mib=8)
    server = Server(tiny_model, tmp_path, capacity=capacity, memory=900 << 20).start()
    try:
        server.wait("/livez", 200, 10)
        seen = check(f"http://127.0.0.1:{server.internal_port}", 90)
    finally:
        server.stop()
    assert seen.wrong == []
    assert seen.reports[-1].state is State.VALIDATED and len(seen.reports) > 5

"""How the operator's process starts."""

from __future__ import annotations

import asyncio
import logging

import pytest
from kubernetes import client

from kvline_contract.listening import listen
from kvline_operator import __main__ as operator
from kvline_operator import kube
from kvline_operator.errors import PortTaken
from kvline_operator.kube import Kube
from kvline_operator.settings import Settings


@pytest.mark.parametrize("port", ["page_port", "probe_port"])
def test_a_port_that_is_taken_ends_the_start_before_it_has_the_lease(
    port: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the lease in hand it crashed with a traceback, and no standby could follow."""
    with listen("", 0) as other:
        taken = other.getsockname()[1]
        settings = Settings("image", **{"page_port": 0, "probe_port": 0, port: taken})
        # A request of the lease would raise ApiUnavailable: there is no cluster.
        with pytest.raises(PortTaken, match=f"port {taken}: Address already in use"):
            asyncio.run(operator.operate(settings, Kube(client.ApiClient()), None))
        monkeypatch.setattr(operator, "parse", lambda words: settings)
        monkeypatch.setattr(kube, "connect", lambda: Kube(client.ApiClient()))
        for found in ("_missing_crd", "_older_crd"):
            monkeypatch.setattr(operator, found, lambda client: None)
        assert operator.main() == 1
    assert f"kvline-operator: port {taken}: Address" in capsys.readouterr().err


def test_a_port_that_is_taken_meanwhile_is_one_line_too() -> None:
    with pytest.raises(PortTaken, match="port 5: in use"), operator._own(5):
        raise OSError(98, "in use")


@pytest.mark.parametrize(("level", "heard"), [("debug", True), ("info", False), ("error", False)])
def test_the_log_has_the_level_that_was_asked_for(level: str, heard: bool) -> None:
    """And of libraries at most «info»: the client's debug log has whole answers."""
    root, ours = logging.getLogger(), logging.getLogger("kvline")
    before = root.level, ours.level
    try:
        operator._log(level)
        assert ours.isEnabledFor(logging.DEBUG) is heard
        assert ours.isEnabledFor(logging.INFO) is (level != "error")
        assert not logging.getLogger("kubernetes.client.rest").isEnabledFor(logging.DEBUG)
    finally:
        root.setLevel(before[0])
        ours.setLevel(before[1])

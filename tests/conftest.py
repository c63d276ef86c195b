"""Shared by all tests: where the cluster's modules are found, how long a test may take, and what a
run by stages writes down."""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [
    str(Path(__file__).parent / name)
    for name in ("cluster", "server", "operator", "suite", "clients", ".")
]

import waiting  # noqa: E402

with suppress(ImportError):  # a machine for GPU tests has none
    import hypothesis

    # Time is limited by pytest's own limit, which fits this machine: an example's 200 ms do not,
    # and to be slow to draw examples is no fault of a test. Examples may share a folder that each
    # begins anew. A test that names checks of its own would lose these.
    hypothesis.settings.register_profile(
        "tests",
        deadline=None,
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.function_scoped_fixture,
        ],
    )
    hypothesis.settings.load_profile("tests")


def pytest_configure(config: Any) -> None:
    # A shell ignores it in what it starts in the background, and programs that tests interrupt
    # would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stage = os.environ.get("KVLINE_STAGE")  # only a run by stages collects
    if stage:
        import catalogue
        import results

        catalogue.configure(config, stage)
        results.configure(config, stage)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """A test's limit is as much longer as this machine is slower."""
    if not config.pluginmanager.hasplugin("timeout") or config.getoption("timeout") is not None:
        return
    usual = float(config.getini("timeout"))
    for item in items:
        mark = item.get_closest_marker("timeout")
        seconds, more = usual, {}
        if mark is not None:
            more = dict(mark.kwargs)
            seconds = float(mark.args[0] if mark.args else more.pop("timeout"))
        item.add_marker(pytest.mark.timeout(waiting.limit(seconds), **more), append=False)


def pytest_collection_finish() -> None:
    """What was imported stays: no collection of a test visits it again."""
    gc.freeze()

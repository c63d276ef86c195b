"""A reconcile goes through the operator's packages in one direction."""

from __future__ import annotations

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

import pytest
from kubernetes import client, config
from playground import IMAGE, Operator, Space
from rolling import Service

from kvline_operator import kube
from kvline_operator.api.key import Key
from kvline_operator.observe.claims import Claims
from kvline_operator.observe.ownership import PodOwnership
from kvline_operator.observe.reports import Reports
from kvline_operator.reconcile import Context, reconcile
from kvline_operator.report.status_cache import StatusCache
from kvline_operator.settings import Settings, parse

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

BEFORE = 366  # at 7fc0ac7, where each module was a room of its own (decisions/047)


def context(operator: Operator, settings: Settings) -> Context:
    made = client.Configuration()
    path = str(operator.kubeconfig)
    config.load_kube_config(path, client_configuration=made)  # type: ignore[no-untyped-call]
    api = kube.Kube(kube.api_client(made))
    return Context(
        kube=api,
        settings=settings,
        reports=Reports(settings.report_port, 1.0, 1.0),
        pool=ThreadPoolExecutor(4),
        status_cache=StatusCache(),
        pod_ownership=PodOwnership(api),
        claims=Claims(api, settings.own_namespace),
    )


def rooms_of(made: Context, key: Key) -> list[str]:
    """The package of each function that a reconcile calls, in order."""
    called: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        name = str(frame.f_globals.get("__name__", ""))
        if event == "call" and name.startswith("kvline_operator."):
            called.append(name.split(".")[1])

    sys.setprofile(note)
    try:
        reconcile(made, key)
    finally:
        sys.setprofile(None)
    return called


def returns(called: list[str]) -> int:
    """How often a package is entered that had been left."""
    visits = [name for name, _ in groupby(called)]
    return len(visits) - len(set(visits))


def test_a_reconcile_seldom_returns_to_a_package_that_it_left(
    service: Service, operator: Operator, space: Space
) -> None:
    """Of a service with two ready replicas, where there is nothing to write."""
    words = ["--default-image", IMAGE, "--allow-image-tags", "--namespace", space.name]
    made, key = context(operator, parse(words)), Key(space.name, "chat")
    assert operator.process is not None
    operator.process.send_signal(signal.SIGSTOP)
    try:
        reconcile(made, key)  # fills the caches
        before = made.kube.writes
        called = rooms_of(made, key)
    finally:
        operator.process.send_signal(signal.SIGCONT)
    assert made.kube.writes == before
    assert {"api", "observe", "store", "plan", "apply", "report"} <= set(called)
    print(f"a reconcile returns {returns(called)} times, of {BEFORE} at 7fc0ac7")
    assert returns(called) <= BEFORE // 3, [name for name, _ in groupby(called)]

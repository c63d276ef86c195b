"""The operator's notices to pods, each with the token of its revision."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvline_contract.codec import ContractError
from kvline_contract.launch import GateFile
from kvline_contract.names import GATE_FILE
from kvline_operator.apply.tokens import Tokens
from kvline_operator.observe.pods import PodView
from kvline_operator.observe.reports import Reports

Object = dict[str, Any]


def digest(
    tokens: Tokens, revision: tuple[str, str], seen: Object | None, rolls: bool
) -> str | None:
    """For the gate file of a revision (a service's UID and a name); `seen` is its ConfigMap. While
    the service `rolls` out another, its pods may need notices of this operator's."""
    if seen is None:
        return tokens.digest(revision, None, renew=True)
    try:
        written = GateFile.parse((seen.get("data") or {}).get(GATE_FILE, "")).token_sha256
    except ContractError:
        written = None
    return tokens.digest(revision, written, renew=rolls)


def end_waits(
    reports: Reports,
    pool: ThreadPoolExecutor,
    tokens: Tokens,
    service: str,
    waiting: Sequence[tuple[str, str]],
) -> None:
    """To terminating pods, by revision and address, whose preStop wait serves nobody."""

    def end(pod: tuple[str, str]) -> None:
        revision, address = pod
        reports.end_wait(address, tokens.of((service, revision)))

    list(pool.map(end, waiting))


def open_gates(
    reports: Reports,
    pool: ThreadPoolExecutor,
    tokens: Tokens,
    service: str,
    waiting: Sequence[PodView],
) -> None:
    """To pods whose gate file is open, which has not arrived yet."""

    def open_gate(pod: PodView) -> None:
        reports.open_gate(pod.uid, pod.address, tokens.of((service, pod.revision)))

    list(pool.map(open_gate, waiting))

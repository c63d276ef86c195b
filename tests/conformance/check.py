"""Whether an engine keeps the contract: watches its internal port from its first second until it is
Validated, or has failed, and says what it got wrong.

    python tests/conformance http://ADDRESS:8001
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kvline_contract.codec import ContractError
from kvline_contract.load import MAX_LOAD_BYTES, Load
from kvline_contract.names import SIZING_PATH
from kvline_contract.report import MAX_REPORT_BYTES, REPORT_VERSION, SizingReport, State

ANSWER_SECONDS = 5  # as the operator gives a pod
# A state may follow those that stand before it; ShrunkRetry leads back.
AFTER = {
    State.LOADING: {State.AUTOTUNING, State.PROBING},
    State.AUTOTUNING: {State.PROBING},
    State.PROBING: {State.STRESSING, State.VALIDATING},
    State.STRESSING: {State.VALIDATING},
    State.VALIDATING: {State.SHRUNK_RETRY, State.VALIDATED},
    State.SHRUNK_RETRY: {State.VALIDATING, State.STRESSING},  # after a record that did not fit
    State.VALIDATED: set(),
    State.FAILED: set(),
}


@dataclass
class Seen:
    """An engine's reports, in order, and the problems found in them."""

    reports: list[SizingReport] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def blame(self, good: bool, text: str) -> None:
        if not good and text not in self.wrong:
            self.wrong.append(text)


def check(base: str, seconds: float = 600, say: Callable[[str], None] = print) -> Seen:
    """Everything that the contract makes visible from outside."""
    seen, end = Seen(), time.monotonic() + seconds
    while time.monotonic() < end:
        report = _sizing(base, seen)
        if report is not None and (not seen.reports or report != seen.reports[-1]):
            if not seen.reports or report.state is not seen.reports[-1].state:
                say(f"{report.state}")
            seen.reports.append(report)
        if report is None or report.state is State.FAILED:
            break
        _probes(base, report, seen)
        if report.state is State.VALIDATED:
            _load(base, seen)
            _older(base, seen)
            break
        time.sleep(0.05)
    judge(seen)
    return seen


def judge(seen: Seen) -> None:
    """Rules for any engine's list of reports. Pure."""
    seen.blame(bool(seen.reports), "/sizing never gave a report")
    for before, after in pairwise(seen.reports):
        seen.blame(after.sequence > before.sequence, "sequence does not rise with each change")
        seen.blame(before.pod_uid == after.pod_uid, "podUID changed")
        moved = before.state is not after.state
        skipped = moved and after.state is not State.FAILED and after.state not in _reach(before)
        seen.blame(not skipped, f"{after.state} cannot follow {before.state}")
        seen.blame(
            after.stages[: len(before.stages)] == before.stages, "a stage that had passed changed"
        )
    if seen.reports and seen.reports[-1].state is State.VALIDATED:
        _judge_result(seen, seen.reports[-1])
    elif seen.reports and seen.reports[-1].state is State.FAILED:
        seen.blame(seen.reports[-1].failure is not None, "Failed without a failure")
    elif seen.reports:
        seen.blame(False, f"it ended in {seen.reports[-1].state}")


def _reach(before: SizingReport) -> set[State]:
    """States that may be seen next: a poll may miss short ones in between."""
    found: set[State] = set()
    edge = {before.state}
    while edge:
        edge = set().union(*(AFTER[s] for s in edge)) - found
        found |= edge
    return found


def _judge_result(seen: Seen, report: SizingReport) -> None:
    result, effective = report.result, report.effective
    if result is None or effective is None:
        seen.blame(False, "Validated without result or effective settings")
        return
    seen.blame(result.kv_tokens >= effective.max_model_len, "a request of maxModelLen does not fit")
    survived = [a for a in report.attempts if a.outcome == "Survived"]
    seen.blame(bool(survived), "no attempt survived")
    if survived:
        seen.blame(
            survived[-1].target_tokens >= result.kv_tokens,
            "kvTokens is more than the attempt that survived",
        )
    seen.blame(len(result.fingerprint) == 32, "the fingerprint has not 32 characters")


def _sizing(base: str, seen: Seen) -> SizingReport | None:
    status, body = _get(f"{base}{SIZING_PATH}?version={REPORT_VERSION}")
    seen.blame(status == 200, f"/sizing answered {status}; it is always 200")
    seen.blame(len(body) <= MAX_REPORT_BYTES, "the report is longer than the contract allows")
    if status != 200:
        return None
    try:
        return SizingReport.parse(body)
    except ContractError as error:
        seen.blame(False, f"/sizing: {error}")
        return None


def _older(base: str, seen: Seen) -> None:
    """Operators from before version 2 name no version, and read 1 alone."""
    status, body = _get(f"{base}{SIZING_PATH}")
    try:
        good = status == 200 and json.loads(body)["version"] == 1
    except (ValueError, KeyError, TypeError):
        good = False
    seen.blame(good, "/sizing is not of version 1 where the request names none")


def _probes(base: str, report: SizingReport, seen: Seen) -> None:
    done = report.state is State.VALIDATED
    for path in ("/startupz", "/readyz", "/livez"):
        status, body = _get(f"{base}{path}")
        seen.blame(status in (200, 503), f"{path} answered {status}")
        try:
            seen.blame("reason" in json.loads(body), f"{path} gives no reason")
        except ValueError:
            seen.blame(False, f"{path} is no JSON")
        if path == "/readyz" and status == 200:
            # It may have been validated since the report was read.
            now = _sizing(base, seen)
            ready = done or (now is not None and now.state is State.VALIDATED)
            seen.blame(ready, "/readyz is 200 before Validated")
    status, _ = _get(f"{base}/livez")
    seen.blame(status == 200, f"/livez is {status} while it sizes")
    if done:
        seen.blame(_get(f"{base}/startupz")[0] == 200, "/startupz is not 200 after Validated")
    elif _get(f"{base}/load")[0] == 200:
        now = _sizing(base, seen)
        validated = now is not None and now.state is State.VALIDATED
        seen.blame(validated, "/load is 200 before Validated")


def _load(base: str, seen: Seen) -> None:
    status, body = _get(f"{base}/load")
    seen.blame(status == 200, f"/load is {status} after Validated")
    seen.blame(len(body) <= MAX_LOAD_BYTES, "the load is longer than the contract allows")
    try:
        load = Load.parse(body)
    except ContractError as error:
        seen.blame(False, f"/load: {error}")
        return
    result = seen.reports[-1].result
    if result is not None:
        seen.blame(load.kv_tokens == result.kv_tokens, "/load and /sizing differ in kvTokens")


def _get(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:
            return answer.status, answer.read(2 * MAX_REPORT_BYTES)
    except urllib.error.HTTPError as error:
        return error.code, error.read(4096)
    except OSError as error:
        return 0, str(error).encode()


def main(base: str) -> int:
    seen = check(base.rstrip("/"))
    for text in seen.wrong:
        print(f"wrong: {text}")
    if not seen.wrong:
        last: Any = seen.reports[-1]
        tokens = f", {last.result.kv_tokens} KV tokens" if last.result else ""
        print(f"it keeps the contract: {len(seen.reports)} reports, {last.state}{tokens}")
    return 1 if seen.wrong else 0

"""Validated sizes by fingerprint, from which later replicas of that fingerprint start.

Pure. They are stored in a ConfigMap of the service that its pods mount, so that a replica starts
without the operator. See spec.capacity.reuse.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from kvline_contract.codec import dumps
from kvline_contract.launch import FREE_NOISE, MAX_RECORDS, VERSION, Record, Records, Reuse
from kvline_contract.names import RECORDS_FILE
from kvline_contract.report import Outcome, Result, SizingReport, Source

# Above what starts of one spec differ by, alone and beside processes that take every core: at least
# a quarter more than `python bench spread` measured (bench/results/results.jsonl).
DRIFT_PERCENT = 4


def read(config_map: dict[str, Any] | None) -> dict[str, Record]:
    """The stored records. Raises ContractError where they cannot be read, such as those of another
    version."""
    text = ((config_map or {}).get("data") or {}).get(RECORDS_FILE)
    if not isinstance(text, str):
        return {}
    return Records.parse(text).records


def merge(kept: dict[str, Record], reports: Iterable[SizingReport]) -> dict[str, Record]:
    """`kept` plus what replicas have measured since; the same reports change it once. A record of
    an earlier operator gets the kernels that a replica has chosen since."""
    out, found = dict(kept), list(reports)
    searched: dict[str, list[_Search]] = {}
    for report in found:
        if (result := report.result) is not None and result.source is Source.MEASURED:
            search = _Search(Record.of(result), _failed(report))
            searched.setdefault(result.fingerprint, []).append(search)
    for fingerprint, searches in searched.items():
        out[fingerprint] = _decide(out.get(fingerprint), searches)
    for result in (report.result for report in found if report.result is not None):
        old = out.get(result.fingerprint)
        if old is not None and old.like(len(result.ranks)) and not old.gemm_kernels:
            out[result.fingerprint] = replace(old, gemm_kernels=result.gemm_kernels)
    newest = sorted(out.items(), key=lambda item: (item[1].measured_at, item[0]))[-MAX_RECORDS:]
    return dict(sorted(newest))


@dataclass(frozen=True, slots=True)
class _Search:
    """What one replica found."""

    record: Record
    failed: int  # tokens of the largest size that it tried in vain, or 0

    def refutes(self, other: Record) -> bool:
        """Whether it tried the other's size in vain, with as much memory free."""
        smaller = self.record.kv_tokens < other.kv_tokens <= self.failed
        return smaller and not self.record.had_less_free_than(other.free_mib)


def _failed(report: SizingReport) -> int:
    failed = (Outcome.OUT_OF_MEMORY, Outcome.KILLED)
    sizes = (a.target_tokens for a in report.attempts if a.number and a.outcome in failed)
    return max(sizes, default=0)


def _decide(old: Record | None, searches: list[_Search]) -> Record:
    """Which record of one fingerprint is kept: of the number of ranks that was found last. All are
    compared at once: by pairs, with free memory that differs by noise, three replaced each other
    for ever."""
    ranks = searches[-1].record.ranks
    searches = [each for each in searches if each.record.ranks == ranks]

    def holds(record: Record) -> bool:
        return not any(search.refutes(record) for search in searches)

    found = [each.record for each in searches if holds(each.record)]
    if old is not None and old.like(ranks or 1) and holds(old):
        best = old
    else:
        best = max(found, key=lambda each: each.kv_tokens)
    while (better := _better(best, found)) is not best:
        best = better
    return best


def _better(old: Record, found: list[Record]) -> Record:
    """Of two sizes that which was measured with more memory free: the other was taken beside a
    neighbour. With as much the smaller, which both survived. One that has drifted to less replaces
    none: its neighbour may have come after its free memory was read."""
    fit = [old, *(n for n in found if n.kv_tokens >= old.kv_tokens or not drifted(old, n))]
    most = max(each.free_mib for each in fit)
    near = [each for each in fit if each.free_mib + FREE_NOISE >= most]
    return min(near, key=lambda each: each.kv_tokens)


def drifted(record: Record, result: Record | Result) -> bool:
    """Whether a size differs from the recorded one by more than DRIFT_PERCENT, and is not larger
    because more memory was free."""
    if record.had_less_free_than(result.free_mib) and result.kv_tokens >= record.kv_tokens:
        return False
    return abs(result.kv_tokens - record.kv_tokens) * 100 > DRIFT_PERCENT * record.kv_tokens


def text(records: dict[str, Record], reuse: Reuse) -> str:
    """The file that pods read; deterministic."""
    return dumps(Records(VERSION, reuse, records))

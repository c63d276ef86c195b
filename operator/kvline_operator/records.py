"""Stored: validated sizes by fingerprint, from which later replicas of that fingerprint start.

Pure. They are stored in a ConfigMap of the service that its pods mount, so that a replica starts
without the operator. See spec.capacity.reuse.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kvline_contract.codec import dumps
from kvline_contract.launch import FREE_NOISE, MAX_RECORDS, VERSION, Record, Records, Reuse
from kvline_contract.names import RECORDS_FILE
from kvline_contract.report import Result, Source

# Above what starts of one spec differ by, alone and beside processes that take every core: at least
# a quarter more than `python bench spread` last measured (bench/results/results.jsonl).
DRIFT_PERCENT = 4


def read(config_map: dict[str, Any] | None) -> dict[str, Record]:
    """The stored records. Raises ContractError where they cannot be read, such as those of another
    version."""
    text = ((config_map or {}).get("data") or {}).get(RECORDS_FILE)
    if not isinstance(text, str):
        return {}
    return Records.parse(text).records


def merge(kept: dict[str, Record], results: Iterable[Result]) -> dict[str, Record]:
    """`kept` plus what replicas have measured since. Of two sizes of one fingerprint that which was
    measured with more memory free is recorded: the other was taken beside a neighbour. With as much
    the smaller is, which both survived; one that drifted is not recorded, and one of another number
    of ranks replaces it. A record of an earlier operator gets the kernels that a replica has chosen
    since."""
    out = dict(kept)
    for result in results:
        old = out.get(result.fingerprint)
        if old is not None and not old.like(len(result.ranks)):
            old = None
        if old is not None and not old.gemm_kernels and result.gemm_kernels:
            old = out[result.fingerprint] = replace(old, gemm_kernels=result.gemm_kernels)
        if result.source is not Source.MEASURED:
            continue
        if old is None or old.has_less_than(result.free_mib) or _is_smaller(result, old):
            out[result.fingerprint] = Record.of(result)
    newest = sorted(out.items(), key=lambda item: (item[1].measured_at, item[0]))[-MAX_RECORDS:]
    return dict(sorted(newest))


def _is_smaller(result: Result, old: Record) -> bool:
    smaller = result.kv_tokens < old.kv_tokens and not drifted(old, result)
    return smaller and result.free_mib + FREE_NOISE >= old.free_mib


def drifted(record: Record, result: Result) -> bool:
    """Whether a size differs from the recorded one by more than DRIFT_PERCENT, and is not larger
    because more memory was free."""
    if record.has_less_than(result.free_mib) and result.kv_tokens >= record.kv_tokens:
        return False
    return abs(result.kv_tokens - record.kv_tokens) * 100 > DRIFT_PERCENT * record.kv_tokens


def text(records: dict[str, Record], reuse: Reuse) -> str:
    """The file that pods read; deterministic."""
    return dumps(Records(VERSION, reuse, records))

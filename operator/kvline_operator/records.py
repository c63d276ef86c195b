"""Remember: sizes that were searched for and survived, by fingerprint, for replicas yet to come.

Pure. The file is a ConfigMap of the service's own; pods mount it and pick their own record, so the
operator is asked nothing when a replica starts. Product section 3, «Reuse».
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvline_contract.codec import ContractError, dumps
from kvline_contract.launch import MAX_RECORDS, VERSION, Record, Records, Reuse
from kvline_contract.names import RECORDS_FILE
from kvline_contract.report import Result, Source

DRIFT_PERCENT = 3


def read(config_map: dict[str, Any] | None) -> dict[str, Record]:
    """What is kept; nothing when somebody made it unreadable, and it is then written anew."""
    text = ((config_map or {}).get("data") or {}).get(RECORDS_FILE)
    if not isinstance(text, str):
        return {}
    try:
        return Records.parse(text).records
    except ContractError:
        return {}


def merge(kept: dict[str, Record], results: Iterable[Result]) -> dict[str, Record]:
    """`kept` and what replicas have measured since. Of two searches of one fingerprint the smaller
    size stays, which both survived; one that drifted changes no record."""
    out = dict(kept)
    for result in results:
        if result.source is not Source.MEASURED:
            continue
        old = out.get(result.fingerprint)
        smaller = old is not None and result.kv_tokens < old.kv_tokens
        if old is None or (smaller and not drifted(old, result.kv_tokens)):
            out[result.fingerprint] = Record.of(result)
    newest = sorted(out.items(), key=lambda item: (item[1].measured_at, item[0]))[-MAX_RECORDS:]
    return dict(sorted(newest))


def drifted(record: Record, tokens: int) -> bool:
    """Whether a size is more than three percent away from what was recorded."""
    return abs(tokens - record.kv_tokens) * 100 > DRIFT_PERCENT * record.kv_tokens


def text(records: dict[str, Record], reuse: Reuse) -> str:
    """The file that pods read; the same records, the same bytes."""
    return dumps(Records(VERSION, reuse, records))

"""The arithmetic beside a start's KV tokens: how many of them what weights, windows and captured
graphs leave of a device would hold, if nothing else took any of it."""

from __future__ import annotations

from kvline_contract.memory import GRAPHS, LOADED, SNAPSHOTS, STATES, WINDOWS
from kvline_contract.report import Result

MIB = 1 << 20
TAKEN = (*LOADED, STATES, SNAPSHOTS, WINDOWS, GRAPHS)


def tokens_left(result: Result) -> int:
    """Of the rank that limits the budget."""
    memory = result.memory
    left = memory.total_mib - sum(memory.mib(part) for part in TAKEN)
    return left * MIB // result.bytes_per_token


def share(result: Result) -> float:
    """Of tokens_left, those that there are: the bar of KV tokens."""
    return result.kv_tokens / tokens_left(result)


def line(name: str, result: Result) -> str:
    """For people."""
    memory = result.memory
    taken = [f"{part} {mib}" for part in TAKEN if (mib := memory.mib(part))]
    return (
        f"{name}: {result.kv_tokens} KV tokens, {share(result):.4f} of the {tokens_left(result)} "
        f"that {memory.total_mib} MiB less {', '.join(taken)} leave at {result.bytes_per_token} "
        "bytes each"
    )

"""One model on one GPU and on several of a machine: throughput, with and without logprobs of the
prompts, and the time of a token over HTTP. Each engine has processes of its own."""

from __future__ import annotations

import multiprocessing
import os

import decode
import offline
import peers
import torch
from record import record, table
from serving import served

from kvline_contract.launch import EngineOptions
from kvline_contract.memory import COLLECTIVES

KINDS = ("r512", "r512lp-top20")
AT_ONCE = (1, 32)
DECODE = "decode"


def run() -> None:
    """KVLINE_BENCH_MODELS selects models, KVLINE_BENCH_WORKLOADS some of r512, r512lp-top20 and
    decode, KVLINE_BENCH_GPUS the number of GPUs (all), and KVLINE_BENCH_ROUNDS that of runs (2).
    KVLINE_BENCH_RUNNING and KVLINE_BENCH_SNAPSHOTS give throughput's engines the same numbers of
    running requests and prefix snapshots."""
    gpus = peers.GPUS if peers.GPUS > 1 else torch.cuda.device_count()
    only = os.environ.get("KVLINE_BENCH_WORKLOADS", ",".join((*KINDS, DECODE))).split(",")
    if unknown := set(only) - {*KINDS, DECODE}:
        raise SystemExit(f"KVLINE_BENCH_WORKLOADS has {', '.join(unknown)}; see {__file__}")
    rows = []
    for name in offline.models("llama8b"):
        if kinds := [kind for kind in KINDS if kind in only]:
            rows += throughput(name, gpus, kinds)
        if DECODE in only:
            rows += decoding(name, gpus)
    head = ["model", "figure", "on one GPU", f"on {gpus}", "ratio"]
    table("Tokens a second; milliseconds a token", head, rows)


def throughput(name: str, gpus: int, kinds: list[str]) -> list[list[str]]:
    rates = {count: alone(name, count, kinds) for count in (1, gpus)}
    rows = []
    for kind in kinds:
        for count, found in rates.items():
            best, worst = max(found[kind]), min(found[kind])
            keep(f"{kind}-{peers.label(name, count)}", best, worst, "tokens/s")
        made = [max(rates[count][kind]) for count in (1, gpus)]
        rows.append(compared(name, gpus, kind, made, ".0f"))
    if len(kinds) == len(KINDS):
        scored, plain = (rates[gpus][kind] for kind in reversed(KINDS))
        share = max(scored) / max(plain)
        keep(f"{KINDS[1]}-ratio-{peers.label(name, gpus)}", share, min(scored) / max(plain))
        rows.append([name, f"{KINDS[1]} / r512, on {gpus}", "", f"{share:.3f}", ""])
    return rows


def decoding(name: str, gpus: int) -> list[list[str]]:
    times = {count: tokens(name, count) for count in (1, gpus)}
    rows = []
    for at_once in AT_ONCE:
        made = [min(times[count][at_once]) for count in (1, gpus)]
        rows.append(compared(name, gpus, f"decode-{at_once}", made, ".3f"))
    return rows


def keep(name: str, value: float, worst: float, unit: str = "ratio") -> None:
    record(name, value, unit, (min(value, worst), max(value, worst)), torch.cuda.get_device_name(0))


def compared(name: str, gpus: int, kind: str, made: list[float], form: str) -> list[str]:
    ratio = made[1] / made[0]
    keep(f"{kind}-tp{gpus}-ratio-{name}", ratio, ratio)
    return [name, kind, *(f"{value:{form}}" for value in made), f"{ratio:.3f}"]


def alone(name: str, gpus: int, kinds: list[str]) -> dict[str, list[float]]:
    """Tokens per second of each kind's runs, in a process of its own: it frees the GPUs."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_alone, (name, gpus, kinds))


def _alone(name: str, gpus: int, kinds: list[str]) -> dict[str, list[float]]:
    running, snapshots = (_number(f"KVLINE_BENCH_{n}") for n in ("RUNNING", "SNAPSHOTS"))
    options = EngineOptions(prefix_snapshots=snapshots)
    engine, result = offline.start(name, gpus=gpus, running=running, options=options)
    label = peers.label(name, gpus)
    keep(f"kv-tokens-{label}", result.kv_tokens, result.kv_tokens, "tokens")
    if gpus > 1:
        taken = max(rank.mib(COLLECTIVES) for rank in result.ranks)
        keep(f"collectives-mib-tp{gpus}", taken, taken, "MiB")
    print(f"{label}: {result}", flush=True)
    rounds = int(os.environ.get("KVLINE_BENCH_ROUNDS", "2"))
    return offline.speeds(engine, name, kinds, rounds)


def _number(name: str) -> int | None:
    return int(os.environ[name]) if name in os.environ else None


def tokens(name: str, gpus: int) -> dict[int, list[float]]:
    """Milliseconds a token of each round, by the number of requests at once."""
    found: dict[int, list[float]] = {}
    with served(name, gpus) as port:
        for at_once in AT_ONCE:
            turns = [decode.measure(port, name, at_once, turn) for turn in range(decode.ROUNDS)]
            found[at_once] = turns
            label = f"decode-{at_once}-{peers.label(name, gpus)}"
            keep(label, min(turns), max(turns), "ms")
    return found

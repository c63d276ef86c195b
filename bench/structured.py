"""What grammars cost on a GPU: throughput of r512 with a schema in every request, and the time to
the first token with a schema of 10 kB.

KVLINE_BENCH_TOKENIZER is a tokenizer.json with about as many tokens as the model; the benchmark's
own one has single bytes and words that JSON never needs, so that its masks are filled faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import httpx
import offline
import torch
from record import record, table
from servers import launch_config
from serving import served
from shapes import SHAPES, write_config, write_tokenizer
from workloads import WORKLOADS

from kvline_server.formats.format import GEMMA3, LLAMA3_JSON, PYTHONIC
from kvline_server.formats.grammar import Choice
from kvline_server.formats.grammar import grammar as lark
from kvline_server.formats.tools import Tool
from kvline_server.grammars.compiler import Compiler
from kvline_server.grammars.grammar import Grammar
from kvline_server.options.arguments import GrammarService
from kvline_server.options.grammars import GrammarBounds
from kvline_server.options.options import Options
from kvline_server.parent.grammars import GrammarProcess

T = TypeVar("T")
Work = Callable[[GrammarService, list[bytes]], T]

FIRST_SECONDS = 60.0  # for the first grammar, behind the opening of the tokenizer
ITEMS = 128  # of the list: no answer of r512 reaches its end
ROUNDS = 3
# Kinds of requests of the time to first token, and how many of each.
TURNS, PROMPT = 20, 64
SCHEMA_BYTES = 10 << 10
VARIED, TOOLS = 8, 4  # schemas beside each other, tools of a list


def run() -> None:
    """KVLINE_BENCH_MODELS selects models; KVLINE_BENCH_WORKLOADS is "r512", "first" or both."""
    only, rows = os.environ.get("KVLINE_BENCH_WORKLOADS", "r512,first").split(","), []
    for name in offline.models("llama8b"):
        rows += throughput(name) if "r512" in only else []
        rows += first_tokens(name) if "first" in only else []
    table("With a schema in every request", ["model", "figure", "best or median", "worst"], rows)


def throughput(name: str) -> list[list[str]]:
    """r512 plain and with a schema in turns, on one engine."""

    def work(service: GrammarService, keys: list[bytes]) -> dict[str, list[float]]:
        engine, _ = offline.start(name, grammars=service)
        workload, rates = WORKLOADS["r512"], dict[str, list[float]]()
        requests = offline.asked(name, workload)
        for kind, key in [("plain", b""), ("json", keys[0])] * ROUNDS:
            offline.play(engine, workload, requests[:8], key)
            rate = workload.counted(requests) / offline.play(engine, workload, requests, key)
            rates.setdefault(kind, []).append(rate)
            print(name, kind, f"{rate:.0f}", offline.clocks(), flush=True)
        assert not engine.masks.failed, "each request follows its schema to the end"
        engine.executor.resize((0,) * len(engine.executor.pages))
        return rates

    rates = within(name, [endless()], work)
    torch.cuda.empty_cache()
    gpu, best = torch.cuda.get_device_name(0), max(rates["plain"])
    ratio, worst = max(rates["json"]) / best, min(rates["json"]) / best
    record(f"json-r512-ratio-{name}", ratio, "ratio", (worst, ratio), gpu)
    spread = (min(rates["json"]), max(rates["json"]))
    record(f"json-r512-{name}", spread[1], "tokens/s", spread, gpu)
    return [
        [name, "r512, tokens/s", f"{best:.0f}", f"{min(rates['plain']):.0f}"],
        [name, "r512 with a schema", f"{max(rates['json']):.0f}", f"{min(rates['json']):.0f}"],
        [name, "of plain", f"{ratio:.3f}", f"{worst:.3f}"],
    ]


def first_tokens(name: str) -> list[list[str]]:
    """Streamed over HTTP, one request at a time: without a schema, with a new one, and with the
    same again."""
    found: dict[str, list[float]] = {"plain": [], "first": [], "cached": []}
    with served(name) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        for turn in range(TURNS + 1):
            schema = large(turn)
            for kind, fields in (
                ("plain", {}),
                ("first", {"structured_outputs": {"json": schema}}),
                ("cached", {"structured_outputs": {"json": schema}}),
            ):
                seconds = first_token(client, random.Random(kind + str(turn)), fields)
                if turn:  # the first ones warm up
                    found[kind].append(1e3 * seconds)
    gpu, plain = torch.cuda.get_device_name(0), statistics.median(found["plain"])
    rows = []
    for kind, taken in found.items():
        more = statistics.median(taken) - plain
        if kind != "plain":
            record(f"json-ttft-{kind}-ms-{name}", more, "ms", (more, max(taken) - plain), gpu)
        rows.append([name, f"first token, {kind}, ms", f"{plain + more:.1f}", f"{max(taken):.1f}"])
    return rows


def first_token(client: httpx.Client, rng: random.Random, fields: dict[str, Any]) -> float:
    """Seconds to it, of a prompt that is not cached."""
    prompt = [rng.randrange(1000, 30_000) for _ in range(PROMPT)]
    body = {"model": "m", "prompt": prompt, "max_tokens": 4, "stream": True, **fields}
    sent, head = json.dumps(body).encode(), {"Content-Type": "application/json"}
    began, first = time.perf_counter(), 0.0
    with client.stream("POST", "/v1/completions", content=sent, headers=head, timeout=60) as answer:
        if answer.status_code != httpx.codes.OK:
            raise RuntimeError(answer.read().decode())
        for line in answer.iter_lines():
            if line.startswith("data: {") and not first:
                first = time.perf_counter() - began
    return first


def within(name: str, wanted: Sequence[Grammar], work: Work[T]) -> T:
    """With the processes of grammars, and the keys of those that are wanted."""

    async def main(service: GrammarService) -> T:
        compiler = Compiler(str(service.path), FIRST_SECONDS)
        try:
            with ExitStack() as kept:
                keys = [kept.enter_context(await compiler.compiled(each)) for each in wanted]
                return work(service, keys)
        finally:
            await compiler.close()

    with processes(name) as service:
        return asyncio.run(main(service))


@contextlib.contextmanager
def processes(name: str) -> Iterator[GrammarService]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_config(name, Path(scratch))
        write_tokenizer(folder, SHAPES[name].vocabulary)
        config = folder / "launch.json"
        config.write_text(launch_config(folder).dumps())
        process = GrammarProcess(Options(config=config, state_dir=folder), GrammarBounds(), print)
        try:
            yield process.service
        finally:
            process.close()


def endless() -> Grammar:
    """A list of records that no answer of the workload ends."""
    item = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "kind": {"enum": ["read", "write", "list", "delete"]},
            "count": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}},
        },
        "required": ["name", "kind", "count", "tags"],
        "additionalProperties": False,
    }
    return Grammar("json_schema", json.dumps({"type": "array", "items": item, "minItems": ITEMS}))


def several(kind: str) -> list[Grammar]:
    """Grammars of a kind, "json" or "tools", to be followed beside each other."""
    schemas = [large(seed) for seed in range(VARIED)]
    if kind == "json":
        return [endless(), *(Grammar("json_schema", json.dumps(each)) for each in schemas)]
    tools = [Tool(f"tool_{at}", schema, strict=True) for at, schema in enumerate(schemas[:TOOLS])]
    choices = [Choice("auto"), Choice("required"), Choice("named", "tool_0")]
    families = (LLAMA3_JSON, PYTHONIC, GEMMA3)
    return [
        Grammar("lark", lark(family, tools, choice, True, ids={}))
        for family in families
        for choice in choices
    ]


def large(seed: int) -> dict[str, Any]:
    """A schema of 10 kB of properties of several types, each seed another one."""
    rng, properties = random.Random(seed), dict[str, Any]()
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "string", "maxLength": rng.randint(8, 64)},
        lambda: {"type": "integer", "minimum": 0},
        lambda: {"enum": [f"{rng.choice('abcdef')}_{n}" for n in range(rng.randint(2, 12))]},
        lambda: {"type": "array", "items": {"type": "number"}, "maxItems": rng.randint(1, 9)},
        lambda: {"type": "object", "properties": {f"p{n}": {"type": "boolean"} for n in range(4)}},
    ]
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    while len(json.dumps(schema)) < SCHEMA_BYTES:
        field = rng.choice(kinds)() | {"description": f"field {rng.randrange(1 << 30)} of a record"}
        properties[f"field_{len(properties)}_{rng.randrange(1000)}"] = field
    return schema | {"required": list(properties)[::2]}

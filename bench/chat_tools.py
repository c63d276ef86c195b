"""Streamed chats over HTTP on a GPU, as many at once as r512 has, with the parser of tool calls on
(each request has a tool) and off."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import offline
import raw_http
import torch
from http_tools import MARKS, TOOL
from raw_http import Asked
from record import record, table
from serving import served
from shapes import write_tokenizer
from tokenizers import Tokenizer
from workloads import WORKLOADS

ROUNDS = 8
# Calls as Hermes writes them; tools are not written, so that prompts are the same with and without.
TEMPLATE = (
    "{% if tools %}{% endif %}{{ messages[0].content }}"
    "{% for c in messages[0].tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}"
    "{% endfor %}"
)
WAYS: dict[str, dict[str, Any]] = {"off": {}, "on": {"tools": [TOOL]}}


def run() -> None:
    """KVLINE_BENCH_MODELS selects models. Rounds vary by some percent, so each with the parser is
    compared with the one before it, without."""
    rows = []
    for name in offline.models("qwen06b"):
        found: dict[str, list[float]] = {}
        with served(name, prepare=with_calls) as port:
            for turn in range(ROUNDS):
                for way, fields in WAYS.items():
                    found.setdefault(way, []).append(rate(port, f"{turn} {way}", fields))
                    print(name, way, f"{found[way][-1]:.0f}", offline.clocks(), flush=True)
        gpu = torch.cuda.get_device_name(0)
        ratios = [on / off for on, off in zip(found["on"], found["off"], strict=True)]
        middle, spread = statistics.median(ratios), (min(ratios), max(ratios))
        record(f"http-tools-ratio-{name}", middle, "ratio", spread, gpu)
        for way, rates in found.items():
            rows.append([name, way, f"{max(rates):.0f}", f"{statistics.median(rates):.0f}"])
        rows.append([name, "on, of off, by pairs", f"{max(ratios):.3f}", f"{middle:.3f}"])
    table("Streamed chats, output tokens/s", ["model", "parser", "best", "median"], rows)


def with_calls(folder: Path) -> None:
    """A template and marks as models have them that write calls, whose ids are the model's last."""
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    write_tokenizer(folder, vocabulary - len(MARKS))
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_tokens(MARKS)
    tokenizer.save(str(file))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


def rate(port: int, seed: str, fields: dict[str, Any]) -> float:
    """Output tokens a second, of prompts that are not cached."""
    rng, workload = random.Random(seed), WORKLOADS["r512"]
    asked = [
        Asked(rng.randbytes(rng.randint(1, workload.prompt[1] // 2)).hex(), output)
        for _, output in workload.make(1000)
    ]
    answers = raw_http.play(port, asked, stream=True, temperature=workload.temperature, **fields)
    return sum(one.output for one in asked) / max(one.ended for one in answers)

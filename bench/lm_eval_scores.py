"""Log-likelihoods that lm-eval reads over HTTP against those of its own transformers backend.

SmolLM2 in float32 on the CPU: lm-eval scores the same requests with `hf` and, from a real server,
with `local-completions`; both run in an environment of lm-eval's own (lm_eval_run.py).
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import demo_engines
from paths import CACHE
from record import ROOT, record, table
from serving import free_port, running
from tools import ensure_environment
from transformers import AutoTokenizer

BAR = 1e-3  # a token
MAX_LENGTH = 1200  # what lm-eval takes for the model's context: a longer text has several windows
# Tokens; one that holds its text twice is continued by that text, often as the model would.
CONTEXTS = {"short": (1, 40), "repeated": (50, 150), "middle": (100, 300), "long": (500, 900)}
CONTINUATIONS = (1, 8, 60)  # tokens
EACH = 8  # contexts of each kind for each length of continuations
TEXTS = tuple(range(400, 2401, 400))  # tokens of those that are scored whole
RESERVED = 3000  # words at the end, so that what begins before them has its length
Pair = tuple[str, str]  # context, continuation


@dataclass(frozen=True)
class Words:
    """The words of this project's pages, each with the blanks before it. The tokenizer splits
    there too, so the tokens of words add up to those of their text."""

    words: list[str]
    tokens: list[int]  # of each

    def plain(self, start: int) -> int:
        """The next word of letters that is one token."""
        while self.tokens[start] > 1 or not re.fullmatch(r" [a-z]+", self.words[start]):
            start += 1
        return start

    def anywhere(self, rng: random.Random) -> int:
        return self.plain(rng.randrange(len(self.words) - RESERVED))

    def after(self, start: int, tokens: int) -> int:
        """The word before which so many tokens, or just more, have come since `start`."""
        while tokens > 0:
            tokens -= self.tokens[start]
            start += 1
        return start

    def text(self, start: int, stop: int) -> str:
        return "".join(self.words[start:stop])

    def part(self, start: int, tokens: int) -> str:
        return self.text(start, self.after(start, tokens))


def run() -> None:
    python = ensure_environment(CACHE / "lm-eval", ROOT / "requirements" / "lm-eval.txt", print)
    text = read()
    kinds = pairs(text)
    asked: dict[str, Any] = {"model": str(demo_engines.folder()), "max_length": MAX_LENGTH}
    asked["pairs"] = [pair for group in kinds.values() for pair in group]
    rng = random.Random(1)
    asked["texts"] = [text.part(text.anywhere(rng), tokens) for tokens in TEXTS]
    print(f"  {len(asked['pairs'])} pairs, {len(TEXTS)} texts", flush=True)
    theirs = scored(python, asked)
    with tempfile.TemporaryDirectory() as scratch:
        port, internal = free_port(), free_port()
        command = [sys.executable, "-m", "kvline_server", "serve", "--model", asked["model"]]
        command += ["--served-name", "m", "--device", "cpu", "--memory", "2Gi", "--threads", "2"]
        command += ["--max-model-len", "2048", "--state-dir", scratch]
        command += ["--port", str(port), "--internal-port", str(internal)]
        with running(command, internal):
            url = f"http://127.0.0.1:{port}/v1/completions"
            ours = scored(python, {**asked, "url": url, "served": "m"})
    report({name: len(group) for name, group in kinds.items()}, theirs, ours)


def read() -> Words:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    words = re.findall(r"\s*\S+", "\n\n".join(page.read_text() for page in pages))
    ids = AutoTokenizer.from_pretrained(str(demo_engines.folder()))(words)["input_ids"]
    return Words(words, [len(i) for i in ids])


def pairs(text: Words) -> dict[str, list[Pair]]:
    """By kind. Each context has two continuations, as a question has choices: its own, and one from
    elsewhere."""
    rng = random.Random(0)
    kinds: dict[str, list[Pair]] = {}
    for tokens in CONTINUATIONS:
        for name, (least, most) in CONTEXTS.items():
            group = kinds[f"{name} context, continuation of {tokens}"] = []
            for _ in range(EACH):
                start = text.anywhere(rng)
                stop = text.plain(text.after(start, rng.randint(least, most)))
                context, own = text.text(start, stop), stop
                if name == "repeated":
                    context, own = context * 2, start
                for begin in (own, text.anywhere(rng)):
                    group.append((context, text.part(begin, tokens)))
    return kinds


def scored(python: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """What lm-eval answers; it prints its own progress."""
    began = time.monotonic()
    name = "local-completions" if "url" in asked else "hf"
    with tempfile.TemporaryDirectory() as scratch:
        question, answer = Path(scratch, "asked.json"), Path(scratch, "answer.json")
        question.write_text(json.dumps(asked))
        command = [str(python), str(Path(__file__).with_name("lm_eval_run.py"))]
        env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(demo_engines.THREADS)}
        env.pop("PYTHONPATH", None)
        subprocess.run([*command, str(question), str(answer)], env=env, check=True)
        print(f"  lm-eval's {name}: {time.monotonic() - began:.0f} s", flush=True)
        return dict(json.loads(answer.read_text()))


def report(kinds: dict[str, int], theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Of each kind, and of all."""
    rows: list[list[str]] = []
    every: list[float] = []
    at = 0
    for name, many in kinds.items():
        part = slice(at, at := at + many)
        rows.append(row(name, theirs["pairs"][part], ours["pairs"][part], every))
    rows.append(row("texts scored whole", theirs["texts"], ours["texts"], every))
    mean, most = sum(every) / len(every), max(every)
    rows.append(["all", str(len(every)), "", f"{most:.1e}", f"{mean:.1e}", f"{BAR:.0e}", ""])
    record("lm-eval-sum-difference", most * 1e6, "1e-6 a token", (min(every) * 1e6, most * 1e6))
    head = ["requests", "count", "tokens scored", "largest", "mean", "bar", "same is_greedy"]
    title = "lm-eval over HTTP against its transformers backend, SmolLM2-135M, float32, CPU:"
    table(f"{title} difference of the sums a token", head, rows)


def row(name: str, theirs: list[Any], ours: list[Any], every: list[float]) -> list[str]:
    """An answer is its sum, the tokens of that and, of a pair, is_greedy."""
    both = list(zip(theirs, ours, strict=True))
    apart = [abs(a[0] - b[0]) / a[1] for a, b in both]
    every += apart
    counts = [a[1] for a in theirs]
    greedy = ""
    if len(theirs[0]) > 2:
        same = sum(a[2] == b[2] for a, b in both)
        greedy = f"{same} of {len(both)}, {sum(a[2] for a in theirs)} of them true"
    figures = [f"{max(apart):.1e}", f"{sum(apart) / len(apart):.1e}", f"{BAR:.0e}"]
    return [name, str(len(both)), f"{min(counts)} to {max(counts)}", *figures, greedy]

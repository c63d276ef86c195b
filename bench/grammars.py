"""What grammars take: seconds to try and compile them, seconds of their masks, and bytes; and
whether random answers are valid.

KVLINE_BENCH_SCHEMAS is a folder of files with a `schema` each, as MaskBench has them,
KVLINE_BENCH_MODEL one with a tokenizer.json and a config.json. A file may have `tests`, with
`valid` and `data`. KVLINE_BENCH_COUNT schemas are taken, evenly over the names.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import validator_for
from record import record, table

from kvline_server.grammars import heap, trial
from kvline_server.grammars.compiled import compiled, fill
from kvline_server.grammars.grammar import Grammar, GrammarInvalid, schema_text
from kvline_server.grammars.vocabulary import Vocabulary
from kvline_server.model.config import read_config
from kvline_server.options.grammars import MIB, GrammarBounds

TOKENS = 512  # of an answer
HURRY = 0.8  # how often a token that closes something is chosen, where one may come
# The first that may come: a quote may begin another property, too, and a comma an item.
CLOSING = (b"}", b"]"), (b'"',), (b",",)


@dataclass(slots=True)
class Found:
    names: list[str] = field(default_factory=list)
    tried: list[float] = field(default_factory=list)  # seconds by the clock, in a process
    compiling: list[float] = field(default_factory=list)  # of CPU time, to the first mask
    masks: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # bytes of a grammar, compiled
    grown: list[int] = field(default_factory=list)  # and of it, its lexer and a matcher at the end
    refused: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    ended: int = 0
    valid: int = 0
    failed: Counter[str] = field(default_factory=Counter)


def run() -> None:
    folder, count = Path(os.environ["KVLINE_BENCH_MODEL"]), os.environ.get("KVLINE_BENCH_COUNT")
    model = read_config(folder)
    before = heap.data()
    vocabulary = Vocabulary(folder / "tokenizer.json", model.vocabulary, model.eos_token_ids)
    tokenizer = heap.data() - before
    gc.freeze()
    files = sorted(Path(os.environ["KVLINE_BENCH_SCHEMAS"]).glob("*.json"))
    files = files[:: max(1, len(files) // int(count or 500))][: int(count or 500)]
    found, bounds = Found(), GrammarBounds()
    for file in files:
        try:
            given = json.loads(file.read_text())
        except ValueError:
            continue
        found.names.append(file.name)
        one(found, given, vocabulary, bounds)
    show(found, tokenizer, model.vocabulary)


def one(found: Found, given: dict[str, Any], vocabulary: Vocabulary, bounds: GrammarBounds) -> None:
    try:
        grammar = Grammar("json_schema", schema_text(given["schema"], "schema"))
    except GrammarInvalid as error:
        found.refused[_short(str(error))] += 1
        return
    began = time.monotonic()
    trying = trial.start(0, grammar, vocabulary, bounds)
    while (first := trying.answer()) is None and not trying.read():
        pass
    found.tried.append(time.monotonic() - began)
    while first is not None and not trying.read():
        pass
    tried = trying.end(bounds) or first
    assert tried is not None
    if tried.reason:
        found.refused[_short(tried.reason)] += 1
        return
    before, began = heap.used(), time.thread_time()
    start = compiled(grammar, vocabulary, bounds.lexer_states)
    found.compiling.append(time.thread_time() - began)
    found.sizes.append(heap.used() - before)
    text, ended = answer(start, vocabulary, found, random.Random(len(found.names)))
    found.grown.append(heap.used() - before)
    judge(found, given, text, ended)
    for test in given.get("tests", []):
        accepted = accepts(start, vocabulary, test["data"])
        if accepted != test["valid"]:
            found.wrong["valid, refused" if test["valid"] else "invalid, taken"] += 1


def answer(
    start: Any, vocabulary: Vocabulary, found: Found, rng: random.Random
) -> tuple[str, bool]:
    """A random one. -> its text, and whether it has ended"""
    matcher, row = start.deep_copy(), np.zeros(vocabulary.words, np.int32)
    closing = closers(vocabulary)
    (end,) = vocabulary.tokenizer.eos_tokens
    output: list[int] = []
    for _ in range(TOKENS):
        began = time.perf_counter()
        fill(matcher, row)
        found.masks.append(time.perf_counter() - began)
        if matcher.is_error():
            found.failed[_short(matcher.get_error())] += 1
            break
        allowed = np.unpackbits(row.view(np.uint8), bitorder="little").astype(bool)
        if allowed[end] and (matcher.is_stopped() or rng.random() < HURRY):
            return vocabulary.tokenizer.decode_bytes(output).decode(), True
        allowed[end] = False
        hurries = (allowed & some for some in closing if rng.random() < HURRY)
        near = next((some for some in hurries if some.any()), allowed)
        (options,) = np.nonzero(near)
        output.append(int(rng.choice(options.tolist() if len(options) < 64 else options)))
        matcher.consume_token(output[-1])
    return vocabulary.tokenizer.decode_bytes(output).decode(errors="replace"), False


@functools.cache
def closers(vocabulary: Vocabulary) -> list[np.ndarray]:
    """Tokens that begin with each of CLOSING, as masks."""
    firsts = [vocabulary.tokenizer.decode_bytes([t])[:1] for t in range(vocabulary.size)]
    padding = [False] * (32 * vocabulary.words - vocabulary.size)
    return [np.array([first in some for first in firsts] + padding) for some in CLOSING]


def accepts(start: Any, vocabulary: Vocabulary, data: Any) -> bool:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    tokens, matcher = vocabulary.tokenizer.tokenize_str(text), start.deep_copy()
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def judge(found: Found, given: dict[str, Any], text: str, ended: bool) -> None:
    """An answer that has ended, by the other library."""
    found.ended += ended
    if not ended:
        return
    kind = validator_for(given["schema"])
    try:
        kind(given["schema"], format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))
        found.valid += 1
    except ValidationError as error:
        found.wrong[f"by jsonschema: {error.validator}"] += 1
    except (SchemaError, re.error) as error:
        found.wrong[f"jsonschema: {type(error).__name__}"] += 1


def _short(reason: str) -> str:
    return re.sub(r"[0-9]+", "N", reason.splitlines()[0])[:60]


def show(found: Found, tokenizer: int, tokens: int) -> None:
    accepted = len(found.sizes)
    rows = [
        ["tried in a process, ms", *_spread(found.tried, 1e3)],
        ["compiled, ms of CPU", *_spread(found.compiling, 1e3)],
        ["a mask, \u00b5s", *_spread(found.masks, 1e6)],
        ["a grammar, KiB", *_spread(found.sizes, 1 / 1024)],
        ["with its lexer and matcher at the end, KiB", *_spread(found.grown, 1 / 1024)],
    ]
    title = f"{len(found.names)} schemas, {accepted} accepted; {tokens} tokens"
    table(title, ["", "p50", "p90", "p99", "most"], rows)
    print(f"tokenizer: {tokenizer / MIB:.0f} MiB")
    print(
        f"random answers: {found.ended} ended within {TOKENS} tokens, {found.valid} of them valid"
    )
    for name, counts in (
        ("refused", found.refused),
        ("failed in an answer", found.failed),
        ("wrong", found.wrong),
    ):
        for reason, count in counts.most_common(20):
            print(f"{name}: {count} {reason}")
    record("json-accepted-share", accepted / len(found.names), "", (0, 0))
    for name, part, whole in (
        ("ended", found.ended, accepted),
        ("valid", found.valid, found.ended),
    ):
        record(f"json-{name}-share", part / max(whole, 1), "", (0, 0))
    record("json-compile-p50-ms", 1e3 * float(np.median(found.compiling)), "ms", (0, 0))


def _spread(values: Iterable[float], factor: float) -> list[str]:
    found = np.percentile(np.fromiter(values, float), [50, 90, 99, 100])
    return [f"{value * factor:.3g}" for value in found]

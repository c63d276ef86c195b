"""Outputs that a test has written instead of the model: the engine samples as ever, and of a
sequence whose prompt has a marker the sampled tokens are then replaced, one by one. Scheduler,
grammars, parsers and HTTP take them for the model's, so a grammar that forbids one ends the answer.

The file has `tokenizer`, a tokenizer.json; `turn`, the text with which a turn of the assistant
begins; and `outputs`: by name the token ids of each turn behind the marker `forced:NAME`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

MARKER = re.compile(r"forced:([a-z_]+)")


class Forced:
    def __init__(self, file: str) -> None:
        from tokenizers import Tokenizer

        read = json.loads(Path(file).read_text())
        self.tokenizer = Tokenizer.from_file(read["tokenizer"])
        self.turn: str = read["turn"]
        self.outputs: dict[str, list[list[int]]] = read["outputs"]
        self.known: dict[int, list[int] | None] = {}  # by sequence

    def output(self, tokens: list[int]) -> list[int] | None:
        """Of a prompt; None where the model itself answers. The last marker counts, and the turns
        behind it; the last one is what the assistant is to write."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        found = list(MARKER.finditer(text))
        if not found:
            return None
        behind = text.count(self.turn, found[-1].end())
        return next(iter(self.outputs[found[-1][1]][behind - 1 : behind]), None)

    def token(self, sequence: Any, sampled: int) -> int:
        """What this sequence has next: behind an output that has no end token, the sampled one."""
        if sequence.id not in self.known:
            self.known[sequence.id] = self.output(sequence.tokens[: sequence.prompt_length])
        output = self.known[sequence.id]
        at = len(sequence.tokens) - sequence.prompt_length
        return sampled if output is None or at >= len(output) else output[at]


def force(file: str) -> None:
    """In the engine's process, on the CPU: it reads a step's tokens before it launches the next."""
    from kvline_server.engine.engine import Engine
    from kvline_server.kernels.layout import NO_TOKEN

    forced, publish = Forced(file), Engine._publish

    def publish_forced(self: Engine, sequence: Any, token: int, scores: Any) -> Any:
        if token != NO_TOKEN:
            token = forced.token(sequence, token)
        return publish(self, sequence, token, scores)

    Engine._publish = publish_forced  # type: ignore[method-assign]

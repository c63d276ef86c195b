"""What engines of tiny models draw their tokens from, and prompts whose answers no rounding
changes: texts of those may be compared exactly, whatever shares their batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from chats import encode
from engines import engine, finish, worker
from masked import forbid
from ties import draw_of, settled

from kvline_server.engine.engine import Engine
from kvline_server.http.tokenizer_files import open_chat
from kvline_server.http.tokens import Tokens
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.kernels.layout import SamplingMetadata
from kvline_server.worker.step import NO_MASKS, LogitsEdits, TokenMasks
from kvline_server.worker.vocabulary import apply


class Drawn:
    """Logits that an engine draws its tokens from, edited, from here on. Each request needs a seed
    of its own, by which they are found."""

    def __init__(self, made: Engine) -> None:
        self.vocabulary = worker(made).vocabulary
        self.sample = self.vocabulary.sample
        self.rows: dict[int, torch.Tensor] = {}
        self.vocabulary.sample = self.noted  # type: ignore[method-assign]

    def noted(
        self,
        logits: torch.Tensor,
        metadata: SamplingMetadata,
        edits: tuple[LogitsEdits, ...] = (),
        masks: TokenMasks = NO_MASKS,
    ) -> torch.Tensor:
        edited = logits.clone()
        for each in edits:
            apply(self.vocabulary.kernels, edited, each)
        forbid(edited, masks)
        for key, row in zip(metadata.keys.tolist(), edited, strict=True):
            assert key not in self.rows, "two requests of the same seed"
            self.rows[key] = row
        return self.sample(logits, metadata, edits, masks)

    def logits(self, params: SamplingParams, count: int) -> torch.Tensor:
        """Of a request's first tokens. [count, vocabulary]"""
        found = [self.rows[int(draw_of(params, at).keys[0])] for at in range(count)]
        return torch.stack(found)


def firm(
    folder: Path, prompts: Iterable[str], *asked: SamplingParams, chat: bool = False
) -> Iterator[str]:
    """Of the prompts those whose answers to all that is asked are settled, in any batch."""
    tokens = Tokens(folder)
    talk = open_chat(folder, tokens) if chat else None
    for prompt in prompts:
        message = [{"role": "user", "content": prompt}]
        ids = encode(talk, message) if talk is not None else tokens.encode(prompt)
        made = engine(folder)
        drawn = Drawn(made)
        for id, params in enumerate(asked):
            made.submit(id, list(ids), params)
        outputs = finish(made)
        if all(
            settled(
                [token for o in outputs[id] for token in o.tokens],
                params,
                drawn.logits(params, len(outputs[id])),
            )
            for id, params in enumerate(asked)
        ):
            yield prompt

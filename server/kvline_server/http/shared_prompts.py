"""The choices of one prompt: the first computes and scores it, the others wait for that, find it in
the prefix cache and take its scores. Choices of a prompt share its list of tokens, which tells."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from kvline_server.engine.messages import Delta, PackedScores
from kvline_server.engine.request import SamplingParams


@dataclass(slots=True)
class Prompt:
    computed: asyncio.Event = field(default_factory=asyncio.Event)  # or nobody does it any more
    scores: PackedScores | None = None


@dataclass(slots=True)
class Turn:
    """One choice's part in it."""

    prompt: Prompt
    leads: bool
    heard: bool = False

    async def params(self, params: SamplingParams) -> SamplingParams:
        """What to ask the engine for, once it is this choice's turn."""
        if not self.leads:
            await self.prompt.computed.wait()
            if self.prompt.scores is not None:
                return msgspec.structs.replace(params, prompt_logprobs=None)
        return params

    def hear(self, deltas: list[Delta]) -> None:
        if self.heard:
            return
        self.heard = True
        if self.leads:
            self.prompt.scores = deltas[0].prompt_scores
            self.prompt.computed.set()
        elif self.prompt.scores is not None:
            deltas[0].prompt_scores = self.prompt.scores


class SharedPrompts:
    def __init__(self) -> None:
        self._known: dict[int, Prompt] = {}

    @contextmanager
    def turn(self, tokens: list[int]) -> Iterator[Turn]:
        """The first to come leads; when it leaves early, each of the others is on its own."""
        known = self._known.get(id(tokens))
        if known is not None:
            yield Turn(known, leads=False)
            return
        known = self._known[id(tokens)] = Prompt()
        try:
            yield Turn(known, leads=True)
        finally:
            known.computed.set()
            del self._known[id(tokens)]

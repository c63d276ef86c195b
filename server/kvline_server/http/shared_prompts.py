"""Choices of one prompt (n > 1): the first one prefills it, the others wait until it has.

They then find the prompt in the prefix cache and take its prompt logprobs. Choices of a prompt are
recognised by their shared list of tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from kvline_server.ipc.messages import Delta, PackedScores
from kvline_server.ipc.sampling_params import SamplingParams


@dataclass(slots=True)
class Prompt:
    # Also set when the first choice leaves early.
    computed: asyncio.Event = field(default_factory=asyncio.Event)
    scores: list[PackedScores] = field(default_factory=list)


@dataclass(slots=True)
class Share:
    """One choice of a shared prompt."""

    prompt: Prompt
    first: bool
    page_size: int
    received: bool = False  # any deltas

    async def params(self, tokens: list[int], params: SamplingParams) -> SamplingParams:
        """Waits until the prompt is computed, where this choice can use it; returns the parameters
        to submit."""
        full_page = len(tokens) > self.page_size  # the last token is always computed
        if not self.first and (full_page or params.prompt_logprobs is not None):
            await self.prompt.computed.wait()
            if self.prompt.scores:
                return msgspec.structs.replace(params, prompt_logprobs=None)
        return params

    def receive(self, deltas: list[Delta]) -> None:
        """Takes prompt logprobs from the first choice's first delta, or adds them to another's."""
        if self.received:
            return
        self.received = True
        if self.first:
            self.prompt.scores = deltas[0].prompt_scores
            self.prompt.computed.set()
        elif self.prompt.scores:
            deltas[0].prompt_scores = self.prompt.scores


class SharedPrompts:
    def __init__(self) -> None:
        self.page_size = 1  # tokens; the engine's, once it is known
        self._known: dict[int, Prompt] = {}

    @contextmanager
    def share(self, tokens: list[int]) -> Iterator[Share]:
        """If the first choice leaves early, each of the others prefills for itself."""
        known = self._known.get(id(tokens))
        if known is not None:
            yield Share(known, False, self.page_size)
            return
        known = self._known[id(tokens)] = Prompt()
        try:
            yield Share(known, True, self.page_size)
        finally:
            known.computed.set()
            del self._known[id(tokens)]

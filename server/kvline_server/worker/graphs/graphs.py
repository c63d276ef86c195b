"""The worker's captured graphs: runs the decoder on any step by replaying them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from kvline_server.kernels.attention import PageTables
from kvline_server.memory.groups import GroupedArena
from kvline_server.model.decoder import Decoder
from kvline_server.worker.graphs.pool import GraphPool
from kvline_server.worker.graphs.segments import Segments
from kvline_server.worker.graphs.steps import WholeSteps
from kvline_server.worker.step import Step


class Graphs:
    def __init__(
        self,
        decoder: Decoder,
        plan: Callable[[PageTables, int], Any],
        arena: GroupedArena,
        last_tokens: torch.Tensor,
        decode_rows: int,
        max_rows: int,
        longest: int,
    ) -> None:
        """`plan` is Attention.plan_in_place, `last_tokens` are the worker's. Steps have up to
        `max_rows` rows, of decodes `decode_rows`, and sequences up to `longest` tokens; the arena
        must have a page. Its addresses never change, so the graphs stay valid."""
        self._pool = GraphPool()
        self.segments = Segments(decoder, arena, last_tokens, max_rows, self._pool)
        self.whole = WholeSteps(decoder, plan, arena, last_tokens, decode_rows, longest, self._pool)

    def run(self, step: Step) -> torch.Tensor:
        """Hidden states of the LM head's rows, valid until the next run. -> [n, hidden]"""
        return self.whole.run(step) if self.whole.fits(step) else self.segments.run(step)

    def skipped(self) -> AbstractContextManager[None]:
        """Within it steps run attention that is not captured, and no graph: graphs have their
        memory, and would wait for other ranks."""
        return self._pool.skipped()

"""Captures CUDA graphs that share one memory pool, and replays them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch


class GraphPool:
    """One graph runs at a time, and what one leaves for another is in buffers outside the pool: so
    each takes the memory of those before it, if the largest are captured first."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        self._skipped = False

    @contextmanager
    def stream(self) -> Iterator[None]:
        """A stream of its own, as captures need, after and before all other work. No garbage is
        collected meanwhile: a graph among it would be freed, which ends a capture with an error."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(stream), torch.inference_mode():
                yield
        finally:
            if collects:
                gc.enable()
        torch.cuda.current_stream().wait_stream(stream)

    def capture(self, pieces: Iterable[Callable[[], None]]) -> list[torch.cuda.CUDAGraph]:
        """A graph of each piece. Lazy initialisation is not allowed in a capture: all of them must
        have run before."""
        torch.cuda.synchronize()
        return [self._captured(piece) for piece in pieces]

    def _captured(self, piece: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
        try:
            piece()
        finally:
            graph.capture_end()
        return graph

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        if not self._skipped:
            graph.replay()

    @contextmanager
    def skipped(self) -> Iterator[None]:
        """Within it nothing is replayed."""
        self._skipped = True
        try:
            yield
        finally:
            self._skipped = False

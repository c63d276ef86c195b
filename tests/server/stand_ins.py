"""Stand-ins on the CPU for what captures graphs on a GPU: what a graph holds runs again at each
replay, over the same buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from kvline_server.kernels.attention import PageTables
from kvline_server.kernels.layout import GroupLayout, Layout
from kvline_server.kernels.torch import TorchKernels
from kvline_server.kernels.torch_attention import TorchAttention
from kvline_server.worker.graphs.pool import GraphPool


class Pool(GraphPool):
    def __init__(self) -> None:
        self._skipped = False
        self.captured = self.replayed = 0

    @contextmanager
    def stream(self) -> Iterator[None]:
        with torch.inference_mode():
            yield

    def capture(self, pieces: Iterable[Callable[[], None]]) -> list[Any]:
        made = list(pieces)
        self.captured += len(made)
        return made

    def replay(self, graph: Any) -> None:
        if not self._skipped:
            self.replayed += 1
            graph()


class InPlace(TorchAttention):
    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        self._plans: dict[tuple[int, int], list[Any]] = {}

    def plan_in_place(self, tables: PageTables, window: int) -> Any:  # type: ignore[override]
        rows = len(tables.lengths)
        layout = Layout(
            positions=tables.lengths - 1,
            row_starts=tables.row_starts,
            decodes=rows,
            groups=(
                GroupLayout(
                    lengths=tables.lengths,
                    page_starts=tables.page_starts,
                    pages=tables.pages[: tables.page_starts[-1]].numpy(),
                    slots=np.zeros(rows, np.int64),
                    cleared=np.zeros(0, np.int64),
                ),
            ),
        )
        plan = self._plans.setdefault((rows, window), [])
        plan[:] = self.plan(layout, 0, window)
        return plan


class CapturedKernels(TorchKernels):
    """With a step in flight and plans in place, as on a GPU."""

    def __init__(self) -> None:
        super().__init__(depth=1)
        self.attention = InPlace(self.device, self.dtype, self.rows)

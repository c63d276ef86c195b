"""How the next token of each sequence is drawn, as arrays.

The noise of a sequence's n-th token depends on its seed and n alone. Other requests of the batch
and preemption change a seeded output only where they change its logits by more than the margin
between the two best tokens of the draw (docs/decisions/009).
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np

from kvline_server.engine.request import Sequence
from kvline_server.kernels.interface import Draws
from kvline_server.seeds import keys

_MASK = 0xFFFFFFFFFFFFFFFF
MIN_TOP_P = np.float32(1e-6)  # a smaller value keeps the same one token, and may be 0 as a float32


def draws(sequences: Rows[Sequence]) -> Draws:
    params = [s.params for s in sequences]
    return Draws(
        temperatures=np.asarray([p.temperature for p in params], dtype=np.float32),
        top_k=np.asarray([p.top_k for p in params], dtype=np.int32),
        top_p=np.maximum(np.asarray([p.top_p for p in params], dtype=np.float32), MIN_TOP_P),
        min_p=np.asarray([p.min_p for p in params], dtype=np.float32),
        keys=keys(
            np.asarray([p.seed & _MASK for p in params], dtype=np.uint64),
            np.asarray([s.output_length for s in sequences], dtype=np.uint64),
        ),
    )

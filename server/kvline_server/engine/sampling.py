"""How the next token of each sequence is drawn, as arrays.

The noise of a sequence's n-th token depends on its seed and n alone. Other requests of the batch
and preemption change a seeded output only where they change its logits by more than the margin
between the two best tokens of the draw (docs/decisions/009).
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np

from kvline_server.engine.request import SAMPLING_ROW, Sequence
from kvline_server.ipc.seeds import keys
from kvline_server.kernels.layout import SamplingMetadata


def sampling_metadata(sequences: Rows[Sequence], ahead: np.ndarray | int = 0) -> SamplingMetadata:
    """Of a row of each, for the token `ahead` of its next one; uint64 [rows]."""
    rows = np.frombuffer(b"".join([s.sampling_row for s in sequences]), SAMPLING_ROW)
    generated = [len(s.tokens) + s.pending - s.prompt_length for s in sequences]
    return SamplingMetadata(
        temperatures=rows["temperature"].copy(),
        top_k=rows["top_k"].copy(),
        top_p=rows["top_p"].copy(),
        min_p=rows["min_p"].copy(),
        keys=keys(rows["seed"], np.asarray(generated, dtype=np.uint64) + np.uint64(ahead)),
    )

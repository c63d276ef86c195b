"""Layouts of steps with images whose tokens see each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvline_server.kernels.layout import GroupLayout, Layout, Spans, starts
from kvline_server.memory.pages import PAGE_SIZE

# A prompt's tokens that were computed before, and its rows: so many of text, or with - of an image.
Prompt = tuple[int, Sequence[int]]


def spanned(decodes: Sequence[tuple[int, int]], prompts: Sequence[Prompt]) -> Layout:
    """Of decodes tokens and how many of them are rows. Pages are in no order; none is page 0."""
    counts = [rows for _, rows in decodes] + [sum(map(abs, parts)) for _, parts in prompts]
    before = [length - rows for length, rows in decodes] + [start for start, _ in prompts]
    rows, lengths = np.array(counts, np.int32), np.add(before, counts).astype(np.int32)
    held = -(-lengths // PAGE_SIZE)
    pages = np.random.default_rng(0).permutation(np.arange(1, 1 + held.sum())).astype(np.int32)
    none = np.zeros(0, np.int64)
    group = GroupLayout(lengths, starts(held), pages, none, none)
    positions = [np.arange(length - own, length) for length, own in zip(lengths, rows, strict=True)]
    every = np.concatenate(positions).astype(np.int32)
    layout = Layout(len(decodes), starts(rows), every, (group,))
    found, at = [], layout.decode_rows
    for part in (part for _, parts in prompts for part in parts):
        if part < 0:
            found.append((at, at - part))
        at += abs(part)
    return replace(layout, spans=Spans(*np.array(found, np.int32).T)) if found else layout

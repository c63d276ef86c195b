"""Which rows of a step the programs of our recurrent kernels compute: pure, in host memory.

A sequence of up to FEW rows is computed row by row. A longer one is cut in tiles, of as many rows
as a chunk has, or of SMALL where no chunk would be half full. Its state goes from tile to tile and
is written at its stops: behind its last row, and where a snapshot is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvline_server.kernels.recurrent import CHUNK, Sequences

FEW = 8  # decodes with their draft tokens; others have as many rows as the convolution has inputs
SMALL = 16
# Tiles that are computed at a time, but for those of one sequence: what a step takes is bounded,
# also where each sequence's last tile has one row.
AT_ONCE = 320


@dataclass(frozen=True, slots=True)
class Few:
    """Sequences that are computed row by row."""

    spans: NDArray[np.int32]  # [sequences, 2], first row and end of each
    slots: NDArray[np.int64]  # [sequences], written
    sources: NDArray[np.int64]  # [sequences], read


@dataclass(frozen=True, slots=True)
class Tiled:
    """Sequences that are computed in tiles of so many rows."""

    rows: int
    most: int  # tiles of a sequence
    tiles: NDArray[np.int32]  # [tiles, 3], first row, rows, first row of the sequence
    tile_sources: NDArray[np.int64]  # [tiles], its sequence's
    # [sequences, 4]: first tile, first row, first stop and end of stops.
    chains: NDArray[np.int32]
    sources: NDArray[np.int64]  # [sequences]
    stops: NDArray[np.int32]  # [stops, 2], the tile and the row that it is before
    slots: NDArray[np.int64]  # [stops], written


def few(sequences: Sequences) -> Few | None:
    starts = sequences.starts
    (own,) = np.nonzero(np.diff(starts) <= FEW)
    if not len(own):
        return None
    spans = np.stack((starts[own], starts[own + 1]), axis=1).astype(np.int32)
    return Few(spans, sequences.slots[own], sequences.sources[own])


def tiled(sequences: Sequences) -> Iterator[Tiled]:
    """Groups of sequences, none of which has a state of another."""
    counts = np.diff(sequences.starts)
    for rows, own in ((SMALL, counts <= SMALL), (CHUNK, counts > SMALL)):
        (chosen,) = np.nonzero(own & (counts > FEW))
        if not len(chosen):
            continue
        ends = (-(-counts[chosen] // rows)).cumsum()
        most = AT_ONCE * CHUNK // rows
        first = 0
        while first < len(chosen):
            before = ends[first - 1] if first else 0
            end = max(first + 1, int(np.searchsorted(ends, before + most, "right")))
            yield _tiled(sequences, chosen[first:end], rows)
            first = end


def _tiled(sequences: Sequences, own: NDArray[np.int64], rows: int) -> Tiled:
    starts = sequences.starts[own].astype(np.int64)
    counts = np.diff(sequences.starts)[own].astype(np.int64)
    tiles = -(-counts // rows)
    ends = tiles.cumsum()
    first = ends - tiles
    of = np.repeat(np.arange(len(own)), tiles)
    within = (np.arange(ends[-1]) - first[of]) * rows
    every = np.stack((starts[of] + within, np.minimum(counts[of] - within, rows), starts[of]))
    stops, slots, bounds = _stops(sequences, own, rows, starts, counts, first)
    chains = np.stack((first, starts, bounds[:-1], bounds[1:]), axis=1)
    sources = sequences.sources[own]
    return Tiled(
        rows,
        int(tiles.max()),
        np.ascontiguousarray(every.T.astype(np.int32)),
        sources[of],
        chains.astype(np.int32),
        sources,
        stops.astype(np.int32),
        slots,
    )


def _stops(
    sequences: Sequences,
    own: NDArray[np.int64],
    rows: int,
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    first: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """In the order of each sequence's rows: tiles and rows, slots, and the bounds of sequences."""
    of, behind, slots = np.arange(len(own)), counts, sequences.slots[own]
    kept = sequences.snapshots
    if kept is not None:
        index = np.full(len(sequences.slots), -1)
        index[own] = of
        here = index[kept.sequences] >= 0
        of = np.concatenate((index[kept.sequences[here]], of))
        behind = np.concatenate((kept.rows[here], behind))
        slots = np.concatenate((kept.slots[here], slots))
    order = np.lexsort((behind, of))
    of, behind, slots = of[order], behind[order], slots[order]
    bounds = np.searchsorted(of, np.arange(len(own) + 1))
    tiles = first[of] + -(-behind // rows)
    return np.stack((tiles, starts[of] + behind), axis=1), slots, bounds

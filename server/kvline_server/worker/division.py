"""Which images of an encoder's pass each rank encodes. Every rank finds the same by itself."""

from __future__ import annotations

from collections.abc import Sequence


def divided(tokens: Sequence[int], ranks: int) -> list[list[int]]:
    """The largest first, each to the rank with the least so far. `tokens` of each image, as many
    patches to all -> by rank, the places of its images, in their order"""
    shares, loads = [list[int]() for _ in range(ranks)], [0] * ranks
    for at in sorted(range(len(tokens)), key=lambda at: -tokens[at]):
        rank = loads.index(min(loads))
        shares[rank].append(at)
        loads[rank] += tokens[at]
    return [sorted(share) for share in shares]


def largest(tokens: Sequence[int], ranks: int) -> int:
    """Tokens of the largest share."""
    return max(sum(tokens[at] for at in share) for share in divided(tokens, ranks))

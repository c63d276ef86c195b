"""The KV cache by layer. Layers that keep the same tokens of a sequence are one group, with pages
of its own: those without a window keep all, those with one only what it still shows.

The first group's pages are those of the KV cache's tokens, whose number the budget gives. The
others have as many as the windows of all running sequences and the rows of one step can need, so
no step lacks them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvline_contract.memory import KV_CACHE, WINDOWS
from kvline_server.errors import DeviceOutOfMemory
from kvline_server.memory.arena import Arena, KVLayer, KVShape
from kvline_server.memory.pages import PAGE_SIZE, pages_for
from kvline_server.memory.parts import OwnedPart
from kvline_server.memory.state_shape import States

Memory = KVLayer | States  # of a layer


@dataclass(frozen=True, slots=True)
class CacheGroup:
    window: int  # tokens that a query sees, itself included; 0: all before it
    layers: tuple[int, ...]  # of the model, in order
    shape: KVShape  # of these layers

    @property
    def page_bytes(self) -> int:
        return PAGE_SIZE * self.shape.bytes_per_token


def order(windows: tuple[int, ...], longest: int) -> dict[int, tuple[int, ...]]:
    """The layers of each group by its window, the first group first: without a window, else with
    the widest. A window that hides nothing of the `longest` sequence is none."""
    found: dict[int, tuple[int, ...]] = {}
    for layer, window in enumerate(windows):
        bounded = window if window < longest else 0
        found[bounded] = (*found.get(bounded, ()), layer)
    return dict(sorted(found.items(), key=lambda each: -(each[0] or longest)))


def first_page(window: int, page: int) -> int:
    """The first of a sequence's pages that a query in this page, or a later one, sees."""
    return max(0, page - pages_for(window - 1)) if window else 0


def pages_at_most(window: int, rows: int) -> int:
    """That a sequence has in a group whose window is bounded, in a step of so many of its rows, the
    first of which is anywhere in a page."""
    return pages_for(window - 1) + pages_for(PAGE_SIZE - 1 + rows)


def sequence_tokens(window: int, tokens: int) -> int:
    """KV tokens that a sequence of so many takes in a group."""
    return min(tokens, PAGE_SIZE * pages_at_most(window, 1)) if window else tokens


def parts(groups: tuple[CacheGroup, ...]) -> tuple[OwnedPart, ...]:
    """As sizing adds them up: what CacheSizes.pages has of each."""
    first, *others = groups
    found = [OwnedPart(KV_CACHE, per_token=first.shape.bytes_per_token)]
    if others:
        found.append(
            OwnedPart(
                WINDOWS,
                per_sequence=sum(_beside_rows(each) * each.page_bytes for each in others),
                per_row=sum(each.shape.bytes_per_token for each in others),
                detail="KV cache of layers with a sliding window",
            )
        )
    return tuple(found)


def _beside_rows(group: CacheGroup) -> int:
    """Pages of a sequence's window, and one more: its share of a step's rows may end in it."""
    return 1 + pages_at_most(group.window, 1)


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Of all groups, for so many running sequences, and rows of a step."""

    groups: tuple[CacheGroup, ...]
    running: int
    rows: int

    def pages(self, tokens: int) -> tuple[int, ...]:
        """Of each group beside a KV cache of so many tokens, each with its dummy page."""
        return (1 + pages_for(tokens), *(1 + self._windows(each) for each in self.groups[1:]))

    def _windows(self, group: CacheGroup) -> int:
        return self.running * _beside_rows(group) + pages_for(self.rows)

    @property
    def full_bytes_per_token(self) -> int:
        """Of a token that all groups have."""
        return sum(each.shape.bytes_per_token for each in self.groups)

    def sequence_tokens(self, longest: int) -> int | None:
        """Of the KV cache that a sequence of so many takes; None where these are all."""
        window = self.groups[0].window
        return sequence_tokens(window, longest) if window else None


class GroupedArena:
    """An arena for each group."""

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        arena: Callable[[KVShape, int], Arena],
        limit: int,
        states: Sequence[States] = (),
    ) -> None:
        """Addresses for as many pages of each as `limit` bytes could hold. `states` are those of
        the layers that are in no group, in order."""
        self._groups = groups
        self._arenas = [arena(each.shape, limit // each.page_bytes + 2) for each in groups]
        self._layers: list[Memory] = []
        cached = {layer for group in groups for layer in group.layers}
        others = (at for at in range(len(cached) + len(states)) if at not in cached)
        self._states = dict(zip(others, states, strict=True))

    @property
    def pages(self) -> tuple[int, ...]:
        """Of each group, its dummy page included."""
        return tuple(arena.pages for arena in self._arenas)

    @property
    def nbytes(self) -> int:
        return sum(arena.nbytes for arena in self._arenas)

    def layers(self) -> list[Memory]:
        """In the model's order."""
        return self._layers

    def clear(self, group: int, pages: torch.Tensor) -> None:
        """Arena.clear, of one group."""
        self._arenas[group].clear(pages)

    def resize(self, pages: tuple[int, ...]) -> None:
        """Maps or unmaps pages at the end of each group. Raises DeviceOutOfMemory, and each group
        has as many pages as before then."""
        before = self.pages
        try:
            self._resize(pages)
        except DeviceOutOfMemory:
            # Also where it failed: part of the memory is mapped there.
            self._resize(tuple(map(min, before, pages)))
            raise

    def _resize(self, pages: tuple[int, ...]) -> None:
        for arena, count in zip(self._arenas, pages, strict=True):
            arena.resize(count)
        found: dict[int, Memory] = {
            layer: kv
            for group, arena in zip(self._groups, self._arenas, strict=True)
            for layer, kv in zip(group.layers, arena.layers(), strict=False)  # none without a page
        }
        found |= self._states
        self._layers = [found[layer] for layer in sorted(found)]

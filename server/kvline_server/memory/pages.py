"""The KV page pool: pages are free, used by sequences, or cached under the hash of their content.

Bookkeeping on page numbers alone. Invariant after every call: free + used + cached == total. Page 0
is the dummy page that padding rows write to; it is never allocated.

A page is confirmed once a result that depends on it was read as finite. One that is not may hold
NaN, which attention kernels multiply by 0 behind a sequence's end: it is cleared before it has
another owner (docs/decisions/040).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import MappingProxyType

PAGE_SIZE = 16  # tokens; the fastest for the kernels
DUMMY_PAGE = 0
NO_EXTRAS: Mapping[int, bytes] = MappingProxyType({})


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)


def extend_chain(
    chain: list[bytes], tokens: list[int], upto: int, extras: Mapping[int, bytes] = NO_EXTRAS
) -> None:
    """Appends the keys of pages that are full within tokens[:upto]. A page's key is a hash of all
    tokens up to its end: cryptographic and chained, so that different prefixes do not collide. What
    keys and values depend on beside token ids, or with whom a page may be shared, is a page's extra
    part, by its index: its hash keys this page's and so all later ones', so that it is no text that
    could be read as tokens."""
    while (end := (len(chain) + 1) * PAGE_SIZE) <= upto:
        before = chain[-1] if chain else b""
        if extras and (extra := extras.get(len(chain))) is not None:
            digest = hashlib.blake2b(before, digest_size=16, key=hashlib.blake2b(extra).digest())
        else:
            digest = hashlib.blake2b(before, digest_size=16)
        digest.update(array("i", tokens[end - PAGE_SIZE : end]).tobytes())
        chain.append(digest.digest())


class PagePool:
    """Reference-counted pages, with an LRU of cached pages that no sequence uses."""

    def __init__(self, pages: int) -> None:
        if pages < 2:
            raise ValueError(f"a pool needs the dummy page and one more, got {pages}")
        self.total = pages - 1  # without the dummy page
        self._free = list(range(pages - 1, DUMMY_PAGE, -1))
        self._references: dict[int, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        # In use, cached or free. At first all: what sizing left in them nobody has read.
        self._unconfirmed = set(self._free)
        self._to_clear: list[int] = []

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages that only the prefix cache holds."""
        return len(self._cached)

    @property
    def used(self) -> int:
        return len(self._references)

    def can_take(self, count: int) -> bool:
        return count <= len(self._free) + len(self._cached)

    def take(self, count: int) -> list[int]:
        """`count` pages with one reference; evicts least recently used cached pages. Those that
        are not confirmed are cleared with the step that they are taken for. Requires
        can_take(count)."""
        assert self.can_take(count), "take without can_take"
        taken = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._evict()
            if page in self._unconfirmed:
                self._to_clear.append(page)
            self._unconfirmed.add(page)
            self._references[page] = 1
            taken.append(page)
        return taken

    def prefix(self, hashes: Sequence[bytes]) -> int:
        """How many of these contents the prefix cache has before the first that it lacks."""
        known = self._page_of
        return next((at for at, digest in enumerate(hashes) if digest not in known), len(hashes))

    def end(self, hashes: Sequence[bytes], first: int, last: int) -> int | None:
        """Where the contents end that stand before the last ones of first..last that it lacks;
        None: it lacks none."""
        known = self._page_of
        for at in range(last - 1, first - 1, -1):
            if hashes[at] not in known:
                while at and hashes[at - 1] not in known:
                    at -= 1
                return at
        return None

    def hold(self, hashes: Sequence[bytes]) -> list[int]:
        """The pages of these contents, all of which it has, each with one more reference."""
        found = [self._page_of[digest] for digest in hashes]
        for page in found:
            self._cached.pop(page, None)
            self._references[page] = self._references.get(page, 0) + 1
        return found

    def publish(self, page: int, digest: bytes) -> None:
        """Enters a full page in the prefix cache; the first page with a content stays."""
        if digest not in self._page_of and page not in self._hash_of:
            self._page_of[digest] = page
            self._hash_of[page] = digest

    def to_clear(self) -> list[int]:
        """Pages to be cleared before the step that is launched next; each call tells others."""
        pages, self._to_clear = self._to_clear, []
        return pages

    def confirm(self, pages: Sequence[int]) -> None:
        """After a finite result that depends on all that was written to them."""
        self._unconfirmed.difference_update(pages)

    def retract(self, pages: Sequence[int]) -> None:
        """After a result that was not finite: the prefix cache forgets the pages, and none of them
        is confirmed. Whichever sequence holds one keeps it."""
        for page in pages:
            self._forget(page)
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)
        self._unconfirmed.update(pages)

    def known(self, hashes: list[bytes]) -> list[int]:
        """The pages under these hashes, wherever the prefix cache has one."""
        return [self._page_of[digest] for digest in hashes if digest in self._page_of]

    def abandon(self, pages: Sequence[int]) -> None:
        """The sequence that computed them has left: the prefix cache forgets those that are not
        confirmed and that no other holds."""
        self.retract([page for page in pages if page in self._cached and page in self._unconfirmed])

    def release(self, pages: Sequence[int]) -> None:
        """Drops one reference each; a sequence's last page becomes evictable first."""
        for page in reversed(pages):
            left = self._references[page] - 1
            if left:
                self._references[page] = left
                continue
            del self._references[page]
            if page in self._hash_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def drop(self, pages: Sequence[int]) -> None:
        """Drops one reference each of pages that a window has left; the prefix cache forgets those
        that no other sequence holds."""
        self.release(pages)
        for page in pages:
            if page in self._cached:
                self._forget(page)
                del self._cached[page]
                self._free.append(page)

    def check(self) -> None:
        """Raises AssertionError when a page is lost or in two states at once."""
        free, cached, used = set(self._free), set(self._cached), set(self._references)
        assert len(free) == len(self._free), "a page is free twice"
        assert not (free & cached or free & used or cached & used), "a page is in two states"
        assert len(free) + len(cached) + len(used) == self.total, "a page is lost"
        assert self._page_of == {h: p for p, h in self._hash_of.items()}, "hash maps disagree"

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        if (digest := self._hash_of.pop(page, None)) is not None:
            del self._page_of[digest]

"""Keys of the prefix cache: the key of a full page is a hash of all tokens up to its end.

A chained cryptographic hash (blake2b, 16 bytes), so that different prefixes do not collide.
"""

from __future__ import annotations

import hashlib
from array import array

from kvline_server.memory.pages import PAGE_SIZE


def extend_chain(chain: list[bytes], tokens: list[int], upto: int) -> None:
    """Appends the hashes of pages that are full within tokens[:upto]."""
    while (end := (len(chain) + 1) * PAGE_SIZE) <= upto:
        digest = hashlib.blake2b(chain[-1] if chain else b"", digest_size=16)
        digest.update(array("i", tokens[end - PAGE_SIZE : end]).tobytes())
        chain.append(digest.digest())

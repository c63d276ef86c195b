"""The name of a revision: a hash of its inputs and image."""

from __future__ import annotations

import hashlib

from kvline_operator.api.spec import canonical

SAFE_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"  # as Kubernetes uses: no vowels, so no words
LENGTH = 5
MAX_COUNTER = 100  # of revisions of one service whose hashes are equal


def revision_hash(inputs_json: str, image: str, counter: int = 0) -> str:
    """`counter`: above 0 for one whose name another revision has."""
    text = canonical([inputs_json, image, counter])
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    letters = []
    for _ in range(LENGTH):
        number, index = divmod(number, len(SAFE_ALPHABET))
        letters.append(SAFE_ALPHABET[index])
    return "".join(letters)


def is_hash(name: str, inputs: object, image: str) -> bool:
    """Whether a revision with these inputs and image may have this name."""
    text = canonical(inputs)
    return any(revision_hash(text, image, n) == name for n in range(MAX_COUNTER))

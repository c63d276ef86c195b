"""Digests of pixels and files. Imports no decoder: the engine, which checks pixels, needs none."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from kvline_server.images.processor import Processor

DIGEST_BYTES = 32


def digest(values: NDArray[np.uint8]) -> bytes:
    """The whole of it is a key of caches: a shorter one can be forged, and then a client is served
    what another's picture is."""
    hashed = hashlib.blake2b(repr(values.shape).encode(), digest_size=DIGEST_BYTES)
    hashed.update(np.ascontiguousarray(values).data)
    return hashed.digest()


def file_digest(data: bytes, processor: Processor) -> bytes:
    """Of a file and of what it would be resized to."""
    hashed = hashlib.blake2b(repr(processor).encode(), digest_size=DIGEST_BYTES)
    hashed.update(data)
    return hashed.digest()

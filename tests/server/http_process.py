"""A process with the allocator settings of the server's HTTP processes, for measures of memory."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.pool import Pool
from unittest.mock import patch

from kvline_server.parent.children import HTTP_MALLOC


@contextmanager
def http_process() -> Iterator[Pool]:
    """A pool of it alone. The settings are read as a process starts: this one's stay."""
    with patch.dict(os.environ, HTTP_MALLOC):
        pool = multiprocessing.get_context("spawn").Pool(1)
    with pool:
        yield pool

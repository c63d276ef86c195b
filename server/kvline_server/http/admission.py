"""How much may be under way at once: bounded by sequences and by prompt tokens.

Refusing costs nearly nothing; an unbounded queue is the first thing to fail under overload. Each
accepted request ends in exactly one of finished, aborted, failed; the counters sum.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvline_server.http.errors import ApiError, TooMany, Unavailable

QUEUE_FACTOR = 4  # sequences waiting for each one that may run


@dataclass(slots=True)
class Admission:
    max_sequences: int = 0
    max_tokens: int = 0
    sequences: int = 0
    tokens: int = 0
    requests: int = 0
    received: int = 0
    finished: int = 0
    refused: int = 0
    aborted: int = 0
    failed: int = 0
    draining: bool = False

    def open(self, max_running: int, max_model_len: int) -> None:
        self.max_sequences = max_running * (1 + QUEUE_FACTOR)
        self.max_tokens = max_model_len * self.max_sequences

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts one request to its end, whatever that is."""
        if self.draining:
            raise Unavailable("this server is shutting down")
        if not self.max_sequences:
            raise Unavailable("this server is not ready yet")
        self.received += 1
        self.requests += 1
        try:
            yield
        except ApiError as error:
            if error.status < 500:
                self.refused += 1
            else:
                self.failed += 1
            raise
        except (asyncio.CancelledError, GeneratorExit):  # the client left
            self.aborted += 1
            raise
        except Exception:
            self.failed += 1
            raise
        else:
            self.finished += 1
        finally:
            self.requests -= 1

    @contextmanager
    def room(self, sequences: int, tokens: int) -> Iterator[None]:
        """Holds room for sequences of so many prompt tokens in all. Raises TooMany."""
        if (
            self.sequences + sequences > self.max_sequences
            or self.tokens + tokens > self.max_tokens
        ):
            raise TooMany("too many requests are waiting; try again later")
        self.sequences += sequences
        self.tokens += tokens
        try:
            yield
        finally:
            self.sequences -= sequences
            self.tokens -= tokens

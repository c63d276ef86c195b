"""Admission control: bounds the sequences, prompt tokens and response bytes under way in the pod.

A rejection is cheap; an unbounded queue fails first under overload. Each accepted request ends in
exactly one of finished, aborted, failed, so the counters add up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect

from kvline_server.http.errors import ApiError, BadRequest, NotRead, TooMany, Unavailable
from kvline_server.ipc.totals import SCORE_BYTES, SEQUENCES, TOKENS, Totals
from kvline_server.options.clients import QUEUE_FACTOR, max_sequences

BLOCK = 16 << 10  # bytes: a short answer holds one


class Room:
    """What one request holds of its admission."""

    def __init__(self, admission: Admission, nbytes: int) -> None:
        self._admission = admission
        self.nbytes = nbytes
        self._kept = 0

    def hold(self, nbytes: int) -> None:
        """Room for more scores. Raises TooMany, and BadRequest where no wait would help."""
        if not nbytes:
            return
        self._admission.check_held(self.nbytes + nbytes)
        if not self._admission.totals.take((SCORE_BYTES, nbytes, self._admission.max_held)):
            raise TooMany("too many logprobs and texts are waiting to be sent; try again later")
        self.nbytes += nbytes

    def keep(self, nbytes: int) -> None:
        """Room for so many bytes of an answer in all, by the block. Raises as `hold`."""
        most = self._admission.max_held
        if nbytes > most:
            raise BadRequest(
                f"this answer takes {nbytes} bytes until its end; this server holds {most}: ask "
                "for fewer tokens"
            )
        while self._kept < nbytes:
            self.hold(BLOCK)
            self._kept += BLOCK


@dataclass(slots=True)
class Admission:
    max_sequences: int = 0
    max_tokens: int = 0
    max_held: int = 64 << 20  # bytes of scores that wait to be sent
    max_requests: int = 4096  # those of clients that have left included, until they notice
    totals: Totals = field(default_factory=Totals)
    active: int = 0  # requests
    received: int = 0
    finished: int = 0
    refused: int = 0
    aborted: int = 0
    failed: int = 0
    rejected: int = 0  # sequences answered 429; a request counts as one where it has no plan yet
    ended: int = 0  # sequences that were admitted and have ended
    drained: int = 0  # of `finished`, those during a drain
    cut: int = 0  # requests under way that a drain's end has ended
    draining: bool = False
    ending: bool = False  # the drain's time is over

    def open(self, max_running: int, kv_tokens: int) -> None:
        """Sets the limits; prompt tokens are bounded by a multiple of the validated budget."""
        self.max_sequences = max_sequences(max_running)
        self.max_tokens = kv_tokens * (1 + QUEUE_FACTOR)

    def check_open(self) -> None:
        """For /health: raises Unavailable before the engine is ready and during a drain. Requests
        that arrive during a drain are still served."""
        if self.draining:
            raise Unavailable("this server is shutting down")
        self.check_sized()

    def check_sized(self) -> None:
        """Raises Unavailable before the engine is ready."""
        if not self.max_sequences:
            raise Unavailable("this server is not ready yet")

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts one request and its outcome."""
        self.check_sized()
        self.received += 1
        self.active += 1
        try:
            if self.active > self.max_requests:
                raise TooMany("too many requests are under way; try again later")
            yield
        except (ClientDisconnect, NotRead):  # the client left, or does not read
            self.aborted += 1
            raise
        except ApiError as error:
            if isinstance(error, TooMany):
                self.rejected += error.sequences
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
            self.drained += self.draining
        finally:
            self.active -= 1

    @contextmanager
    def room(self, sequences: int, tokens: int, nbytes: int = 0) -> Iterator[Room]:
        """Holds room for sequences whose prompts take so many KV tokens in all, and so many bytes
        of scores. Raises TooMany, and BadRequest where no wait would help."""
        if sequences > self.max_sequences:
            raise BadRequest(
                f"prompt: {sequences} choices (prompts times n) in one request; this server takes "
                f"{self.max_sequences}",
                "prompt",
            )
        if tokens > self.max_tokens:
            raise BadRequest(
                f"prompt: {tokens} KV tokens in one request; this server takes {self.max_tokens}",
                "prompt",
            )
        self.check_held(nbytes)
        if not self.totals.take(
            (SEQUENCES, sequences, self.max_sequences),
            (TOKENS, tokens, self.max_tokens),
            (SCORE_BYTES, nbytes, self.max_held),
        ):
            raise TooMany("too many requests are waiting; try again later", sequences)
        room = Room(self, nbytes)
        try:
            yield room
        except BaseException:  # also where the client has read too little to get the error
            self.cut += self.ending
            raise
        finally:
            self.totals.give((SEQUENCES, sequences), (TOKENS, tokens), (SCORE_BYTES, room.nbytes))
            self.ended += sequences

    def check_held(self, nbytes: int) -> None:
        """Raises BadRequest where one answer has more scores than all may have."""
        if nbytes > self.max_held:
            raise BadRequest(
                f"logprobs: {nbytes} bytes in one answer; this server holds {self.max_held}: ask "
                "for fewer tokens, alternatives or choices, or for a stream",
                "logprobs",
            )

"""Estimates the load that arrives at a replica, by Little's law over the last minutes.

The result is a number of running requests: those that run now, plus the queue's growth per second
times the mean service time. The queue includes rejected clients: one that was answered 429 and
retries after the answer's Retry-After counts as one sequence, however often it retries.

The counters of HTTP processes and engine start at 0 with the process; each heartbeat adds a sample.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvline_contract.load import Percentiles
from kvline_server.ipc.histogram import Histogram, Latencies, quantile
from kvline_server.ipc.messages import EdgeBeat

RETRY_SECONDS = 1.0  # a 429's Retry-After
REJECTED_SECONDS = 60.0
LATENCY_SECONDS = 60.0
WINDOW = 60.0  # over which the queue's growth is measured
SERVICE_SECONDS = 300.0  # over which service times are averaged; long answers end rarely


@dataclass(frozen=True, slots=True)
class Sample:
    at: float
    edge: EdgeBeat
    held: float = 0.0  # seconds of running, summed over sequences
    waiting: int = 0


NOTHING = Sample(0.0, EdgeBeat(ready=False, active=0))


class Recent:
    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()
        self._running = 0

    def add(self, now: float, edge: EdgeBeat, running: int, waiting: int) -> None:
        """Keeps at most one sample per second."""
        last = self._samples[-1] if self._samples else Sample(now, edge)
        held = last.held + self._running * (now - last.at)
        self._running = running
        if len(self._samples) > 1 and last.at - self._samples[-2].at < 1.0:
            self._samples.pop()
        self._samples.append(Sample(now, edge, held, waiting))
        while len(self._samples) > 1 and now - self._samples[1].at >= SERVICE_SECONDS:
            self._samples.popleft()

    def rejected(self, now: float) -> int:
        """Sequences answered 429 within the last minute."""
        return self._last().edge.rejected - self._at(now - REJECTED_SECONDS).edge.rejected

    def retrying(self, now: float) -> int:
        """Distinct sequences that are rejected and retry."""
        half = WINDOW / 2
        last = self._last().edge.rejected - self._at(now - half).edge.rejected
        return round(last / half * RETRY_SECONDS)

    def arriving_milli(self, now: float) -> int | None:
        """Running requests that the arriving load needs, in thousandths; negative while the queue
        shrinks, None while no sequence has ended."""
        first, last = self._at(now - SERVICE_SECONDS), self._last()
        if last.edge.ended == first.edge.ended:
            return None
        service = (last.held - first.held) / (last.edge.ended - first.edge.ended)
        begin, middle = self._at(now - WINDOW), self._at(now - WINDOW / 2)
        held = (last.held - begin.held) / WINDOW
        before, between, after = (s.edge.rejected for s in (begin, middle, last))
        outside = (after - 2 * between + before) * RETRY_SECONDS
        growth = (last.waiting - begin.waiting) / WINDOW + outside / (WINDOW / 2) ** 2
        return round(1000 * (held + growth * service))

    def first_token(self, now: float) -> Percentiles | None:
        """Of the sequences that had their first token within the last minute."""
        begin, end = self._latencies(now)
        return _percentiles(begin.first_token, end.first_token)

    def between_tokens(self, now: float) -> Percentiles | None:
        begin, end = self._latencies(now)
        return _percentiles(begin.between_tokens, end.between_tokens)

    def _latencies(self, now: float) -> tuple[Latencies, Latencies]:
        samples = self._at(now - LATENCY_SECONDS), self._last()
        return samples[0].edge.latencies, samples[1].edge.latencies

    def _last(self) -> Sample:
        return self._samples[-1] if self._samples else NOTHING

    def _at(self, moment: float) -> Sample:
        """The last sample at or before `moment`, else the first one."""
        samples = list(self._samples)  # a copy: another thread adds
        found = next((s for s in reversed(samples) if s.at <= moment), None)
        return found or (samples[0] if samples else NOTHING)


def _percentiles(begin: Histogram, end: Histogram) -> Percentiles | None:
    """Of what was counted between the two."""
    counts = [b - a for a, b in zip(begin.counts, end.counts, strict=True)]
    if not any(counts):
        return None
    shares = (0.5, 0.9, 0.99)
    return Percentiles(*(round(1e6 * (quantile(counts, share) or 0)) for share in shares))

"""Simulates random arrivals and the replicas that follow them, with the server's own load figures
and the operator's own decision every 15 s. `python tests/operator/arrivals.py` prints the replicas
over time."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from kvline_contract.load import Load
from kvline_contract.report import VERSION
from kvline_operator.api.spec import Autoscaling
from kvline_operator.plan.autoscale import Scale, decide, demand
from kvline_server.ipc.messages import EdgeBeat
from kvline_server.parent.recent import Recent

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
POLL = 15.0
QUEUE = 4  # requests waiting for each one that may run


@dataclass(frozen=True)
class Traffic:
    """Poisson arrivals with exponential service times; a client that is rejected comes again."""

    rate: float  # new requests a second
    service: float  # mean seconds in the batch
    retries: int = 1_000_000
    retry_after: float = 1.0
    until: float = 1200.0  # arrivals end then

    def needed(self, places: int, how: Autoscaling) -> int:
        return math.ceil(100 * self.rate * self.service / (places * how.target_percent))


@dataclass
class Replica:
    places: int
    ready_at: float
    running: int = 0
    queue: deque[float] = field(default_factory=deque)
    rejected: int = 0
    ended: int = 0
    recent: Recent = field(default_factory=Recent)

    def beat(self, now: float) -> None:
        edge = EdgeBeat(ready=True, active=0, rejected=self.rejected, ended=self.ended)
        self.recent.add(now, edge, self.running, len(self.queue))

    def load(self, now: float) -> Load:
        tokens = 100 * self.places
        return Load(
            VERSION,
            tokens,
            100 * self.running,
            0,
            100 * len(self.queue),
            self.running,
            len(self.queue),
            self.recent.rejected(now),
            self.places,
            False,
            self.recent.retrying(now),
            self.recent.arriving_milli(now),
        )


@dataclass
class Fleet:
    """A service whose replicas run `places` requests each and take `start` seconds to get ready."""

    traffic: Traffic
    how: Autoscaling
    places: int = 2
    start: float = 45.0
    seed: int = 1

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.replicas = [Replica(self.places, 0.0)]
        self.serving = list(self.replicas)  # those that are ready now
        self.events: list[tuple[float, int, str, object]] = []
        self.order = itertools.count()
        self.arrived = self.served = self.lost = 0
        self.scale: Scale | None = None

    def run(self, end: float) -> Iterator[tuple[float, int]]:
        """(second, wanted replicas) at each poll."""
        self._at(0.0, "next", None)
        self._at(0.5, "beat", None)
        self._at(POLL, "poll", None)
        while self.events:
            now, _, kind, what = heapq.heappop(self.events)
            if now > end:
                return
            if kind == "next" and now < self.traffic.until and self.traffic.rate:
                self.arrived += 1
                self._arrive(now, 0)
                self._at(now + self.random.expovariate(self.traffic.rate), "next", None)
            elif kind == "arrive":
                self._arrive(now, what)  # type: ignore[arg-type]
            elif kind == "end":
                self._end(now, what)  # type: ignore[arg-type]
            elif kind == "beat":
                for replica in self.serving:
                    replica.beat(now)
                self._at(now + 0.5, "beat", None)
            elif kind == "ready":
                self.serving = self.ready(now)
            elif kind == "poll":
                self._poll(now)
                yield now, len(self.replicas)
                self._at(now + POLL, "poll", None)

    def ready(self, now: float) -> list[Replica]:
        return [r for r in self.replicas if r.ready_at <= now]

    def _at(self, when: float, kind: str, what: object) -> None:
        heapq.heappush(self.events, (when, next(self.order), kind, what))

    def _arrive(self, now: float, tries: int) -> None:
        replica = self.random.choice(self.serving)
        if replica.running < self.places:
            self._begin(now, replica)
        elif len(replica.queue) < QUEUE * self.places:
            replica.queue.append(now)
        else:
            replica.rejected += 1
            if tries < self.traffic.retries:
                wait = self.traffic.retry_after * self.random.uniform(0.9, 1.1)
                self._at(now + wait, "arrive", tries + 1)
            else:
                self.lost += 1

    def _begin(self, now: float, replica: Replica) -> None:
        replica.running += 1
        self._at(now + self.random.expovariate(1 / self.traffic.service), "end", replica)

    def _end(self, now: float, replica: Replica) -> None:
        replica.running -= 1
        replica.ended += 1
        self.served += 1
        if replica.queue:
            replica.queue.popleft()
            self._begin(now, replica)

    def _poll(self, now: float) -> None:
        ready = self.ready(now)
        demanded = demand([r.load(now) for r in ready], self.how.target_percent)
        moment = NOON + timedelta(seconds=now)
        settled = len(self.ready(now - 60))
        self.scale = decide(self.scale, len(self.replicas), demanded, self.how, moment, settled)
        while len(self.replicas) < self.scale.replicas:
            self.replicas.append(Replica(self.places, now + self.start))
            self._at(now + self.start, "ready", None)
        del self.replicas[self.scale.replicas :]  # they finish their requests
        self.serving = self.ready(now)


def main() -> None:
    how = Autoscaling(max_replicas=1000)
    traffics = {
        "4 a second of 5 s on 2 places a replica, retried each second": Traffic(4, 5),
        "the same, two retries": Traffic(4, 5, retries=2),
        "the same, none": Traffic(4, 5, retries=0),
        "long answers": Traffic(0.5, 40),
        "short answers": Traffic(20, 1),
    }
    for name, traffic in traffics.items():
        fleet = Fleet(traffic, how)
        counts = [n for _, n in fleet.run(1800)]
        print(f"{name}: {traffic.needed(2, how)} needed, at most {max(counts)}")
        print("   at each minute:", *counts[3::4])


if __name__ == "__main__":
    main()

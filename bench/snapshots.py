"""Which snapshots of recurrent states are worth their slots: what share of prompts is found under
some policies, and how many slots beside those of running sequences pay for their memory.

Simulated on the host (conversations.py). `ours` is memory/states as it is; the others have as many
slots, and use those of running sequences that are idle as it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conversations import WORKLOADS, Pages, Request, Server, States, Workload
from record import record, table

from kvline_server.memory.states import BOUNDARY, PAGES, StatePool, StateTable

REQUESTS = 900
RUNNING = 32
KV_TOKENS = 1_500_000
SLOTS = (0, 16, 32, 64, 128)
ROOM = 1_200_000  # KV tokens that fit beside the states of running sequences, without snapshots
TRADED = (0, 8, 16, 32, 48, 64, 96, 128, 192)
# Qwen3.5-27B: bytes of a state and of a token's keys and values.
STATE, TOKEN = 153_944_064, 65_536


class Ours:
    def __init__(self, running: int, snapshots: int) -> None:
        self.pool = StatePool(running, snapshots)
        self.tables: dict[Request, StateTable] = {}

    def admit(self, request: Request, matched: int) -> int:
        keys, tokens = request.prompt.keys, request.prompt.tokens
        reach = self.pool.reach(keys[: matched // BOUNDARY * PAGES])
        start = reach // PAGES * BOUNDARY
        made = self.pool.admit(keys, matched // BOUNDARY * PAGES, reach, tokens)
        self.tables[request] = made
        self.pool.plan(made, start, tokens - start, keys)
        self.pool.publish()
        self.pool.confirm(made, tokens)
        return start

    def cross(self, request: Request) -> None:
        made = self.tables[request]
        self.pool.plan(made, request.computed, 1, request.whole.keys)
        self.pool.publish()
        self.pool.confirm(made, request.computed)

    def end(self, request: Request) -> None:
        at = request.computed
        self.pool.release(self.tables.pop(request), at, at, request.whole.keys)


@dataclass(eq=False)
class Kept:
    key: bytes
    saves: int  # tokens that are computed again without it
    used: int  # when


@dataclass(frozen=True)
class Policy:
    """Which boundaries have a snapshot, and what one is worth."""

    tail: bool = True  # the last one of each prompt
    branch: bool = True  # where pages were found and no state: that were seen twice
    answer: bool = True  # the last one of each answer
    every: int = 0  # and at multiples of so many tokens
    saved: float = 0.0  # weight of the tokens that one saves, beside the time of its last use


class Others:
    def __init__(self, policy: Policy, running: int, snapshots: int) -> None:
        self.policy, self.total = policy, running + snapshots
        self.running = self.now = 0
        self.kept: dict[bytes, Kept] = {}
        self.decoding: dict[Request, Kept] = {}

    def admit(self, request: Request, matched: int) -> int:
        self.now += 1
        self.running += 1
        keys, start = request.prompt.keys, matched // BOUNDARY * BOUNDARY
        while start and _key(keys, start) not in self.kept:
            start -= BOUNDARY
        if start:
            self.kept[_key(keys, start)].used = self.now
        self._fit()
        wanted = set[int]()
        if self.policy.every:
            wanted |= set(range(0, request.prompt.tokens, self.policy.every))
        if self.policy.tail:
            wanted.add((request.prompt.tokens - 1) // BOUNDARY * BOUNDARY)
        if self.policy.branch:
            wanted.add(matched // BOUNDARY * BOUNDARY)
        before = start
        for at in sorted(each for each in wanted if each > start):
            self._keep(_key(keys, at), at - before)
            before = at
        return start

    def cross(self, request: Request) -> None:
        if self.policy.answer:
            old = self.decoding.pop(request, None)
            saves = request.computed - request.prompt.tokens + BOUNDARY
            if old is not None and self.kept.get(old.key) is old:
                del self.kept[old.key]
            self.decoding[request] = self._keep(_key(request.whole.keys, request.computed), saves)

    def end(self, request: Request) -> None:
        self.running -= 1
        self.decoding.pop(request, None)

    def _keep(self, key: bytes, saves: int) -> Kept:
        self.now += 1
        made = self.kept[key] = Kept(key, saves, self.now)
        self._fit()
        return made

    def _fit(self) -> None:
        while len(self.kept) > self.total - self.running:
            everyone = list(self.kept.values())
            first = min(each.used for each in everyone)
            span, most = self.now - first + 1, max(each.saves for each in everyone)
            weight = self.policy.saved / most
            worst = min(everyone, key=lambda each: (each.used - first) / span + weight * each.saves)
            del self.kept[worst.key]


def _key(keys: Sequence[bytes], tokens: int) -> bytes:
    return keys[tokens // BOUNDARY * PAGES - 1]


POLICIES: dict[str, Callable[[int, int], States]] = {
    "tail only, LRU": lambda r, s: Others(Policy(branch=False), r, s),
    "twice seen, LRU": lambda r, s: Others(Policy(tail=False), r, s),
    "twice seen, tokens saved": lambda r, s: Others(Policy(tail=False, saved=1.0), r, s),
    "both, LRU": lambda r, s: Others(Policy(), r, s),
    "both, tokens saved": lambda r, s: Others(Policy(saved=1.0), r, s),
    "both, tokens saved x4": lambda r, s: Others(Policy(saved=4.0), r, s),
    "both, each 1,024, LRU": lambda r, s: Others(Policy(every=1024), r, s),
    "ours": Ours,
}


def run() -> None:
    for load in WORKLOADS:
        rows = []
        for name, make in POLICIES.items():
            found = [played(make, load, s) for s in SLOTS]
            rows.append([name, *(f"{each:.1f}" for each in found)])
            if name == "ours":
                for slots, each in zip(SLOTS, found, strict=True):
                    record(f"snapshots-{load.name}-{slots}", each, "%", (each, each))
        head = [f"+{s} ({s * STATE / 2**30:.1f} GiB)" for s in SLOTS]
        title = f"{load.name}: % of prompt tokens found; {RUNNING} run, snapshots beside them"
        table(title, ["policy", *head], rows)
    traded()


def played(
    make: Callable[[int, int], States],
    load: Workload,
    snapshots: int,
    running: int = RUNNING,
    tokens: int = KV_TOKENS,
) -> float:
    server = Server(make(running, snapshots), Pages(tokens), running)
    server.play(load, REQUESTS)
    return 100 * server.found / server.asked


def traded() -> None:
    """Of one memory: what slots take, the KV cache lacks."""
    rows = []
    for running in (16, 32, 64, 128):
        for load in WORKLOADS:
            row = [str(running), load.name]
            for slots in TRADED:
                left = ROOM - slots * STATE // TOKEN
                row.append(f"{played(Ours, load, slots, running, left):.1f}")
            rows.append(row)
    head = ["may run", "requests", *map(str, TRADED)]
    table("ours: % found with so many snapshots, of one memory with the KV cache", head, rows)

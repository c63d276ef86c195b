"""Requests of agents and chats, as prefixes without their tokens, and a server that is simulated:
what it would find in its caches, by the second."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Protocol

from kvline_server.memory.pages import PAGE_SIZE
from kvline_server.memory.states import BOUNDARY, PAGES

TURNS = 20
SYSTEMS = 12  # prompts that conversations begin with; the n-th is used 1 / n as often as the first
PREFILL, STEP = 1 / 20_000, 0.02  # seconds a token
_segments = itertools.count()


@dataclass(frozen=True)
class Text:
    """Keys of its whole pages, as pages.extend_chain would give; nothing else is needed of it."""

    keys: list[bytes] = field(default_factory=list)
    tokens: int = 0

    def then(self, tokens: int) -> Text:
        """With so many that nobody else has."""
        segment, keys, end = next(_segments), list(self.keys), self.tokens + tokens
        while (page := (len(keys) + 1) * PAGE_SIZE) <= end:
            before = keys[-1] if keys else b""
            key = hash((int.from_bytes(before, "little"), segment, page))
            keys.append(key.to_bytes(8, "little", signed=True))
        return Text(keys, end)


@dataclass(eq=False)
class Request:
    prompt: Text
    whole: Text  # with its answer
    computed: int = 0
    found: int = 0  # tokens of its prompt


@dataclass(frozen=True)
class Workload:
    name: str
    stripped: float  # share of conversations whose reasoning is left out of the next prompt
    single: float  # of requests that nobody goes on from, behind a system prompt
    clients: int = 48
    think: float = 8.0  # seconds between two turns


WORKLOADS = (
    Workload("agents", stripped=0.0, single=0.0),
    Workload("reasoning", stripped=1.0, single=0.0, think=20.0),
    Workload("mixed", stripped=0.4, single=0.6, clients=64),
)


def conversation(load: Workload, systems: list[Text], rng: random.Random) -> Generator[Request]:
    """Of a client: one turn after another, some of which go back to an earlier one, ask again, or
    have others begin where they are."""
    weights = [1 / (1 + n) for n in range(len(systems))]
    system = rng.choices(systems, weights)[0]
    if rng.random() < load.single:
        prompt = system.then(size(rng, 1500))
        yield Request(prompt, prompt.then(size(rng, 200)))
        return
    stripped = rng.random() < load.stripped
    prompt, history = system.then(size(rng, 300)), list[Text]()
    for _ in range(TURNS):
        output = size(rng, 900 if stripped else 250)
        whole = prompt.then(output)
        yield Request(prompt, whole)
        history.append(prompt)
        way = rng.random()
        if way < 0.04:
            continue  # the same again, of which another answer comes
        if way < 0.10:
            prompt = rng.choice(history).then(size(rng, 300))
            continue
        if way < 0.14:  # three agents of its own go on from here
            for _ in range(3):
                own = whole.then(size(rng, 150))
                yield Request(own, own.then(size(rng, 250)))
        answered = prompt.then(max(1, output // 4)) if stripped else whole
        prompt = answered.then(size(rng, 200 if stripped else 700))


def size(rng: random.Random, typical: int) -> int:
    """Tokens; a tenth are more than thrice as many."""
    return max(16, round(typical * rng.lognormvariate(0, 0.9)))


class States(Protocol):
    """Slots of states under some policy."""

    def admit(self, request: Request, matched: int) -> int:
        """Its prompt is computed. -> tokens that are found, of so many with pages"""

    def cross(self, request: Request) -> None:
        """It has decoded up to a boundary."""

    def end(self, request: Request) -> None: ...


class Pages:
    """Of the KV cache, in blocks of BOUNDARY tokens, by their last use."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.running = 0  # tokens of requests that run
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def matched(self, text: Text) -> int:
        keys = text.keys[: (text.tokens - 1) // PAGE_SIZE]
        for at, key in enumerate(keys[PAGES - 1 :: PAGES]):
            if key not in self._blocks:
                return at * BOUNDARY
        return len(keys) // PAGES * BOUNDARY

    def keep(self, text: Text) -> None:
        for key in reversed(text.keys[PAGES - 1 :: PAGES]):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        self.fit()

    def fit(self) -> None:
        while self._blocks and len(self._blocks) * BOUNDARY + self.running > self.tokens:
            self._blocks.popitem(last=False)


class Server:
    """Requests run as they come; one whose pages do not fit waits, and all behind it."""

    def __init__(self, states: States, pages: Pages, running: int) -> None:
        self.states, self.pages, self.most = states, pages, running
        self.running = 0
        self.waiting: deque[Request] = deque()
        self.asked = self.found = self.with_pages = self.requests = 0
        self._clock, self._ids = 0.0, itertools.count()
        self._events: list[tuple[float, int, str, Request | int]] = []

    def play(self, load: Workload, requests: int, seed: int = 1) -> None:
        """Of the first fifth nothing is counted."""
        rng = random.Random(seed)
        systems = [Text().then(rng.randrange(1500, 10_000)) for _ in range(SYSTEMS)]
        self.warm = requests // 5
        clients = [random.Random(rng.random()) for _ in range(load.clients)]
        chats = [conversation(load, systems, each) for each in clients]
        owner: dict[Request, int] = {}
        for client in range(load.clients):
            self._at(rng.uniform(0, load.think), "turn", client)
        while self.requests < requests:
            self._clock, _, kind, of = heapq.heappop(self._events)
            if isinstance(of, int):
                request = next(chats[of], None)
                while request is None:
                    chats[of] = conversation(load, systems, clients[of])
                    request = next(chats[of], None)
                owner[request] = of
                self.waiting.append(request)
            elif kind == "cross":
                self.states.cross(of)
                self._decode(of)
            else:
                self._end(of)
                client = owner.pop(of)
                self._at(clients[client].expovariate(1 / load.think), "turn", client)
            self._admit()

    def _admit(self) -> None:
        while self.waiting and self.running < self.most:
            request = self.waiting[0]
            if self.running and self.pages.running + request.whole.tokens > self.pages.tokens:
                break
            self.waiting.popleft()
            matched = self.pages.matched(request.prompt)
            self.running += 1
            self.pages.running += request.whole.tokens
            request.found = self.states.admit(request, matched)
            self.pages.keep(request.prompt)
            request.computed = request.prompt.tokens
            self.requests += 1
            if self.requests > self.warm:
                self.asked += request.prompt.tokens
                self.with_pages += matched
                self.found += request.found
            self._decode(request, PREFILL * (request.prompt.tokens - request.found))

    def _decode(self, request: Request, delay: float = 0.0) -> None:
        """Until the next boundary, or its end."""
        at = (request.computed // BOUNDARY + 1) * BOUNDARY
        end = request.whole.tokens - 1  # the last one is not computed
        seconds = delay + STEP * (min(at, end) - request.computed)
        self._at(max(0.0, seconds), "cross" if at < end else "end", request)
        request.computed = min(at, end)

    def _end(self, request: Request) -> None:
        self.running -= 1
        self.pages.running -= request.whole.tokens
        self.states.end(request)
        self.pages.keep(request.whole)

    def _at(self, seconds: float, kind: str, of: Request | int) -> None:
        heapq.heappush(self._events, (self._clock + seconds, next(self._ids), kind, of))

"""Prompt tokens that a hybrid reuses, of those that a plain transformer reuses in the same talk.

Agents of 20 turns behind one system prompt, beside each other: a turn's prompt is the one before,
its answer and what came since. The engine plays the hybrid. What a plain transformer reuses is
arithmetic: all whole pages of what was computed before, exact while none is evicted
(tests/server/test_reuse.py plays one).
"""

from __future__ import annotations

import heapq
import os
import random
from dataclasses import dataclass, field

import offline
import torch
import watch
from conversations import TURNS, size
from record import record, table
from shapes import SHAPES
from stepping import note

from kvline_contract.launch import Device
from kvline_server.engine.engine import Engine
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.memory.pages import PAGE_SIZE, pages_for

AGENTS = 48
SYSTEM, FIRST, RESULT, ANSWER = 4000, 300, 700, 250  # tokens; all but the first typical ones
PAUSE = 40  # steps between two turns, at most


@dataclass(eq=False)
class Agent:
    turns: list[tuple[list[int], int]]  # what each one's prompt has more, and tokens of its answer
    pauses: list[int]  # steps before each
    prompts: list[int] = field(default_factory=list)  # tokens of those that were asked
    found: list[int] = field(default_factory=list)  # of each, tokens in the prefix cache

    @property
    def tokens(self) -> int:
        """At its end."""
        return sum(len(new) + answer for new, answer in self.turns)

    def plain(self, system: int) -> list[int]:
        """What a plain transformer finds of each prompt, behind a system prompt of so many tokens
        that others had before. The last token of an answer is not computed."""
        before = [n + answer - 1 for n, (_, answer) in zip(self.prompts, self.turns, strict=True)]
        return [known - known % PAGE_SIZE for known in (system, *before[:-1])]


def agents(count: int, vocabulary: int, scale: float = 1.0, turns: int = TURNS) -> list[Agent]:
    """The first is a turn ahead, so that all others find the pages of the system prompt."""
    rng = random.Random(0)

    def drawn(typical: int) -> int:
        return size(rng, round(scale * typical))

    def tokens(length: int) -> list[int]:
        return [rng.randrange(10, vocabulary - 10) for _ in range(length)]

    system, made = tokens(round(scale * SYSTEM)), list[Agent]()
    for _ in range(count):
        new = [system + tokens(drawn(FIRST)), *(tokens(drawn(RESULT)) for _ in range(turns - 1))]
        pauses = [rng.randrange(PAUSE) for _ in range(turns)]
        made.append(Agent([(each, drawn(ANSWER)) for each in new], pauses))
    return made


def play(engine: Engine, played: list[Agent]) -> None:
    """All of them, the next turns of each once its last answer is there."""
    prompts: dict[int, list[int]] = {at: [] for at in range(len(played))}
    answers: dict[int, list[int]] = {}  # of the turns that are under way
    due, step, pace = [(0, 0)], 0, watch.Pace()
    while due or answers:
        turns = sum(len(each.found) for each in played)
        pace.print(f"{turns} turns, {len(answers)} under way, {step} steps")
        if not answers:
            step = max(step, due[0][0])
        while due and due[0][0] <= step:
            at = heapq.heappop(due)[1]
            ask(engine, at, played[at], prompts[at])
            answers[at] = []
        found: dict[int, int] = {}
        note(engine, found, answers)
        step += 1
        for at in [each for each in answers if each not in engine.sequences]:
            prompts[at] += answers.pop(at)
            one = played[at]
            one.found.append(found[at])
            if at == 0 and len(one.found) == 1:
                due += [(step + played[each].pauses[0], each) for each in range(1, len(played))]
                heapq.heapify(due)
            if len(one.found) < len(one.turns):
                heapq.heappush(due, (step + one.pauses[len(one.found)], at))


def ask(engine: Engine, at: int, agent: Agent, prompt: list[int]) -> None:
    """Its next turn, behind all of the conversation."""
    new, answer = agent.turns[len(agent.prompts)]
    prompt += new
    agent.prompts.append(len(prompt))
    params = SamplingParams(max_tokens=answer, temperature=0.6, ignore_eos=True, seed=at)
    engine.submit(at, list(prompt), params)


def reused(played: list[Agent], system: int) -> tuple[int, int, int]:
    """-> prompt tokens that were asked, that a plain transformer reuses, and that this one did"""
    plain = [sum(each.plain(system)) for each in played]
    plain[0] -= played[0].plain(system)[0]  # the first prompt of all
    return (
        sum(sum(each.prompts) for each in played),
        sum(plain),
        sum(sum(each.found) for each in played),
    )


def run() -> None:
    """KVLINE_BENCH_MODELS names shapes of hybrids, by default qwen35-9b, or without a GPU
    qwen35-tiny; KVLINE_BENCH_AGENTS is the number of conversations."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    count = int(os.environ.get("KVLINE_BENCH_AGENTS", str(AGENTS)))
    rows = []
    for name in offline.models("qwen35-9b" if gpu else "qwen35-tiny"):
        played = agents(count, SHAPES[name].vocabulary)
        rows.append(one(name, played, gpu))
    head = ["model", "KV tokens", "at the end", "slots", "asked", "plain", "reused", "of plain"]
    head += ["no state"]
    table(f"Prompt tokens of {count} agents of {TURNS} turns", head, rows)


def one(name: str, played: list[Agent], gpu: str | None) -> list[str]:
    """A row of the table: an engine that sizes itself, on a CPU but for a KV cache of all tokens at
    the end."""
    kept = sum(pages_for(each.tokens) * PAGE_SIZE for each in played)
    longest = max(each.tokens for each in played)
    device, tokens = (Device.CUDA, None) if gpu else (Device.CPU, kept)
    engine, result = offline.start(name, device, kv_tokens=tokens, max_model_len=longest)
    play(engine, played)
    asked, plain, found = reused(played, SYSTEM)
    label, states = offline.label(name, offline.only_cache()), engine.caches.states
    record(f"prefix-reuse-{label}", found / plain, "ratio", (found / plain,) * 2, gpu)
    engine.executor.resize((0,) * len(engine.executor.pages))
    slots = f"{states.running} + {states.snapshots}" if states else "-"
    figures = [result.kv_tokens, kept, slots, asked, plain, found, f"{found / plain:.3f}"]
    return [label, *map(str, figures), str(states.lost if states else 0)]

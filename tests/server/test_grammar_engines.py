"""Engines of random weights over the real processes of grammars: every answer follows its grammar,
whatever else its request asks and whatever runs beside it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
from engines import engine, finish, greedy
from grammar_kit import Grammars
from grammar_rank import RUNNING, rank_of, steps_of
from jsonschema import Draft202012Validator
from waiting import limit, within

from kvline_server.engine.engine import Engine, Output
from kvline_server.grammars import matchers
from kvline_server.grammars.compiler import Compiler
from kvline_server.grammars.grammar import Grammar
from kvline_server.grammars.matchers import Matchers
from kvline_server.http.tokens import Tokens
from kvline_server.ipc.sampling_params import SamplingParams, ThinkingBudget
from kvline_server.kernels.torch import TorchKernels
from kvline_server.parallel.gloo import GlooGroup
from kvline_server.parallel.link import Link
from kvline_server.parallel.ranks import Ranks

pytestmark = pytest.mark.process
T = TypeVar("T")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["a", "b"]},
        "tags": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "kind", "tags"],
    "additionalProperties": False,
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))
DIGITS, LONG = (Grammar("regex", f"[0-9]{{{count}}}") for count in (6, 200))
END = "<|end|>"


@pytest.fixture(scope="module")
def grammars(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grammars]:
    made = Grammars(tiny_model, tmp_path_factory.mktemp("grammars"))
    yield made
    made.stop()


@pytest.fixture
def attached(grammars: Grammars) -> Iterator[Matchers]:
    made = grammars.matchers()
    yield made
    made.close()


def play(grammars: Grammars, wanted: list[Grammar], work: Callable[..., T]) -> T:
    """With the keys of compiled grammars, which are kept meanwhile."""

    async def main() -> T:
        compiler = Compiler(grammars.path, limit(20))
        try:
            with ExitStack() as kept:
                return work(*[kept.enter_context(await compiler.compiled(each)) for each in wanted])
        finally:
            await compiler.close()

    return asyncio.run(main())


def ids(outputs: list[Output]) -> list[int]:
    return [token for each in outputs for token in each.tokens]


def text(model: Path, outputs: list[Output]) -> str:
    return Tokens(model).decode(ids(outputs)).removesuffix(END)


def closing(model: Path) -> dict[int, float]:
    """Of random answers more come to an end with it."""
    return {Tokens(model).encode(each)[0]: 5.0 for each in '"}]'}


def check(model: Path, found: dict[int, list[Output]], followers: set[int]) -> int:
    """Those that end are valid, and none fails. -> how many end"""
    ended = 0
    for id in followers:
        *_, last = found[id]
        assert last.finish in ("stop", "length")
        if last.finish == "stop":
            Draft202012Validator(SCHEMA).validate(json.loads(text(model, found[id])))
            ended += 1
    return ended


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "penalties": {"frequency_penalty": 0.4, "repetition_penalty": 1.1},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "filters": {"top_k": 5, "top_p": 0.9},
    "ignore_eos": {"ignore_eos": True},
}


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_of_every_option_answer_as_their_schema_says_beside_others(
    tiny_model: Path, grammars: Grammars, attached: Matchers, depth: int
) -> None:
    """Several of each kind, of different seeds, and as many that follow none: these answer as
    in an engine without the others. With a step in flight each has a token in every step."""
    bias = closing(tiny_model)
    free = {id: greedy(40, seed=id) for id in range(100, 104)}

    def work(key: bytes) -> dict[int, list[Output]]:
        made = engine(tiny_model, running=30, kernels=TorchKernels(depth=depth), matchers=attached)
        for at, asked in enumerate(OPTIONS.values()):
            for seed in range(3):
                params = SamplingParams(120, seed=seed, logit_bias=bias, grammar=key, **asked)
                made.submit(10 * at + seed, [5, 6, 7 + seed], params)
        for id, params in free.items():
            made.submit(id, [5, 6, id], params)
        found = finish(made)
        assert made.masks.failed == 0
        most = max(len(ids(outputs)) for outputs in found.values())
        assert made.steps <= most + 4, "prompts take few of them"
        return found

    found = play(grammars, [JSON], work)
    followers = {10 * at + seed for at in range(len(OPTIONS)) for seed in range(3)}
    assert check(tiny_model, found, followers) >= 9, "half of them end"
    alone = engine(tiny_model)
    for id, params in free.items():
        alone.submit(id, [5, 6, id], params)
    for id, outputs in finish(alone).items():
        assert ids(outputs) == ids(found[id])
    scored = found[10 * list(OPTIONS).index("logprobs")]
    assert all(
        each.scores is not None and len(each.scores.tokens) == len(each.tokens)
        for each in scored
        if each.tokens
    )
    assert sum(each.prompt_scores is not None for each in scored) == 1


def test_drafts_and_preemption_change_no_answer_under_a_grammar(
    tiny_model: Path, grammars: Grammars, attached: Matchers
) -> None:
    """Greedy, so that all say the same: plainly, with draft tokens, in a cache in which sequences
    are preempted, and with a step in flight."""
    repeats = Grammar("regex", "(ab){40}")

    def work(key: bytes, json: bytes) -> list[dict[int, list[int]]]:
        made = []
        ways: list[dict[str, Any]] = [
            {},
            {"draft_tokens": 4},
            {"pages": 15},
            {"pages": 15, "draft_tokens": 4},
        ]
        for more in [{**way, "kernels": TorchKernels(depth=n)} for way in ways for n in (0, 1)]:
            each = engine(tiny_model, matchers=attached, **more)
            for id in range(6):
                asked = greedy(70, grammar=json if id % 2 else key)
                each.submit(id, [5, 6, 7, id], asked)
            found = finish(each)
            assert all(outputs[-1].finish in ("stop", "length") for outputs in found.values())
            if "pages" in more:
                assert each.scheduler.preemptions, "some were"
            if each.speculation is not None:
                assert each.speculation.accepted > 20
            made.append({id: ids(outputs) for id, outputs in found.items()})
        return made

    plain, *others = play(grammars, [repeats, JSON], work)
    assert Tokens(tiny_model).decode(plain[0]).startswith("abab")
    for each in others:
        assert each == plain


def test_an_answer_ends_where_nothing_can_follow_also_without_end_tokens(
    tiny_model: Path, grammars: Grammars, attached: Matchers
) -> None:
    def work(key: bytes) -> dict[int, list[Output]]:
        made = engine(tiny_model, matchers=attached)
        for id, ignore in enumerate((False, True)):
            made.submit(id, [5, 6], SamplingParams(50, grammar=key, seed=1, ignore_eos=ignore))
        return finish(made)

    for outputs in play(grammars, [DIGITS], work).values():
        assert outputs[-1].finish == "stop" and outputs[-1].reason == ""
        assert len(outputs[-1].tokens) == 1, (
            "in the place of an end token, which HTTP does not show"
        )
        digits = text(tiny_model, outputs)
        assert len(digits) == 6 and digits.isdigit()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_killed_process_ends_those_that_follow_a_grammar_and_no_other(
    tiny_model: Path, tmp_path: Path, depth: int
) -> None:
    """In the middle of their answers; the next request is served by its successor."""
    grammars = Grammars(tiny_model, tmp_path)
    attached = grammars.matchers()
    made = engine(tiny_model, kernels=TorchKernels(depth=depth), matchers=attached)

    def work(key: bytes) -> dict[int, list[Output]]:
        for id in range(6):
            made.submit(id, [5, 6, id], greedy(60, grammar=key if id % 2 else b""))
        for _ in range(4):
            made.step()
        old = grammars.filling()
        os.kill(old, signal.SIGKILL)
        with within(20):
            found = finish(made)
        grammars.replaced(old)
        return found

    try:
        found = play(grammars, [LONG], work)
        for id, outputs in found.items():
            last = outputs[-1]
            if id % 2:
                assert (last.finish, last.reason, last.tokens) == ("error", matchers.ENDED, [])
            else:
                assert (last.finish, last.reason) == ("length", "")
        assert made.masks.failed == 3
        assert all(pool.used == 0 for pool in made.caches.pools)

        def again(key: bytes) -> dict[int, list[Output]]:
            assert attached.attach(limit(10))
            made.submit(9, [5, 6], SamplingParams(50, grammar=key, seed=1))
            return finish(made)

        assert play(grammars, [DIGITS], again)[9][-1].finish == "stop"
    finally:
        attached.close()
        grammars.stop()


def test_a_sequence_whose_grammar_nobody_knows_ends_alone_and_says_why(
    tiny_model: Path, grammars: Grammars, attached: Matchers
) -> None:
    made = engine(tiny_model, matchers=attached)
    made.submit(1, [5, 6], greedy(4, grammar=b"unknown", prompt_logprobs=1))
    made.submit(2, [5, 6], greedy(4))
    found = finish(made)
    assert [(o.finish, o.reason, o.tokens) for o in found[1]] == [
        ("error", "its grammar is not known any more", [])
    ]
    assert len(ids(found[2])) == 4


def test_a_sequence_that_is_aborted_ends_with_the_process_too(
    tiny_model: Path, grammars: Grammars, attached: Matchers
) -> None:
    """Waiting, running, and with a step in flight."""

    def work(key: bytes) -> None:
        made = engine(tiny_model, running=2, matchers=attached)
        for id in range(4):
            made.submit(id, [5, 6, id], greedy(60, grammar=key))
        made.step()
        for id in range(4):
            made.abort(id)
        assert not attached._begun
        finish(made)

    play(grammars, [JSON], work)


END_MARK, BEGIN_MARK = 11, 12


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("draft_tokens", [0, 4])
@pytest.mark.parametrize("begin", [None, BEGIN_MARK])
def test_reasoning_ends_by_its_mark_once_its_budget_is_used(
    tiny_model: Path, begin: int | None, draft_tokens: int, depth: int
) -> None:
    """Without any process. What comes before it begins and behind its end is free."""
    made = engine(tiny_model, kernels=TorchKernels(depth=depth), draft_tokens=draft_tokens)
    bias = {END_MARK: -100.0} | ({BEGIN_MARK: 2.0} if begin else {BEGIN_MARK: -100.0})
    budgets = (0, 1, 7, 100)
    for id, tokens in enumerate(budgets):
        budget = ThinkingBudget(tokens, END_MARK, begin)
        asked = SamplingParams(60, seed=id, ignore_eos=True, logit_bias=bias, thinking=budget)
        made.submit(id, [5, 6, END_MARK], asked)
    found = finish(made)
    for id, tokens in enumerate(budgets):
        answer = ids(found[id])
        assert len(answer) == 60 and found[id][-1].finish == "length"
        begun = 0 if begin is None else answer.index(begin) + 1 if begin in answer else 60
        ends = [at for at, token in enumerate(answer) if token == END_MARK]
        assert ends == ([begun + tokens] if begun + tokens < 60 else [])
    assert begin is None or any(begin in ids(outputs) for outputs in found.values())


def test_a_grammar_begins_where_a_budget_ends_reasoning(
    tiny_model: Path, grammars: Grammars, attached: Matchers
) -> None:
    """With draft tokens, too: reasoning repeats itself."""

    def work(key: bytes) -> list[dict[int, list[Output]]]:
        made = []
        for drafts, depth in ((0, 0), (0, 1), (4, 0), (4, 1)):
            kernels = TorchKernels(depth=depth)
            each = engine(tiny_model, kernels=kernels, matchers=attached, draft_tokens=drafts)
            for id, tokens in enumerate((0, 9, 30)):
                asked = SamplingParams(
                    60,
                    temperature=0.0,
                    grammar=key,
                    thinking=ThinkingBudget(tokens, END_MARK),
                )
                each.submit(id, [5, 6, 7], asked)
            made.append(finish(each))
        return made

    behind = f"start: <[^{END_MARK}]>* <[{END_MARK}]> @answer"
    for found in play(grammars, [Grammar("regex", DIGITS.text, around=behind)], work):
        for id, tokens in enumerate((0, 9, 30)):
            answer = ids(found[id])
            at = answer.index(END_MARK)
            assert at <= tokens and found[id][-1].finish == "stop"
            digits = Tokens(tiny_model).decode(answer[at + 1 :]).removesuffix(END)
            assert len(digits) == 6 and digits.isdigit()


@pytest.fixture
def two_ranks(shared_model: Path, tmp_path: Path) -> Iterator[Ranks]:
    """Rank 0 here, rank 1 in a process of its own."""
    ours, theirs = socket.socketpair()
    file = os.memfd_create("steps")
    script = Path(__file__).with_name("grammar_rank.py")
    words = [str(shared_model), str(tmp_path), str(theirs.fileno()), str(file)]
    other = subprocess.Popen(
        [sys.executable, str(script), *words], pass_fds=(theirs.fileno(), file)
    )
    theirs.close()
    group = GlooGroup(0, 2, tmp_path)
    steps = steps_of(shared_model, file)
    yield Ranks(rank_of(shared_model, group), group, [Link(ours, 1)], steps)
    ours.close()  # rank 1 ends with it
    assert other.wait(limit(20)) == 0
    os.close(file)


@pytest.mark.parametrize("depth", [0, 1])
def test_ranks_answer_as_the_grammar_says_with_masks_that_are_filled_once(
    shared_model: Path, two_ranks: Ranks, tmp_path: Path, depth: int
) -> None:
    """Each has half of the vocabulary, and reads its part of the masks behind the step."""
    two_ranks.local.worker.kernels.depth = depth
    grammars = Grammars(shared_model, tmp_path / "grammars")
    attached = grammars.matchers()

    def work(key: bytes, digits: bytes) -> dict[int, list[Output]]:
        made = Engine(two_ranks, RUNNING, 48, 256, (2,), matchers=attached)
        for id in range(8):
            params = SamplingParams(
                90,
                seed=id,
                temperature=float(id % 3),
                top_k=9 * (id % 2),
                logit_bias=closing(shared_model),
                grammar=key if id % 4 else digits,
            )
            made.submit(id, [5, 6, 7 + id], params)
        return finish(made)

    try:
        found = play(grammars, [JSON, DIGITS], work)
    finally:
        attached.close()
        grammars.stop()
    for id in (0, 4):
        digits = text(shared_model, found[id])
        assert len(digits) == 6 and digits.isdigit()
    assert check(shared_model, found, {1, 2, 3, 5, 6, 7}) >= 2

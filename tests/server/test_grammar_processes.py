"""Grammars in processes of their own: what a grammar or a signal does to them ends nothing but the
requests that follow one, each with a reason, and they serve again at once."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from engines import engine, finish
from grammar_kit import (
    SIZE,
    Grammars,
    allowed,
    byte_level,
    choose,
    memory,
    vocabulary,
    wake,
    write_model,
)
from jsonschema import Draft202012Validator
from waiting import eventually, limit, settles, within

from kvline_server.grammars import matchers
from kvline_server.grammars.compiler import Compiler, NotNow, NotServed
from kvline_server.grammars.grammar import Grammar
from kvline_server.grammars.keeper import FULL
from kvline_server.grammars.matchers import Masks, Matchers
from kvline_server.grammars.messages import Wanted
from kvline_server.http.tokens import Tokens
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.options.grammars import COMPILE_SECONDS, MIB, SMALL, GrammarBounds
from kvline_server.worker.step import Step, TokenMasks

pytestmark = pytest.mark.process
T = TypeVar("T")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kind": {"enum": ["a", "b"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))
# Seconds of CPU time: each property is compared with all others.
HUGE = Grammar(
    "json_schema",
    json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(12_000)}}),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("grammars") / "model", byte_level())


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grammars]:
    made = Grammars(model, tmp_path_factory.mktemp("shared"))
    yield made
    made.stop()


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[..., Grammars]]:
    made: list[Grammars] = []

    def begin(**fields: object) -> Grammars:
        made.append(Grammars(model, tmp_path / str(len(made)), **fields))  # type: ignore[arg-type]
        return made[-1]

    yield begin
    for each in made:
        wake(each.forked())
        each.stop()


def run(grammars: Grammars, work: Callable[[Compiler], Awaitable[T]]) -> T:
    async def main() -> T:
        compiler = Compiler(grammars.path, limit(20))
        try:
            return await work(compiler)
        finally:
            await compiler.close()

    return asyncio.run(main())


async def key_of(compiler: Compiler, grammar: Grammar) -> bytes:
    with await compiler.compiled(grammar) as key:
        return key


async def patient(compiler: Compiler, grammar: Grammar) -> bytes:
    """Tried anew where it had too little of a busy machine."""
    for _ in range(4):
        with suppress(NotNow):
            return await key_of(compiler, grammar)
    return await key_of(compiler, grammar)


def has_ended(pid: int) -> bool:
    """Though nobody has waited for it yet."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def step(made: Matchers, tokens: dict[int, list[int]]) -> Masks:
    """With a row for each sequence, in their order."""
    made.ask([Wanted(id, new, [], row) for row, (id, new) in enumerate(tokens.items())])
    return made.wait()


def test_answers_of_two_connections_follow_their_grammars(shared: Grammars, tmp_path: Path) -> None:
    """HTTP has them compiled, the engine asks for masks until they end."""
    texts, made, rng = vocabulary(tmp_path / "m", byte_level()), shared.matchers(), random.Random(1)
    (end,) = texts.tokenizer.eos_tokens

    async def answers(compiler: Compiler) -> dict[int, bytes]:
        with ExitStack() as kept:
            keys = [
                kept.enter_context(await compiler.compiled(grammar))
                for grammar in (
                    JSON,
                    Grammar("choice", '["yes","no"]'),
                    Grammar("regex", "[0-9]{4}"),
                )
            ]
            assert keys[0] == JSON.key()
            for id in range(12):
                made.begin(id, keys[id % 3])
            output: dict[int, list[int]] = {id: [] for id in range(12)}
            new: dict[int, list[int]] = {id: [] for id in output}
            while new:
                masks = step(made, new)
                assert not masks.failed
                for row, id in enumerate(list(new)):
                    options = allowed(made.table[row], SIZE)
                    token = choose(rng, options, texts, rng.random() < 0.3)
                    if token == end:
                        made.end(id)
                        del new[id]
                    else:
                        assert id not in masks.finished
                        output[id].append(token)
                        new[id] = [token]
            return {id: texts.tokenizer.decode_bytes(tokens) for id, tokens in output.items()}

    found = run(shared, answers)
    for id, text in found.items():
        if id % 3 == 0:
            assert json.loads(text).keys() == {"name", "kind"}
        else:
            assert text in (b"yes", b"no") if id % 3 == 1 else text.isdigit() and len(text) == 4
    made.close()


def test_an_engine_of_random_weights_answers_as_its_grammars_say(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Masks of the process, in the steps of an engine: several sequences, one without a grammar."""
    grammars = Grammars(tiny_model, tmp_path / "scratch")
    made = engine(tiny_model)
    masks, launch, seen = grammars.matchers(), made.executor.launch, dict[int, int]()

    def masked(step: Step) -> Any:
        at = {s.request_index: s for s in made.scheduler.running}
        own = [at[index] for index in step.sampled_requests.tolist()]
        rows = [row for row, sequence in enumerate(own) if sequence.id in seen]
        wanted = []
        for at_row, sequence in enumerate(own[row] for row in rows):
            new = sequence.tokens[seen[sequence.id] :]
            seen[sequence.id] = len(sequence.tokens)
            wanted.append(Wanted(sequence.id, new, [], at_row))
        masks.ask(wanted)
        assert not masks.wait().failed
        words = masks.table[: len(rows)].reshape(-1)
        given = TokenMasks(np.array(rows, np.int64), words)
        return launch(replace(step, constraints=replace(step.constraints, masks=given)))

    made.executor.launch = masked  # type: ignore[method-assign]
    (quote, brace) = (Tokens(tiny_model).encode(text)[0] for text in '"}')

    async def work(compiler: Compiler) -> dict[int, str]:
        with await compiler.compiled(JSON) as key:
            for id in range(6):
                bias = {quote: 8.0, brace: 8.0}
                made.submit(id, [5, 6, 7], SamplingParams(80, seed=id, logit_bias=bias))
                if id:
                    masks.begin(id, key)
                    seen[id] = 3
            found = finish(made)
        return {
            id: Tokens(tiny_model).decode([token for each in outputs for token in each.tokens])
            for id, outputs in found.items()
            if id and outputs[-1].finish == "stop"
        }

    try:
        texts = run(grammars, work)
    finally:
        masks.close()
        grammars.stop()
    assert len(texts) >= 3, "some end"
    for text in texts.values():
        Draft202012Validator(SCHEMA).validate(json.loads(text.removesuffix("<|end|>")))


def test_a_grammar_is_compiled_once_and_a_refused_one_tried_once(
    start: Callable[..., Grammars],
) -> None:
    """Answered again while the process that would try them is stopped."""
    grammars = start()

    async def ask(compiler: Compiler) -> None:
        every = await asyncio.gather(*(key_of(compiler, JSON) for _ in range(8)))
        assert set(every) == {JSON.key()}
        with pytest.raises(NotServed, match='Unimplemented keys: \\["not"\\]'):
            await key_of(compiler, Grammar("json_schema", '{"not":{}}'))

    async def work(compiler: Compiler) -> None:
        await ask(compiler)
        pid = grammars.child.process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            await ask(compiler)
        finally:
            os.kill(pid, signal.SIGCONT)

    run(grammars, work)


def test_a_grammar_that_takes_too_long_leaves_nothing(start: Callable[..., Grammars]) -> None:
    """Once its CPU time is over, while masks of others are filled."""
    shared = start(bounds=replace(SMALL, memory=1200 * MIB, trial=1000 * MIB))
    key = run(shared, lambda compiler: key_of(compiler, JSON))
    filling = shared.filling()
    before = memory(filling)

    async def work(compiler: Compiler, made: Matchers) -> list[float]:
        with await compiler.compiled(JSON):
            made.begin(1, key)
            trying = asyncio.create_task(patient(compiler, HUGE))
            began, steps = time.monotonic(), list[float]()
            while not trying.done():
                await asyncio.sleep(0.01)
                asked = time.monotonic()
                assert not (await asyncio.to_thread(step, made, {1: []})).failed
                steps.append(time.monotonic() - asked)
            with pytest.raises(NotServed, match=r"more than 1\.5 s to compile"):
                await trying
            assert time.monotonic() - began > COMPILE_SECONDS * 0.9
            made.end(1)
            return steps

    with closing(shared.matchers()) as made:
        steps = sorted(run(shared, lambda compiler: work(compiler, made)))
    assert len(steps) > 20
    assert steps[len(steps) // 2] < COMPILE_SECONDS / 5, "most wait for nothing"
    assert settles(shared.forked, lambda found: found == [filling], on="server") == [filling]
    assert memory(filling) < before + 2 * MIB


def test_a_grammar_that_takes_too_much_memory_leaves_nothing(
    start: Callable[..., Grammars],
) -> None:
    small = start(bounds=GrammarBounds(memory=48 * MIB, trial=16 * MIB, trials=1, threads=1))
    some = [
        {"properties": {f"a{i}": {"maxLength": i + 1}, "b": {"minimum": i}}} for i in range(1500)
    ]
    large = Grammar("json_schema", json.dumps({"type": "object", "anyOf": some}))

    async def work(compiler: Compiler) -> None:
        for _ in range(2):
            with pytest.raises(NotServed, match="more than 16 MiB"):
                await key_of(compiler, large)
        await key_of(compiler, JSON)

    run(small, work)
    assert len(small.forked()) == 1


def test_a_trial_that_is_killed_is_no_fault_of_its_grammar(start: Callable[..., Grammars]) -> None:
    made = start(bounds=replace(SMALL, memory=1200 * MIB, trial=1000 * MIB))
    filling = made.filling()

    async def work(compiler: Compiler) -> None:
        trying = asyncio.create_task(key_of(compiler, HUGE))
        while len(tried := [pid for pid in made.forked() if pid != filling]) < 1:
            await asyncio.sleep(0.01)
        os.kill(tried[0], signal.SIGKILL)
        with pytest.raises(NotNow, match="was killed"):
            await trying

    run(made, work)
    assert made.filling() == filling


def test_a_killed_process_ends_its_sequences_and_is_replaced(
    start: Callable[..., Grammars],
) -> None:
    grammars = start()
    made, key = grammars.matchers(), run(grammars, lambda c: key_of(c, JSON))
    assert key == JSON.key()
    for id in (1, 2):
        made.begin(id, key)
    assert not step(made, {1: []}).failed
    old = grammars.filling()
    os.kill(old, signal.SIGKILL)
    with within(5):
        assert step(made, {1: [], 2: []}).failed == {1: matchers.ENDED, 2: matchers.ENDED}
    made.end(1)
    grammars.replaced(old)

    async def again(compiler: Compiler) -> None:
        with await compiler.compiled(JSON) as again:
            assert made.attach(limit(10))
            made.begin(3, again)
            masks = step(made, {2: [], 3: []})
            assert masks.failed == {2: matchers.ENDED}
            assert np.count_nonzero(made.table[1]) <= 2, "opening braces"

    run(grammars, again)
    made.close()


def test_a_process_killed_while_it_fills_ends_its_sequences(start: Callable[..., Grammars]) -> None:
    """At any moment: in the middle of a step, of a frame, or between two."""
    grammars, rng = start(), random.Random(3)
    for _ in range(4):
        made = grammars.matchers()

        async def work(compiler: Compiler, made: Matchers = made) -> None:
            with await compiler.compiled(JSON) as key:
                for id in range(32):
                    made.begin(id, key)
                old = grammars.filling()
                killing = asyncio.create_task(asyncio.sleep(rng.random() * 0.02))
                killing.add_done_callback(lambda _: os.kill(old, signal.SIGKILL))
                masks = Masks(frozenset(), {})
                while not masks.failed:
                    every: dict[int, list[int]] = {id: [] for id in range(32)}
                    masks = await asyncio.to_thread(step, made, every)
                assert masks.failed == dict.fromkeys(range(32), matchers.ENDED)

        run(grammars, work)
        made.close()


def test_a_late_process_ends_its_sequences_and_serves_those_after_them(
    start: Callable[..., Grammars],
) -> None:
    grammars = start()
    made = grammars.matchers(seconds=0.3)

    async def work(compiler: Compiler) -> None:
        with await compiler.compiled(JSON) as key:
            made.begin(1, key)
            assert not step(made, {1: []}).failed
            os.kill(pid := grammars.filling(), signal.SIGSTOP)
            began = time.monotonic()
            with within(0.6):
                assert step(made, {1: []}).failed == {1: matchers.LATE.format(0.3)}
            assert time.monotonic() - began >= 0.3
            with within(0.3):  # a stopped process is not waited for
                made.begin(2, key)
                assert step(made, {1: [], 2: []}).failed[2] == matchers.STARTING
            os.kill(pid, signal.SIGCONT)
            assert await asyncio.to_thread(made.attach, limit(10))
            made.begin(3, key)
            assert not step(made, {3: []}).failed, "the grammar is still kept"
            assert grammars.filling() == pid

    run(grammars, work)
    made.close()


def test_a_process_without_a_pulse_is_replaced(start: Callable[..., Grammars]) -> None:
    grammars = start(silent=1.5)
    old = grammars.filling()
    run(grammars, lambda c: key_of(c, JSON))
    os.kill(old, signal.SIGSTOP)
    assert grammars.replaced(old) != old
    assert run(grammars, lambda c: key_of(c, JSON)) == JSON.key()


def test_what_is_kept_is_bounded(start: Callable[..., Grammars]) -> None:
    """Grammars that nobody uses make room; where all are in use, one more has to wait."""
    bounds = GrammarBounds(memory=40 * MIB, trial=16 * MIB, trials=1, threads=1)
    grammars = start(bounds=bounds)

    def enum(at: int) -> Grammar:  # 3 MiB
        return Grammar(
            "json_schema", json.dumps({"enum": [f"{at}-{i:x}" * 6 for i in range(4000)]})
        )

    async def work(compiler: Compiler) -> None:
        for at in range(20):
            await key_of(compiler, enum(at))
        with ExitStack() as kept, pytest.raises(NotNow, match=FULL):
            for at in range(20, 40):
                kept.enter_context(await compiler.compiled(enum(at)))
        await key_of(compiler, enum(41))

    run(grammars, work)
    assert len(grammars.forked()) == 1, "it was not replaced"


def test_processes_that_end_at_once_end_no_other(start: Callable[..., Grammars]) -> None:
    """The one that fills masks, and one that tries a grammar."""
    grammars = start()

    async def work(compiler: Compiler) -> None:
        task = asyncio.create_task(key_of(compiler, HUGE))
        while len(forked := grammars.forked()) < 2:
            await asyncio.sleep(0.01)
        trunk = grammars.child.process.pid
        os.kill(trunk, signal.SIGSTOP)
        for pid in forked:
            os.kill(pid, signal.SIGKILL)
            eventually(partial(has_ended, pid), 10, on="server")
        os.kill(trunk, signal.SIGCONT)
        with pytest.raises(NotNow):
            await task
        grammars.replaced(forked[0])

    run(grammars, work)
    run(grammars, lambda compiler: key_of(compiler, JSON))
    assert grammars.child.process.poll() is None


def test_a_process_that_cannot_be_started_is_started_later(start: Callable[..., Grammars]) -> None:
    """While no file can be opened."""
    grammars = start()
    old, trunk = grammars.filling(), grammars.child.process.pid
    before = resource.prlimit(trunk, resource.RLIMIT_NOFILE)
    resource.prlimit(trunk, resource.RLIMIT_NOFILE, (3, before[1]))
    os.kill(old, signal.SIGKILL)
    eventually(lambda: not grammars.forked(), 10, on="server")
    time.sleep(0.3)  # some attempts
    assert grammars.child.process.poll() is None and not grammars.forked()
    resource.prlimit(trunk, resource.RLIMIT_NOFILE, before)
    grammars.replaced(old)
    run(grammars, lambda compiler: key_of(compiler, JSON))


def test_a_connection_s_end_gives_back_what_it_keeps(start: Callable[..., Grammars]) -> None:
    bounds = GrammarBounds(memory=40 * MIB, trial=16 * MIB, trials=1, threads=1)
    grammars = start(bounds=bounds)

    async def fill(compiler: Compiler) -> int:
        """Keeps grammars until there is no room, and ends without a release. -> how many"""
        kept = 0
        with pytest.raises(NotNow, match=FULL):
            for at in range(40):
                text = json.dumps({"enum": [f"{at}-{i:x}" * 6 for i in range(4000)]})
                await compiler._compile(Grammar("json_schema", text))
                kept += 1
        return kept

    first, second = run(grammars, fill), run(grammars, fill)
    assert first > 2 and second > 2


def test_sequences_whose_lexers_grow_end_for_those_that_began_before_them(
    start: Callable[..., Grammars],
) -> None:
    """Before the kernel ends the process for what it takes."""
    bounds = GrammarBounds(memory=40 * MIB, trial=16 * MIB, trials=1, threads=1)
    grammars = start(bounds=bounds, rows=256)
    made, filling = grammars.matchers(), grammars.filling()
    texts = [
        Grammar("json_schema", f'{{"type":"string","maxLength":{50_000 + i}}}') for i in range(9)
    ]
    quote, *letters = byte_level().encode('"' + "qxzjkvwy" * 25).ids
    assert len(letters) == 200

    async def work(compiler: Compiler) -> list[int]:
        with ExitStack() as kept:
            for id, grammar in enumerate(texts):
                made.begin(id, kept.enter_context(await compiler.compiled(grammar)))
            new, ended = {id: [quote] for id in range(9)}, list[int]()
            for _ in range(8):
                for id in [id for id in range(9) if id not in ended]:
                    made.ask([Wanted(id, new[id], letters, 0)])
                    masks = made.wait()
                    assert set(masks.failed.values()) <= {FULL}
                    ended += masks.failed
                    new[id] = letters
            return ended

    ended = run(grammars, work)
    assert ended and min(ended) > 0 and len(ended) < 9
    assert grammars.filling() == filling, "it was not replaced"
    made.close()


def test_a_new_engine_has_none_of_the_sequences_before_it(shared: Grammars) -> None:
    first, second = shared.matchers(), shared.matchers()

    async def work(compiler: Compiler) -> None:
        with await compiler.compiled(JSON) as key:
            second.begin(1, key)
            first.close()
            assert not step(second, {1: []}).failed

    run(shared, work)
    second.begin(2, b"unknown")
    assert step(second, {2: []}).failed == {2: "its grammar is not known any more"}
    second.close()


def test_a_model_without_a_tokenizer_says_so(model: Path, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", byte_level())
    (folder / "tokenizer.json").unlink()
    grammars = Grammars(folder, tmp_path / "scratch")
    try:
        with pytest.raises(NotServed, match=r"no tokenizer\.json"):
            run(grammars, lambda compiler: key_of(compiler, JSON))
        made, began = Matchers(grammars.path, grammars.rows_file, grammars.rows), time.monotonic()
        assert not made.attach(limit(60)), "an engine is served no masks"
        assert time.monotonic() - began < limit(20), "and its start does not wait for them"
        made.close()
    finally:
        grammars.stop()


def test_a_tokenizer_without_bytes_is_refused_by_name(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.decoder = None
    grammars = Grammars(write_model(tmp_path / "model", tokenizer), tmp_path / "scratch")
    try:
        with pytest.raises(NotServed, match="tokenizer is not one of those"):
            run(grammars, lambda compiler: key_of(compiler, JSON))
    finally:
        grammars.stop()


def test_all_processes_end_with_the_parent_s_connection(start: Callable[..., Grammars]) -> None:
    grammars = start()
    every = [grammars.child.process.pid, grammars.filling()]
    grammars.child.channel.connection.shutdown(2)
    eventually(lambda: grammars.child.process.poll() is not None, 10, on="server")
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in every[1:]), 10, on="server")


def test_many_sequences_of_one_grammar_have_several_lexers(start: Callable[..., Grammars]) -> None:
    """Masks of one lexer are filled one after the other."""
    grammars = start(rows=128)
    made = grammars.matchers()

    async def work(compiler: Compiler) -> None:
        with await compiler.compiled(JSON) as key:
            for id in range(80):
                made.begin(id, key)
            for _ in range(20):
                masks = step(made, {id: [] for id in range(80)})
                assert not masks.failed and not masks.finished
                await asyncio.sleep(0.01)
                made.end(0)
                made.begin(0, key)
            table = made.table[:80]
            assert (table == table[0]).all() and np.count_nonzero(table[0])

    run(grammars, work)
    made.close()

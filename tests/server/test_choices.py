"""Several choices of one prompt: computed and scored once, each with noise of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path

import msgspec
import pytest
from drawn import Drawn
from engines import engine, finish, worker
from ties import mostly_same, same_tokens

from kvline_server.engine.engine import Engine
from kvline_server.engine_process.listen import listen
from kvline_server.engine_process.loop import EngineProcess
from kvline_server.http.completions import seeded
from kvline_server.http.engine_client import EngineClient
from kvline_server.ipc.messages import Channel, Delta
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.options.arguments import EngineArguments
from kvline_server.options.options import Options
from kvline_server.worker.step import InFlight, Step

PROMPT = [(7 * i) % 300 for i in range(60)]
CHOICES = 4
ASKED = SamplingParams(6, temperature=1.0, seed=11, ignore_eos=True, prompt_logprobs=3)


def test_choices_of_neighbouring_seeds_share_no_seed() -> None:
    seeds = {
        seeded(SamplingParams(1, seed=seed), choice).seed
        for seed in [*range(500), 2**63 - 2, 2**63 - 1]
        for choice in range(8)
    }
    assert len(seeds) == 502 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeded(ASKED, 0) == ASKED, "one choice is what a request without n gives"


class Served:
    """An engine that serves on a thread, and what it computed."""

    def __init__(self, made: Engine) -> None:
        self.rows = 0
        self.engine = made
        self.here, line = socket.socketpair()
        self.parent, control = socket.socketpair()
        arguments = EngineArguments(
            options=Options(Path(), Path()), control_fd=-1, http_fds=[line.detach()], root=0
        )
        self.process = EngineProcess(arguments, Channel(control))
        launch, self.stopped = made.executor.launch, False

        def counted(step: Step) -> InFlight:
            self.rows += len(step.tokens)
            return launch(step)

        made.executor.launch = counted  # type: ignore[method-assign]
        (client,) = self.process.http
        hear = partial(self.process._hear_http, client)
        serving = threading.Thread(target=self.serve)
        self.threads = [listen(client, "a client", hear, self.process.parent), serving]
        serving.start()

    def serve(self) -> None:
        while not self.stopped:
            self.process._take(self.engine)
            self.process._publish(self.engine.step())

    def close(self) -> None:
        self.stopped = True
        self.here.close()
        for thread in self.threads:
            thread.join()
        for connection in (self.parent, self.process.parent.connection):
            connection.close()
        self.process.http[0].connection.close()


async def follow(client: EngineClient, params: SamplingParams, leave: bool) -> list[Delta]:
    out: list[Delta] = []
    async with aclosing(client.generate(PROMPT, params)) as batches:
        async for deltas in batches:
            out += deltas
            if leave:
                break
    return out


async def choices(served: Served, leave: bool = False) -> list[list[Delta]]:
    """All choices at once, of which the first leaves before its first token when asked to."""
    client = EngineClient(1000)
    await client.connect(served.here, 16)
    jobs = [asyncio.create_task(follow(client, seeded(ASKED, i), False)) for i in range(CHOICES)]
    if leave:
        await asyncio.sleep(0)
        jobs[0].cancel()
    found = await asyncio.gather(*jobs, return_exceptions=True)
    client.end(RuntimeError("done"))  # type: ignore[arg-type]
    assert client._writer is not None
    client._writer.close()
    return [f for f in found if not isinstance(f, BaseException)]


@pytest.fixture
def folder(make_model: Callable[..., Path]) -> Path:
    return make_model("llama")


def test_a_prompt_of_several_choices_is_computed_and_scored_once(folder: Path) -> None:
    served = Served(engine(folder))
    try:
        found = asyncio.run(choices(served))
    finally:
        served.close()
    tail = len(PROMPT) % 16 or 16  # no full page: each choice computes it
    decodes = CHOICES * (ASKED.max_tokens - 1)
    assert served.rows == len(PROMPT) + (CHOICES - 1) * tail + decodes
    assert worker(served.engine).rows_run == len(PROMPT) - 1 + CHOICES * ASKED.max_tokens
    scores = [deltas[0].prompt_scores for deltas in found]
    assert sum(part.count for part in scores[0]) == len(PROMPT) - 1
    assert all(score == scores[0] for score in scores)
    same = []
    for choice, deltas in enumerate(found):
        alone = engine(folder)
        params = msgspec.structs.replace(seeded(ASKED, choice), prompt_logprobs=None)
        drawn = Drawn(alone)
        alone.submit(0, list(PROMPT), params)
        want = [token for o in finish(alone)[0] for token in o.tokens]
        got = [token for d in deltas for token in d.tokens]
        same.append(same_tokens(got, want, params, drawn.logits(params, len(want))))
    mostly_same(same, CHOICES * ASKED.max_tokens, least=0.5)


def test_choices_whose_first_one_left_compute_for_themselves(folder: Path) -> None:
    served = Served(engine(folder))
    try:
        found = asyncio.run(choices(served, leave=True))
    finally:
        served.close()
    assert len(found) == CHOICES - 1
    for deltas in found:
        assert len(deltas) == ASKED.max_tokens
        assert sum(part.count for part in deltas[0].prompt_scores) == len(PROMPT) - 1


@pytest.mark.parametrize("length, logprobs, waits", [(16, None, 0), (17, None, 3), (9, 0, 3)])
def test_choices_wait_only_for_what_they_can_use(
    length: int, logprobs: int | None, waits: int
) -> None:
    """A prompt without a full page is computed by each anyway; waiting would queue them twice."""

    async def story() -> None:
        here, line = socket.socketpair()
        client = EngineClient(1000)
        await client.connect(here, 16)
        params = msgspec.structs.replace(ASKED, prompt_logprobs=logprobs)
        prompt = list(range(length))

        async def one(choice: int) -> None:
            async with aclosing(client.generate(prompt, seeded(params, choice))) as batches:
                async for _ in batches:
                    pass

        tasks = [asyncio.create_task(one(i)) for i in range(CHOICES)]
        await asyncio.sleep(0.1)
        assert len(client._received) == CHOICES - waits
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        line.close()
        await client.lost.wait()
        await asyncio.sleep(0)

    asyncio.run(story())

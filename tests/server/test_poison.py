"""Keys and values that are not finite end with the request that made them: another that has its
pages afterwards, or its prompt, gets what an engine without that request gives."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import Drawn
from engines import engine, finish, greedy, key_values, worker
from safetensors.torch import load_file, save_file
from ties import same_tokens

from kvline_server.engine.engine import Engine
from kvline_server.memory.pages import PAGE_SIZE, extend_chain

BAD = 250  # a token whose embedding is NaN
NEVER = {0: -100.0, BAD: -100.0}  # what no test wants generated
ASKED = greedy(8, logit_bias=NEVER)
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


@pytest.fixture(scope="module")
def poisoned(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_bad_token(make_model("llama"), tmp_path_factory.mktemp("poisoned"), BAD)


def with_bad_token(model: Path, scratch: Path, token: int) -> Path:
    folder = scratch / "model"
    shutil.copytree(model, folder)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    weights["model.embed_tokens.weight"][token] = float("nan")
    save_file(weights, file)
    return folder


def prompt(id: int, length: int = 40) -> list[int]:
    return [(31 * id + 7 * i) % BAD for i in range(length)]


def bad(id: int, length: int = 40, at: int = 20) -> list[int]:
    tokens = prompt(id, length)
    tokens[at] = BAD
    return tokens


class Served:
    """An engine, and what an untouched one gives for each prompt."""

    def __init__(self, folder: Path, depth: int, pages: int = 13) -> None:
        self.folder = folder
        self.made = engine(folder, pages=pages, step=16, running=4)
        worker(self.made).kernels.depth = depth
        self.next = 0

    def submit(self, tokens: list[int]) -> int:
        self.next += 1
        self.made.submit(self.next, list(tokens), ASKED)
        return self.next

    def fails(self, tokens: list[int]) -> None:
        id = self.submit(tokens)
        assert [o.finish for o in finish(self.made)[id]] == ["error"]

    def answers(self, *prompts: list[int]) -> None:
        ids = [self.submit(tokens) for tokens in prompts]
        outputs = finish(self.made)
        for id, tokens in zip(ids, prompts, strict=True):
            fresh = engine(self.folder, pages=13, step=16, running=4)
            drawn = Drawn(fresh)
            fresh.submit(0, list(tokens), ASKED)
            (want,) = finish(fresh).values()
            assert outputs[id][-1].finish == "length", "another request's NaN"
            got, wanted = (
                [token for o in side for token in o.tokens] for side in (outputs[id], want)
            )
            same_tokens(got, wanted, ASKED, drawn.logits(ASKED, 8))


@DEPTHS
def test_pages_of_a_failed_request_are_clean_for_the_next(poisoned: Path, depth: int) -> None:
    served = Served(poisoned, depth)
    for id in range(6):
        served.fails(bad(id, at=38))
        served.answers(prompt(id, 18), prompt(id + 100, 50))
    assert served.made.caches.used == 0


@DEPTHS
def test_no_later_prompt_finds_what_a_failed_one_left(poisoned: Path, depth: int) -> None:
    """A fault of the device: weights that are not finite in some steps and whole afterwards. Every
    chunk of the prompt was in the prefix cache by then."""
    served = Served(poisoned, depth)
    for at in range(4):
        broken_step(served.made, at)
        served.fails(prompt(3, 60))
        assert not served.made.caches.pools[0].known(chain_of(prompt(3, 60)))
        served.answers(prompt(3, 60))
        assert len(served.made.caches.pools[0].known(chain_of(prompt(3, 60)))) == 60 // PAGE_SIZE
        served = Served(poisoned, depth)


def chain_of(tokens: list[int]) -> list[bytes]:
    chain: list[bytes] = []
    extend_chain(chain, tokens, len(tokens))
    return chain


def broken_step(made: Engine, at: int) -> None:
    """Hidden states of one step to come are NaN from the first layer on."""
    decoder, seen = worker(made).decoder, -1
    decode = decoder.step

    def broken(ids: torch.Tensor, *words: Any) -> torch.Tensor:
        nonlocal seen
        seen += 1
        return decode(torch.full_like(ids, BAD) if seen == at else ids, *words)

    decoder.step = broken  # type: ignore[assignment,method-assign] # of five words


@DEPTHS
def test_two_that_share_a_prompt_fail_together_and_no_third(poisoned: Path, depth: int) -> None:
    """The second finds pages of the first before its result is read; the third comes later."""
    served = Served(poisoned, depth)
    broken_step(served.made, 1)  # not the prompt's last chunk
    first = served.submit(prompt(3, 60))
    for _ in range(3):
        served.made.step()
    second = served.submit(prompt(3, 60))
    outputs = finish(served.made)
    assert [outputs[id][-1].finish for id in (first, second)] == ["error", "error"]
    assert served.made.sequences == {}
    served.answers(prompt(3, 60))


@DEPTHS
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_pages_of_a_prompt_that_its_client_left_are_clean(
    poisoned: Path, depth: int, steps: int
) -> None:
    served = Served(poisoned, depth)
    id = served.submit(bad(3, 60, at=5))
    for _ in range(steps):
        served.made.step()
    served.made.abort(id)
    served.answers(prompt(1, 50), prompt(2, 50))
    served.answers(prompt(3, 60))


def test_pages_that_sizing_left_are_clean(poisoned: Path) -> None:
    served = Served(poisoned, 0)
    for layer in key_values(worker(served.made).arena):
        layer.keys[1:] = layer.values[1:] = float("nan")
    for id in range(4):
        served.answers(prompt(id, 50))


def test_padding_rows_break_no_request(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """They are rows of token 0, in the dummy page. Sequences of several lengths decode together."""
    served = Served(with_bad_token(make_model("llama"), tmp_path, 0), 0, pages=40)
    served.answers(*([1 + token for token in prompt(id, 3 + 17 * id)] for id in range(3)))


@DEPTHS
def test_what_is_whole_stays_in_the_prefix_cache(poisoned: Path, depth: int) -> None:
    served = Served(poisoned, depth, pages=40)
    for _ in range(2):
        id = served.submit(prompt(3, 60))
        cached = served.made.sequences[id]
        finish(served.made)
    assert cached.cached == 48
    served.fails(bad(3, 60, at=40))  # begins as the one before
    again = served.submit(prompt(3, 60))
    cached = served.made.sequences[again]
    finish(served.made)
    assert cached.cached == 0, "any page of a failed sequence may be why"


@DEPTHS
def test_random_loads_with_bad_requests_fail_no_other(poisoned: Path, depth: int) -> None:
    """Few pages: sequences are preempted, and share prefixes."""
    rng = random.Random(depth)
    made = Served(poisoned, depth, pages=10).made
    broken: dict[int, bool] = {}
    finishes: dict[int, str | None] = {}
    id = 0
    while id < 150 or not made.idle:
        if id < 150 and rng.random() < 0.5:
            breaks = rng.random() < 0.2
            kind = rng.randrange(3) + 3 * breaks  # good ones may share what is not confirmed
            tokens = prompt(kind, rng.randint(1, 70))
            if breaks:
                tokens[rng.randrange(len(tokens))] = BAD
            made.submit(id, tokens, greedy(rng.randint(1, 60), logit_bias=NEVER))
            broken[id] = breaks
            id += 1
        for output in made.step():
            finishes[output.sequence.id] = output.finish
        if rng.random() < 0.05 and made.sequences:
            gone = rng.choice(list(made.sequences))
            made.abort(gone)
            del broken[gone]
            finishes.pop(gone, None)
        made.caches.check([each.table for each in made.scheduler.running])
    assert made.scheduler.preemptions and made.caches.used == 0
    for one, breaks in broken.items():
        assert finishes[one] == ("error" if breaks else "length"), one

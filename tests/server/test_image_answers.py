"""Answers to prompts with images against transformers, in float32: whole and in chunks that cut
images, alone and beside others, from the prefix cache and after preemption."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from engines import finish, greedy
from image_models import FAMILIES, Part, engine, logits, of_family, prompt, prompt_of
from near import TOLERANCE
from stand_ins import CapturedKernels, Pool
from vision_models import PATCH, picture

from kvline_server.engine.encoding import ALONE, Bounds
from kvline_server.engine.engine import Engine, Output
from kvline_server.ipc.messages import WRONG_PIXELS
from kvline_server.model.decoder import Decoder
from kvline_server.worker.encoder import Image
from kvline_server.worker.graphs import graphs, steps

TALL, WIDE, SMALL = picture(40, 24, 1), picture(16, 88, 2), picture(8, 8, 3)
TEXT = [int(n) for n in torch.arange(20, 60)]
PROMPTS: dict[str, list[Part]] = {
    "between": [5, 9, 17, TALL, 33, 34, 35],
    "first": [WIDE, 7, 8],
    "last": [7, 8, 9, SMALL],
    "several": [1, TALL, 6, SMALL, 2, 3, WIDE, 4, TALL, 5],
    "long": [*TEXT, TALL, *TEXT, WIDE, *TEXT],
    "text": [*TEXT, 11, 12],
}


def answers(
    made: Engine, prompts: dict[str, list[Part]], tokens: int = 12, family: str = "qwen3_vl"
) -> dict[int, list[Output]]:
    for id, parts in enumerate(prompts.values()):
        own, pictures = prompt_of(family, parts)
        some = pictures if pictures.images else None
        made.submit(id, own, greedy(tokens, logprobs=0), some)
    return finish(made)


def equal_to_transformers(family: str, parts: list[Part], outputs: list[Output]) -> None:
    """Each token was the best, or as good, behind those before; and its logprob is theirs."""
    own, _ = prompt_of(family, parts)
    answer = [token for output in outputs for token in output.tokens]
    found = logits(family, parts, own, answer)[len(own) - 1 : -1]
    chosen = found.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
    assert (chosen >= found.amax(dim=1) - 2 * TOLERANCE).all()
    want = chosen - found.logsumexp(dim=1)
    values = [float(o.scores.values[0]) for o in outputs if o.scores is not None]
    assert values == pytest.approx(want.tolist(), abs=1e-3)


@pytest.mark.parametrize(
    ("family", "step"),
    [
        (family, step)
        for family in FAMILIES
        # Hybrids' chunks are multiples of 64, and so are the images of the largest Gemma.
        for step in (72 if "qwen3_5" in family or "large" in family else 24, 256)
    ],
)
def test_answers_to_images_equal_those_of_transformers(family: str, step: int) -> None:
    prompts = {name: of_family(family, parts) for name, parts in PROMPTS.items()}
    found = answers(engine(family, step=step), prompts, family=family)
    for id, parts in enumerate(prompts.values()):
        equal_to_transformers(family, parts, found[id])


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen3_5"])
def test_a_prompt_alone_again_preempted_and_beside_others_has_one_answer(family: str) -> None:
    parts = PROMPTS["long"]
    alone = engine(family, step=128)
    cold = tokens_of(answers(alone, {"long": parts})[0])
    own, pictures = prompt(parts)
    alone.submit(1, own, greedy(12), pictures)
    warm = finish(alone)[1]
    assert tokens_of(warm) == cold and warm[0].sequence.cached > len(TEXT) + 15
    few = engine(family, step=128, pages=22)  # two of these prompts, not their answers
    found = answers(few, {"a": parts, "b": [*parts[:-1], 99], "c": parts}, tokens=40)
    assert few.scheduler.preemptions, "there was no need to preempt"
    assert tokens_of(found[0])[:12] == tokens_of(found[2])[:12] == cold
    equal_to_transformers(family, parts, found[0])


def test_another_image_of_equal_tokens_shares_no_page_and_the_same_one_does() -> None:
    """Token ids are those of any image of this size: by them alone one client would be shown
    another's picture."""
    other = TALL.copy()
    other[0, 0, 0] ^= 1
    made = engine("qwen3_vl")
    text = TEXT[:16]
    first = answers(made, {"image": [*text, TALL, *TEXT]})
    for id, (image, least, most) in enumerate([(other, 16, 16), (TALL, 64, 70)], 1):
        own, pictures = prompt([*text, image, *TEXT])
        made.submit(id, own, greedy(12, logprobs=0), pictures)
        found = finish(made)[id]
        assert least <= found[0].sequence.cached <= most
        equal_to_transformers("qwen3_vl", [*text, image, *TEXT], found)
    assert tokens_of(found) == tokens_of(first[0])


def test_pixels_that_are_another_picture_s_fail_their_sequence_alone() -> None:
    """As a fault of the HTTP process would have it: two have one digest, and the pixels of the
    first are none of it. Neither is answered by them, then or from a cache."""
    made = engine("qwen3_vl")
    parts = PROMPTS["several"]
    own, pictures = prompt(parts)
    wrong = [replace(each, pixels=each.pixels[::-1].copy()) for each in pictures.images]
    made.submit(0, list(own), greedy(12), replace(pictures, images=tuple(wrong)))
    made.submit(1, list(own), greedy(12, logprobs=0), pictures)
    other, images = prompt(PROMPTS["long"])
    made.submit(2, other, greedy(12, logprobs=0), images)
    found = finish(made)
    (failed,) = found[0]
    assert (failed.tokens, failed.finish, failed.reason) == ([], "error", WRONG_PIXELS)
    equal_to_transformers("qwen3_vl", parts, found[1])
    equal_to_transformers("qwen3_vl", PROMPTS["long"], found[2])
    assert made.idle and not made.sequences


def test_a_salt_keeps_images_apart_too() -> None:
    made = engine("qwen3_vl")
    own, pictures = prompt([TALL, *TEXT])
    cached = []
    for id, salt in enumerate(["a", "", "b", "a"]):
        made.submit(id, list(own), greedy(1, cache_salt=salt), pictures)
        cached.append(finish(made)[id][0].sequence.cached)
    assert cached[:3] == [0, 0, 0] and cached[3] >= 48


class Watched:
    """An encoder, and what it was asked."""

    def __init__(self, made: Engine) -> None:
        assert made.encoding is not None
        self.encoder, made.encoding.encoder = made.encoding.encoder, self
        self.images: list[int] = []  # of each pass
        self.layers: list[int] = []  # of each slice

    def begin(self, images: Sequence[Image], rows: np.ndarray) -> list[int]:
        self.images.append(len(images))
        return self.encoder.begin(images, rows)

    def run(self, layers: int) -> bool:
        self.layers.append(layers)
        return self.encoder.run(layers)


def test_what_does_not_fit_at_once_is_encoded_in_turns() -> None:
    """With a cache of few more rows than an image and a chunk, and passes of one image."""
    made = engine("qwen3_vl", step=24, bounds=Bounds(cached=46, encoded=22))
    watched = Watched(made)
    found = answers(made, PROMPTS)
    for id, parts in enumerate(PROMPTS.values()):
        equal_to_transformers("qwen3_vl", parts, found[id])
    assert sum(watched.images) == 3 and len(watched.images) > 1, "not all fit into a pass"


def test_beside_decodes_a_large_image_is_encoded_in_slices() -> None:
    made = engine("qwen3_vl", bounds=Bounds(cached=128, encoded=64, slice=22))
    watched = Watched(made)
    own, _ = prompt(PROMPTS["text"])
    made.submit(0, own, greedy(12))
    steps = [made.step() for _ in range(2)]
    image, pictures = prompt(PROMPTS["first"])
    made.submit(1, image, greedy(12, logprobs=0), pictures)
    found: dict[int, list[Output]] = {}
    while not made.idle:
        steps.append(made.step())
    for output in (each for step in steps for each in step):
        found.setdefault(output.sequence.id, []).append(output)
    assert watched.layers == [1, 1, 1]
    equal_to_transformers("qwen3_vl", PROMPTS["first"], found[1])
    # Three tokens came between its layers.
    between = [[o.sequence.id for o in step] for step in steps]
    assert between[3:6] == [[0], [0], [0, 1]] or between[3:6] == [[0], [0], [0]]


def test_alone_too_a_large_image_leaves_no_step_without_progress() -> None:
    """A pass of minutes in one step was taken for a hung engine."""
    made = engine("qwen3_vl", bounds=Bounds(cached=128, encoded=64, slice=1))
    watched = Watched(made)
    image, pictures = prompt(PROMPTS["first"])
    assert pictures.images[0].tokens == 22
    made.submit(0, image, greedy(12, logprobs=0), pictures)
    found, progress = list[Output](), [made.progress]
    while not made.idle:
        found += made.step()
        progress.append(made.progress)
    assert watched.layers == [ALONE // 22, ALONE // 22], "of three layers"
    assert all(before < after for before, after in itertools.pairwise(progress[1:]))
    equal_to_transformers("qwen3_vl", PROMPTS["first"], found)


def test_an_image_that_nobody_waits_for_any_more_does_no_harm() -> None:
    """Its sequence is aborted while its image is in the encoder, and another comes."""
    made = engine("qwen3_vl")
    watched = Watched(made)
    own, pictures = prompt(PROMPTS["several"])
    own_text, _ = prompt(PROMPTS["text"])
    made.submit(0, own_text, greedy(30))
    for _ in range(2):
        made.step()
    made.submit(1, own, greedy(12), pictures)
    made.step()
    made.abort(1)
    image, pictures = prompt(PROMPTS["long"])
    made.submit(2, image, greedy(12, logprobs=0), pictures)
    found = finish(made)
    equal_to_transformers("qwen3_vl", PROMPTS["long"], found[2])
    assert 1 not in found and watched.images


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "gemma3"])
@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_a_last_token_of_an_image_is_never_decoded_alone(family: str, penalty: float) -> None:
    """Not behind pages of the prefix cache, nor where few penalties fit into a step."""
    made, found = engine(family, step=96, pages=20), dict[int, list[Output]]()
    for id in range(4):
        text = TEXT[:16] if id % 2 else [*TEXT, *TEXT[:7]]
        own, pictures = prompt_of(family, of_family(family, [*text, SMALL]))
        made.submit(id, own, greedy(4, logprobs=0, presence_penalty=penalty), pictures)
        if id < 2:
            found |= finish(made)
    found |= finish(made)
    for id in (2, 3):
        assert tokens_of(found[id]) == tokens_of(found[id - 2])
    if not penalty:
        equal_to_transformers(family, of_family(family, [*TEXT[:16], SMALL]), found[3])


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "gemma3"])
def test_steps_with_images_stay_on_captured_graphs(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By stand-ins, with a step in flight: answers are those of transformers, and no step was run
    without."""
    pool, inputs = Pool(), steps._Inputs
    monkeypatch.setattr(graphs, "GraphPool", lambda: pool)
    monkeypatch.setattr(steps, "_Inputs", lambda rows, pages, **_: inputs(rows, pages))
    made = engine(family, step=24, kernels=CapturedKernels())
    made.executor.resize(tuple(60 for _ in made.executor.pages))
    assert made.executor.capture(24, 400)
    monkeypatch.setattr(Decoder, "step", None)
    prompts = {name: of_family(family, parts) for name, parts in PROMPTS.items()}
    found = answers(made, prompts, family=family)
    for id, parts in enumerate(prompts.values()):
        equal_to_transformers(family, parts, found[id])
    assert pool.replayed


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "gemma3"])
def test_draft_tokens_behind_images_change_nothing(family: str) -> None:
    """In texts that repeat themselves, of which some are accepted."""
    again = [5, 9, 17, 33] * 6
    prompts: dict[str, list[Part]] = {
        "between": [*again, TALL, *again],
        "twice": [TALL, *again, TALL, *again[:7]],
        "text": [*again],
    }
    prompts = {name: of_family(family, parts) for name, parts in prompts.items()}
    found = []
    for drafts in (0, 3):
        made = engine(family, step=96, draft_tokens=drafts)
        outputs = answers(made, prompts, tokens=40, family=family)
        found.append({id: tokens_of(outputs[id]) for id in outputs})
    assert found[0] == found[1]
    assert made.speculation is not None and made.speculation.accepted


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("gap", [1, 3, 63, 64, 65])
def test_two_large_images_beside_each_other_do_not_wait_for_each_other(
    family: str, gap: int
) -> None:
    """A hybrid's block of 64 rows may show the end of one and the beginning of the next."""
    large = [picture(64, 64 * PATCH // 4, seed) for seed in (7, 8)]
    tokens = 8 * 8
    bounds = Bounds.of(tokens, 64, 64 if family == "qwen3_5" else 1)
    made = engine(family, step=67, bounds=bounds)
    parts: list[Part] = [*TEXT[:gap], large[0], 5, SMALL, *TEXT[:gap], large[1], 6]
    first, second = answers(made, {"a": parts, "b": [*parts, 7]}, tokens=3).values()
    equal_to_transformers(family, parts, first)
    equal_to_transformers(family, [*parts, 7], second)


def test_what_waits_for_the_encoder_takes_no_place_from_text() -> None:
    """Four images of which one is encoded at a time, in ten slices each; a short text behind them
    is answered at once, and each image in its turn."""
    made = engine("qwen3_vl", bounds=Bounds(cached=64 + 22, encoded=22, slice=1))
    watched = Watched(made)
    own, _ = prompt(PROMPTS["text"])
    made.submit(9, own, greedy(40))
    made.step()
    images: list[list[Part]] = [[*TEXT[:4], picture(16, 88, 20 + at), 7] for at in range(4)]
    for id, parts in enumerate(images):
        tokens, pictures = prompt(parts)
        made.submit(id, tokens, greedy(3, logprobs=0), pictures)
    made.submit(8, [5, 6, 7], greedy(1))
    first: dict[int, int] = {}
    found: dict[int, list[Output]] = {}
    for at in range(200):
        for output in made.step():
            first.setdefault(output.sequence.id, at)
            found.setdefault(output.sequence.id, []).append(output)
        if made.idle:
            break
    assert first[8] < min(first[id] for id in range(4))
    assert [first[id] for id in range(4)] == sorted(first[id] for id in range(4))
    assert watched.images == [1, 1, 1, 1]
    for id, parts in enumerate(images):
        equal_to_transformers("qwen3_vl", parts, found[id])

"""Images whose tokens see each other, as Gemma 3's: no step has a part of one, whatever its budget,
and none waits for ever."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import seven
from engines import finish, greedy, play_to_end
from hypothesis import given, settings
from hypothesis import strategies as st
from image_models import Part, engine, of_family, prompt_of
from test_image_answers import (
    PROMPTS,
    TALL,
    TEXT,
    WIDE,
    answers,
    equal_to_transformers,
    tokens_of,
)
from test_largest_steps import bounds

from kvline_server.engine import scheduler as scheduling
from kvline_server.engine.encoding import Bounds, Encoding
from kvline_server.engine.engine import Engine
from kvline_server.engine.pictures import Image, Pictures
from kvline_server.engine.request import Sequence
from kvline_server.engine.scheduler import Scheduler
from kvline_server.engine.stress.owners import StressSet
from kvline_server.engine.work import Work
from kvline_server.images.digests import digest
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.kernels.attention import SHORT_CHUNKS
from kvline_server.kernels.cuda_attention import is_copied
from kvline_server.kernels.layout import Layout
from kvline_server.memory.caches import Caches
from kvline_server.memory.pages import PAGE_SIZE, pages_for
from kvline_server.model.decoder import Decoder


def whole(work: Iterable[Work]) -> None:
    """None begins or ends within an image."""
    for sequence, start, rows, _, _ in work:
        for image in () if sequence.pictures is None else sequence.pictures.images:
            for at in (start, start + rows):
                assert not image.start < at < image.end, f"{start}, {rows} rows, cut {image}"


def watched(made: Engine) -> list[list[Work]]:
    """Of each step from now on."""
    steps: list[list[Work]] = []
    schedule = made.scheduler.schedule

    def scheduled() -> list[Work]:
        steps.append(schedule())
        whole(steps[-1])
        return steps[-1]

    made.scheduler.schedule = scheduled  # type: ignore[method-assign]
    return steps


def test_no_budget_cuts_an_image() -> None:
    """Of 4 tokens, which steps of 7 to 12 rows would, and so would chunks of 1 to 5 beside decodes.
    Answers are those of whole prompts."""
    names = ("first", "several", "last", "text")
    prompts = {name: of_family("gemma3", PROMPTS[name]) for name in names}
    want = answers(engine("gemma3", step=256), prompts, tokens=6, family="gemma3")
    for step, mixed in ((7, None), (8, 1), (9, 2), (10, 3), (11, 4), (12, 5)):
        made = engine("gemma3", step=step, mixed=mixed)
        steps = watched(made)
        made.scheduler.prefill_per_request = 1
        found = answers(made, prompts, tokens=6, family="gemma3")
        assert [tokens_of(found[id]) for id in found] == [tokens_of(want[id]) for id in found]
        assert max(sum(w.rows for w in work) for work in steps) <= step
    for id, parts in enumerate(prompts.values()):
        equal_to_transformers("gemma3", parts, found[id])


def test_an_image_larger_than_the_budget_of_prompts_is_computed_beside_decodes() -> None:
    """64 tokens, of 8 that a step with decodes has for prompts; another one waits for the next."""
    made = engine("gemma3_large", step=67, mixed=8)
    made.scheduler.prefill_per_request = 1
    steps = watched(made)
    texts = [TEXT[at : at + 9] for at in range(2)]
    for id, text in enumerate(texts):
        made.submit(id, list(text), greedy(20, logprobs=0))
    early = made.step()
    parts = of_family("gemma3_large", [5, TALL, 7, *TEXT])
    others = of_family("gemma3_large", [WIDE, *TEXT])
    for id, own in enumerate((parts, others), 2):
        tokens, pictures = prompt_of("gemma3_large", own)
        made.submit(id, tokens, greedy(8, logprobs=0), pictures)
    found = finish(made)
    for output in early:
        found[output.sequence.id].insert(0, output)
    asked: list[list[Part]] = [*map(list[Part], texts), parts, others]
    for id, own in enumerate(asked):
        equal_to_transformers("gemma3_large", own, found[id])
    beside = [[w.rows for w in work] for work in steps if any(w.rows == 64 for w in work)]
    assert [rows[:2] for rows in beside] == [[1, 1]] * 2, "decodes went on"
    assert [sorted(rows)[-1] for rows in beside] == [64, 64]


def test_a_prefix_that_ends_within_an_image_is_found_up_to_the_image() -> None:
    made = engine("gemma3_wide", step=128)
    watched(made)
    text, image, other = TEXT[:20], TALL, WIDE
    prompts: list[tuple[list[Part], int]] = [
        ([*text, image, *TEXT], 0),
        ([*text, image, *TEXT, 9], 112),  # its last full page
        ([*text, image], 16),  # 80 tokens are in the cache: all but the image's last ones
        ([*text, other, *TEXT], 16),  # another image shares no page
        ([*text, image, 3, other, *TEXT], 16),
        ([*text, image, 3, other, *TEXT, 4], 176),
    ]
    for id, (parts, cached) in enumerate(prompts):
        own = of_family("gemma3_wide", parts)
        tokens, pictures = prompt_of("gemma3_wide", own)
        made.submit(id, tokens, greedy(4, logprobs=0), pictures)
        found = finish(made)[id]
        assert (id, found[0].sequence.cached) == (id, cached)
        equal_to_transformers("gemma3_wide", own, found)


@pytest.mark.parametrize("family", ["gemma3", "gemma3_wide"])
def test_a_preempted_prompt_goes_on_behind_no_part_of_an_image(family: str) -> None:
    parts = of_family(family, PROMPTS["long"])
    prompts = {"a": parts, "b": [*parts[:-1], 99], "c": parts}
    few = engine(family, step=128, pages=20 if family == "gemma3" else 34)
    watched(few)
    found = answers(few, prompts, tokens=30, family=family)
    assert few.scheduler.preemptions, "there was no need to preempt"
    assert tokens_of(found[0]) == tokens_of(found[2])
    for id, own in enumerate(prompts.values()):
        equal_to_transformers(family, own, found[id])


class Slow:
    """An encoder of so many slices a pass."""

    def __init__(self, slices: int) -> None:
        self.slices = self.left = slices

    def begin(self, images: object, rows: object) -> list[int]:
        self.left = self.slices
        return []

    def run(self, layers: int) -> bool:
        self.left -= 1
        return self.left <= 0 or not layers


SPAN = 24  # tokens of an image, in more than one page


def pictured(
    id: int, parts: list[int], output: int, penalty: float = 1.0, kinds: int = 3
) -> Sequence:
    """Texts of so many tokens, and for 0 an image, which is one of so many."""
    tokens: list[int] = []
    images: list[Image] = []
    for part in parts:
        if part:
            tokens += range(len(tokens), len(tokens) + part)
        else:
            pixels = np.full((1, 1, 3), (id + len(tokens)) % kinds, np.uint8)
            images.append(Image(len(tokens), SPAN, digest(pixels), pixels))
            tokens += [0] * SPAN
    params = SamplingParams(max_tokens=output, repetition_penalty=penalty)
    return Sequence(id, tokens, len(tokens), params, Pictures(tuple(images)) if images else None)


def scheduler(
    running: int,
    step: int,
    pages: int,
    mixed: int,
    slices: int = 1,
    window: int = 0,
    ranks: int = 1,
) -> Scheduler:
    windows = (0, window) if window else (0,)
    # Of windows as many as these sequences and a step need (groups.CacheSizes).
    more = running * (3 + pages_for(window + PAGE_SIZE)) + pages_for(step)
    caches = Caches(windows, (pages, more)[: len(windows)], step)
    bounds = Bounds.of(SPAN, step)
    encoding = Encoding(Slow(slices), bounds, step, 1000, ranks, two_way=True)
    made = Scheduler(caches, running, step, mixed, images=encoding)
    made.prefill_per_request = 1
    return made


def play(made: Scheduler, done: list[int]) -> bool:
    """A step; one without work is where an image is not encoded yet."""
    assert isinstance(made.images, Encoding)
    made.images.advance(made.running)
    work = made.schedule()
    assert sum(w.rows for w in work) <= made.max_step_tokens
    whole(work)
    seven.advance(made, work, done)
    made.caches.check([each.table for each in made.running])
    return True


parts = st.lists(st.sampled_from([0, 0, 1, 5, 15, 16, 17, 33]), min_size=1, max_size=4)
requests = st.lists(
    st.tuples(parts, st.integers(1, 30), st.sampled_from([1.0, 1.1])), min_size=1, max_size=9
)


@settings(max_examples=60, deadline=None)
@given(
    requests,
    st.integers(12, 24),  # pages: any of 162 tokens fits alone
    st.integers(1, 4),
    st.integers(0, 40),
    st.integers(1, 40),
    st.integers(1, 3),
    st.sampled_from([0, 9, 40]),
    st.sampled_from([16, 40, 1024]),
)
def test_no_work_begins_or_ends_within_an_image_and_all_ends(
    requests: list[tuple[list[int], int, float]],
    pages: int,
    running: int,
    more: int,
    mixed: int,
    slices: int,
    window: int,
    wave: int,
) -> None:
    """Whatever the pages, the budgets, the waves and what the encoder takes; with hits, preemption
    and penalties. Steps have the least rows that a start gives them, or `more`."""
    step = running - 1 + SPAN + more
    made = scheduler(running, step, pages, min(mixed, step), slices, window)
    for id, (own, output, penalty) in enumerate(requests):
        made.add(pictured(id, own, output, penalty))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduling, "WAVE", wave)
        play_to_end(made, len(requests), lambda done: play(made, done))


@pytest.mark.parametrize("wave", [16, 1024])
def test_an_image_never_waits_for_decodes_to_end(
    wave: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few rows a mixed step has for prompts, and however long the queue is."""
    monkeypatch.setattr(scheduling, "WAVE", wave)
    made, done = scheduler(4, 3 + SPAN, 200, 1), list[int]()
    for id in range(3):
        made.add(pictured(id, [3], 300))
    while sum(len(each.tokens) > 4 for each in made.running) < 3:
        play(made, done)
    for id in range(3, 9):
        made.add(pictured(id, [2, 0, 1, 0], 1))
    steps = 0
    while sorted(done) != [3, 4, 5, 6, 7, 8]:
        play(made, done)
        steps += 1
    # An image a step, and a token of text where there is one.
    assert steps <= 6 * 6


def test_an_image_at_the_end_waits_for_room_for_penalties_in_one_piece() -> None:
    """Two of 12 pages each, 10 of which they share, are penalised in no step together."""
    made, done = scheduler(2, 300, 21, 300), list[int]()
    computed = []
    for id in range(2):
        made.add(pictured(id, [160, 0], 8, penalty=1.1))
        for _ in range(4):
            play(made, done)
            computed.append([each.computed for each in made.running])
    assert computed[:4] == [[160], [184], [185], [186]]
    assert computed[4:] == [[187, 160], [188, 160], [189, 160], [190, 160]]
    while len(done) < 2:
        play(made, done)
    assert done == [0, 1]


def test_the_stress_plays_steps_of_images_alone() -> None:
    large = bounds(max_prefill_tokens=100)
    assert not [play for play in StressSet().plays(large) if play.name == "images"]
    (images,) = [play for play in StressSet(image=32).plays(large) if play.name == "images"]
    layout = images.make().step.layout
    assert layout.spans is not None and layout.rows == 100
    sizes = layout.spans.ends - layout.spans.starts
    assert sizes.max() == 32 and sizes.sum() == layout.rows
    cut, spans = layout.whole()
    assert spans.all() and cut.sequences == len(sizes)


def test_a_gpu_s_stress_has_images_beside_text_and_behind_few_and_many_tokens() -> None:
    """Over an fp8 cache an image has kernels of its own where a copy of its pages is read."""
    large = bounds(max_prefill_tokens=100, max_running_requests=1, max_model_len=1024)
    stress = StressSet(short_chunks=SHORT_CHUNKS, image=32)
    layouts = [play.make().step.layout for play in stress.plays(large) if play.name == "images"]
    found = []
    for layout in layouts:
        assert layout.spans is not None
        cut, spans = layout.whole()
        pages = int(np.diff(cut.groups[0].page_starts)[spans].sum())
        rows = int(np.diff(cut.row_starts)[spans].sum())
        kinds = int(spans.sum()), int((~spans).sum())
        found.append((*kinds, layout.rows, is_copied(rows, pages, 8192)))
    assert found == [(4, 0, 100, False), (3, 4, 100, False), (1, 0, 32, True), (1, 0, 32, False)]


def test_spans_are_sequences_that_end_with_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages and lengths of each part are those of a sequence that ends there."""
    made = engine("gemma3", step=64)
    layouts: list[Layout] = []
    plan = Decoder.plan

    def planned(decoder: Decoder, layout: Layout) -> list[Any]:
        layouts.append(layout)
        return plan(decoder, layout)

    monkeypatch.setattr(Decoder, "plan", planned)
    parts = of_family("gemma3", [*TEXT[:15], TALL, 5, 6, WIDE, *TEXT[:20]])
    own, pictures = prompt_of("gemma3", parts)
    made.submit(0, own, greedy(1), pictures)
    finish(made)
    layout = layouts[1]  # behind the text before the first image
    cut, spans = layout.whole()
    assert cut.row_starts.tolist() == [0, 4, 6, 10, 30]
    assert spans.tolist() == [True, False, True, False]
    for group, before in zip(cut.groups, layout.groups, strict=True):
        assert group.lengths.tolist() == [19, 21, 25, 45]
        for end, (first, last) in zip(
            group.lengths, itertools.pairwise(group.page_starts), strict=True
        ):
            pages = group.pages[first:last].tolist()
            assert pages == before.pages[: pages_for(int(end))].tolist()


def test_requests_with_few_images_do_not_pass_one_with_more_for_ever() -> None:
    """Each of them had room beside those before it, and so was there room for the next."""
    made, done = scheduler(8, 300, 400, 128, slices=5, ranks=4), list[int]()
    made.add(pictured(0, [3], 1000))  # decodes, so that passes take steps
    for step in range(150):
        if step == 20:
            made.add(pictured(170, [2, 0, 1, 0, 1, 0, 1, 0, 1], 6, kinds=251))
        if step % 4 == 2:
            made.add(pictured(step, [2, 0, 1], 1 + step % 14, kinds=251))
        play(made, done)
    assert 170 in done, f"{len(done)} others were served"

"""Images on several ranks: each encodes some of a pass, and all have the rows of all. Answers are
those of transformers, and what goes wrong on one rank ends for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vision_models
from engines import finish, greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from image_models import Part, of_family, prompt
from image_ranks import Pod, pod, same_rows
from test_image_answers import PROMPTS, TALL, TEXT, WIDE, equal_to_transformers
from test_image_starts import with_processor
from vision_models import picture
from waiting import within

from kvline_server.engine.encoding import Bounds
from kvline_server.engine.engine import Output
from kvline_server.errors import RankLost
from kvline_server.ipc.messages import WRONG_PIXELS
from kvline_server.model.vision import preprocessor
from kvline_server.model.vision.tower import Pass, Tower
from kvline_server.sizing.images import Images, opened
from kvline_server.worker import encoder as encoders
from kvline_server.worker.division import divided, largest

TOKENS = st.lists(st.integers(1, 300), max_size=40)


@settings(max_examples=300, deadline=None)
@given(TOKENS, st.integers(1, 8))
def test_ranks_divide_images_among_them(tokens: list[int], ranks: int) -> None:
    """Each to one; and no rank has more than another without the least that it has."""
    shares = divided(tokens, ranks)
    assert len(shares) == ranks and shares == divided(tuple(tokens), ranks)
    assert sorted(at for share in shares for at in share) == list(range(len(tokens)))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(tokens[at] for at in share) for share in shares]
    for share, load in zip(shares, loads, strict=True):
        assert load - min((tokens[at] for at in share), default=0) <= min(loads)
    assert largest(tokens, ranks) == max(loads)


def test_equal_images_are_as_many_on_each_rank() -> None:
    """So the largest passes of a start are the largest of each rank."""
    for ranks in range(1, 9):
        assert [len(share) for share in divided([4] * 6 * ranks, ranks)] == [6] * ranks


class Passes:
    """Pictures that each pass of a tower has, by thread and so by rank; and its slices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, made: Pod) -> None:
        self.pictures: dict[int, list[int]] = {rank: [] for rank in range(len(made.locals))}
        self.layers: dict[int, list[int]] = {rank: [] for rank in range(len(made.locals))}
        ranks = {id(each.kernels): rank for rank, each in enumerate(made.encoders)}
        begin, run = Tower.begin, Pass.run

        def begun(tower: Tower, kernels: Any, images: Sequence[Any], by: Any) -> Pass:
            self.pictures[ranks[id(kernels)]].append(len(images))
            return begin(tower, kernels, images, by)

        def ran(own: Pass, layers: int) -> bool:
            self.layers[ranks[id(own.kernels)]].append(layers)
            return run(own, layers)

        monkeypatch.setattr(Tower, "begin", begun)
        monkeypatch.setattr(Pass, "run", ran)


def test_a_start_plays_the_largest_share_of_a_rank_and_waits_for_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others may not have loaded yet. What it takes of the exchange counts as theirs too."""
    family, folder = "qwen3_vl", tmp_path / "model"
    processor = preprocessor.read(with_processor(family, folder))
    sees = Images(vision_models.saved(family).config, processor, per_request=1, patches=64)
    (tmp_path / "met").mkdir()
    with pod(family, tmp_path / "met") as made, within(5):
        passes = Passes(monkeypatch, made)
        local, sent = made.locals[1], made.encoders[1].group.sent
        encoder, taken, some = opened(sees, local.worker.decoder, local.device, lambda _: None)
        assert encoder is not None and taken > 0 and some >= 1
        assert passes.pictures == {0: [], 1: [1, 1, 16]}
        assert encoder.group.sent - sent == 3 * 16 * sees.vision.width * 4


def submit(made: Pod, prompts: dict[str, list[Part]], tokens: int = 8) -> None:
    for id, parts in enumerate(prompts.values()):
        own, pictures = made.prompt(parts)
        some = pictures if pictures.images else None
        made.engine.submit(id, own, greedy(tokens, logprobs=0), some)


@pytest.mark.parametrize(
    ("family", "ranks", "step"),
    [
        ("qwen3_vl", 2, 24),
        ("qwen3_vl", 2, 256),
        ("qwen2_5_vl", 2, 256),
        ("qwen3_5", 2, 256),
        ("gemma3", 2, 256),
    ],
)
def test_ranks_answer_as_transformers(
    family: str, ranks: int, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several images of other sizes in a pass, of which each rank has some."""
    with pod(family, tmp_path, ranks, step) as made:
        passes = Passes(monkeypatch, made)
        prompts = {name: of_family(family, parts) for name, parts in PROMPTS.items()}
        submit(made, prompts)
        found = finish(made.engine)
        assert all(passes.pictures.values()), passes.pictures
        assert same_rows(made)
    for id, parts in enumerate(prompts.values()):
        equal_to_transformers(family, parts, found[id])


@pytest.mark.parametrize("some", [7, 1 << 20])
def test_rows_are_gathered_in_pieces_of_a_bound(
    some: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a rank has none, or fewer than another: in the cache are those of one rank."""
    family = "qwen3_vl"
    pictures = [picture(40, 24, 1), picture(16, 88, 2), picture(8, 8, 3)]
    width = vision_models.saved(family).config.width * 4
    with pod(family, tmp_path, 3) as made:
        monkeypatch.setattr(encoders, "GATHERED_BYTES", 3 * some * width)
        encoder = made.engine.executor.encoder
        assert encoder is not None
        for drawn in (pictures, pictures[:1]):
            _, given = made.prompt(drawn)
            rows = np.arange(sum(i.tokens for i in given.images), dtype=np.int64)[::-1].copy()
            before = [each.group.sent for each in made.encoders]
            assert encoder.begin(given.images, rows) == []
            assert encoder.run(0)
            made.engine.executor.settle()  # which the others answer once they have it too
            assert same_rows(made)
            sent = {e.group.sent - b for e, b in zip(made.encoders, before, strict=True)}
            most = max(image.tokens for image in given.images)
            assert sent == {most * width}, "as much as the largest share has, on each"
            want = vision_models.rows(vision_models.loaded(family), drawn)
            found = made.encoders[2].embeddings[rows]
            np.testing.assert_allclose(found, want[:, :48], atol=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
def test_pixels_that_one_rank_finds_changed_fail_their_sequence_on_all(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After they were sent, in the memory that all ranks read. Nobody waits for another."""
    large, small = picture(40, 24, 5), picture(16, 16, 6)  # rank 0's and rank 1's
    with pod("qwen3_vl", tmp_path) as made:
        passes = Passes(monkeypatch, made)
        prompts: dict[str, list[Part]] = {"wrong": [1, large, 2, small, 3], "right": [4, TALL, 5]}
        submit(made, prompts)
        bad = made.engine.sequences[0].pictures
        assert bad is not None
        image = bad.images[rank]
        assert image.place is not None
        made.places.write(image.place.offset, image.pixels[::-1].copy())
        found = finish(made.engine)
        assert not made.failed and same_rows(made)
        assert sum(map(sum, passes.pictures.values())) >= 2
    (failed,) = found[0]
    assert (failed.tokens, failed.finish, failed.reason) == ([], "error", WRONG_PIXELS)
    equal_to_transformers("qwen3_vl", prompts["right"], found[1])


def test_ranks_go_through_slices_in_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside decodes, a layer of the largest share at a time; a rank without a share of it waits
    at the end alone."""
    bounds = Bounds(cached=128, encoded=64, slice=22)
    with pod("qwen3_vl", tmp_path, bounds=bounds) as made:
        passes = Passes(monkeypatch, made)
        own, _ = prompt(PROMPTS["text"])
        made.engine.submit(0, own, greedy(12))
        for _ in range(2):
            made.engine.step()
        image, pictures = made.prompt([WIDE, 7, TALL, 8])
        made.engine.submit(1, image, greedy(8, logprobs=0), pictures)
        found: dict[int, list[Output]] = {}
        steps = []
        while not made.engine.idle:
            steps.append(made.engine.step())
        for output in (each for step in steps for each in step):
            found.setdefault(output.sequence.id, []).append(output)
        assert passes.pictures == {0: [1], 1: [1]}
        assert passes.layers == {0: [1, 1, 1], 1: [1, 1, 1]}
        assert [[o.sequence.id for o in step] for step in steps[:2]] == [[0], [0]]
    equal_to_transformers("qwen3_vl", [WIDE, 7, TALL, 8], found[1])


def test_several_ranks_encode_as_much_more_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two images of the largest size are one pass of two ranks, of one image each."""
    large = [picture(64, 64, seed) for seed in (7, 8)]
    parts: list[Part] = [*TEXT[:4], large[0], 5, large[1], 6]
    bounds = Bounds.of(64, 160)
    with pod("qwen3_vl", tmp_path, step=160, bounds=bounds) as made:
        passes = Passes(monkeypatch, made)
        submit(made, {"two": parts}, 3)
        found = finish(made.engine)
        assert passes.pictures == {0: [1], 1: [1]}
    equal_to_transformers("qwen3_vl", parts, found[0])


def test_a_rank_that_ends_in_a_pass_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for its rows in vain, and not for ever."""
    with pod("qwen3_vl", tmp_path, seconds=1.0) as made:
        ends = made.encoders[1].kernels
        run = Pass.run

        def broken(own: Pass, layers: int) -> bool:
            if own.kernels is ends:
                raise ZeroDivisionError
            return run(own, layers)

        monkeypatch.setattr(Pass, "run", broken)
        submit(made, {"several": PROMPTS["several"]})
        with within(5), pytest.raises(RankLost):
            finish(made.engine)
        assert isinstance(made.failed[1], ZeroDivisionError)

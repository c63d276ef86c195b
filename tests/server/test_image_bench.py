"""What the benchmarks of images send and count, played whole with tiny models on a CPU."""

from __future__ import annotations

import importlib
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import image_models
import numpy as np
import pytest
import torch
import vision_models
from engines import finish, greedy, worker
from stand_ins import CapturedKernels, Pool

from kvline_contract import memory
from kvline_contract.launch import Device
from kvline_contract.report import Result, Source
from kvline_server.engine.engine import Engine
from kvline_server.images.digests import digest
from kvline_server.model.fields import Fields, read_json
from kvline_server.model.vision.config import read_vision
from kvline_server.worker.graphs import graphs, steps
from kvline_server.worker.step import Step

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

import image_requests
import image_shapes
import images_cpu
import offline
import shapes
from captured import Captured, several, with_images

TINY = "qwen3vl-tiny"
# As python bench does.
soak, image_figures, gaps = map(importlib.import_module, ("soak", "image_figures", "gaps"))


def started(name: str = TINY) -> Engine:
    options = {**offline.ON_CPU, "max_model_len": 1024, "options": image_requests.REQUIRED}
    made, _ = offline.start(name, **options)
    return made


@pytest.fixture(scope="module")
def engine() -> Engine:
    return started()


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that commands write theirs to."""
    monkeypatch.setenv("KVLINE_BENCH_RESULTS", str(tmp_path / "results.jsonl"))
    return tmp_path / "results.jsonl"


def recorded(results: Path) -> dict[str, float]:
    lines = map(json.loads, results.read_text().splitlines())
    return {line["name"]: line["value"] for line in lines}


@pytest.mark.parametrize("name", ["qwen3vl-8b", "qwen35-9b-images"])
def test_a_shape_that_sees_images_has_its_tower_and_its_processor(
    name: str, tmp_path: Path
) -> None:
    folder = shapes.write_config(name, tmp_path)
    found = read_vision(Fields(read_json(folder / "config.json"), folder / "config.json"))
    deepstack = (8, 16, 24) if "vl" in name else ()
    assert found == replace(images_cpu.tower_of(4096), deepstack=deepstack)
    processor = image_shapes.processor(name, 4096)
    assert processor.grid(1024, 1024).patches == 4096 == processor.grid(1024, 1024).tokens * 4
    assert processor.grid(9000, 9000).patches == 16384


def test_every_image_has_the_digest_of_its_pixels_and_is_another_one(engine: Engine) -> None:
    source, digests = image_requests.Source(TINY, engine), set[bytes]()
    for rows, columns in [(8, 8), (8, 8), (8, 9), (9, 8), (16, 16), (16, 16)]:
        picture = source.new(rows, columns)
        _, pictures = source.prompt([[5], picture, [6]])
        assert pictures is not None
        (image,) = pictures.images
        pixels = np.array(image.pixels, order="C")
        assert (pixels.shape, image.tokens) == ((rows * 8, columns * 8, 3), rows * columns)
        assert pixels.dtype == np.uint8 and image.digest == digest(pixels)
        digests.add(image.digest)
    assert len(digests) == 6
    _, twice = source.prompt([picture, [7], picture])
    assert twice is not None and {each.digest for each in twice.images} == {image.digest}


def test_images_are_drawn_up_to_the_limit_and_prompts_have_room_for_their_answers(
    engine: Engine,
) -> None:
    source, rng = image_requests.Source(TINY, engine), random.Random(1)
    grids = [source.drawn(rng).grid for _ in range(600)]
    sizes = [(each.token_rows, each.token_columns) for each in grids]
    assert {(16, 16), (1, 226), (226, 1)} <= set(sizes), "the largest square, and strips"
    tokens = sorted(rows * columns for rows, columns in sizes)
    assert tokens[300] < 128 and tokens[-1] == source.limit == 256
    assert 400 < source.made < 560, "some are sent again"
    counts = list[int]()
    for _ in range(200):
        prompt, pictures = source.among(rng, [5] * 40, 900)
        images = () if pictures is None else pictures.images
        counts.append(len(images))
        assert len(prompt) == 40 + sum(each.tokens for each in images) <= 900
        for each in images:
            assert set(prompt[each.start : each.end]) == {image_shapes.image_token(TINY)}
        assert pictures is None or (pictures.axes is not None and pictures.axes.shape[1] >= 41)
    assert max(counts) == 8 and sum(map(bool, counts)) > 190
    most = max(len(source.among(rng, [5] * 40, 4000)[0]) for _ in range(200))
    assert most == 40 + 8 * 256, "some requests have as many as they may, all at the limit"


@pytest.mark.parametrize("name", [TINY, "qwen35-tiny-images"])
def test_half_of_the_soak_s_requests_have_images_and_all_are_answered(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sent = started(name), list[int]()
    submit = engine.submit

    def counted(id: int, tokens: list[int], params: Any, pictures: Any = None) -> None:
        sent.append(0 if pictures is None else len(pictures.images))
        assert len(tokens) + params.max_tokens <= engine.max_model_len
        submit(id, tokens, params, pictures)

    monkeypatch.setattr(engine, "submit", counted)
    source = image_requests.Source(name, engine)
    found = soak.soak(engine, 512, 1.5, images=source)
    assert (found.out_of_memory, found.errors) == (0, 0)
    assert found.requests == len(sent) > soak.WAITING
    assert 0.4 < sum(map(bool, sent)) / len(sent) < 0.6
    assert 0 < found.encoded <= source.made


def test_the_soak_with_images_is_a_command(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KVLINE_BENCH_MODELS", raising=False)
    monkeypatch.setenv("KVLINE_BENCH_SECONDS", "0.5")
    monkeypatch.setenv("KVLINE_BENCH_IMAGES", "1")
    soak.run()
    found = recorded(results)
    for name in (TINY, "qwen35-tiny-images"):
        assert (found[f"soak-oom-{name}"], found[f"soak-errors-{name}"]) == (0, 0)
        assert f"soak-host-grew-{name}" in found
    assert "images encoded" in capsys.readouterr().out
    assert image_requests.longest(Device.CUDA)["max_model_len"] == 8 * 4096 + 8192


@pytest.mark.parametrize("outside", [False, True])
def test_steps_with_images_are_counted_and_those_outside_of_graphs_are_found(
    outside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By stand-ins for graphs; `outside` of which such steps are run once they were captured."""
    pool, inputs = Pool(), steps._Inputs
    monkeypatch.setattr(graphs, "GraphPool", lambda: pool)
    monkeypatch.setattr(steps, "_Inputs", lambda rows, pages, **_: inputs(rows, pages))
    made = image_models.engine("qwen3_vl", step=24, kernels=CapturedKernels())
    made.executor.resize(tuple(60 for _ in made.executor.pages))
    assert made.executor.capture(24, 400)
    runner = worker(made)
    own = runner.graphs
    assert own is not None
    seen, run = with_images(runner.decoder.config.vocabulary), own.run

    def alone(step: Step) -> torch.Tensor:
        if not seen(step):
            return run(step)
        runner.graphs = None
        found = runner._hidden(step)
        runner.graphs = own
        return found

    if outside:
        monkeypatch.setattr(own, "run", alone)
    kinds = {"images": seen, "several": several, "all": lambda step: True}
    counted, picture = Captured(runner, kinds), vision_models.picture(16, 24)
    text: list[image_models.Part] = [7] * 9
    several_images = [*text, picture, *text, picture]
    prompts: list[list[image_models.Part]] = [text, [1, picture, 2], several_images]
    for id, parts in enumerate(prompts):
        tokens, pictures = image_models.prompt(parts)
        some = pictures if pictures.images else None
        made.submit(id, tokens, greedy(3), some)
    finish(made)
    assert counted.steps["all"] > counted.steps["images"] >= 2 and counted.steps["several"]
    assert counted.share("images") == (0.0 if outside else 1.0)
    assert counted.share("all") == 1.0 or outside
    assert counted.text("images") == f"{1 - outside:.3f} of {counted.steps['images']}"
    before = pool.replayed, counted.steps["all"]
    counted.close()
    made.submit(9, [5, 6], greedy(2))
    finish(made)
    assert pool.replayed > before[0] and counted.steps["all"] == before[1]


def test_the_figures_of_images_are_a_command(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KVLINE_BENCH_MODELS", raising=False)
    image_figures.run()
    found = recorded(results)
    assert found[f"kv-tokens-of-text-{TINY}"] == 1.0, "they are given on a CPU"
    for name in ("images-per-s", "image-text-ratio", "image-gap-p99-ms", "image-repeat-ttft-ratio"):
        assert found[f"{name}-{TINY}"] > 0
    printed = capsys.readouterr().out
    assert "64 of 128 tokens in the prefix cache, 0 images encoded" in printed
    assert "0 of 128 tokens in the prefix cache, 0 images encoded" in printed
    assert image_figures.Rows("qwen3vl-8b", None).ending == ""


def test_each_chat_has_an_image_of_its_own_and_as_long_a_text_has_none(engine: Engine) -> None:
    prompts, loads = image_figures.Prompts(TINY, engine), image_figures.CPU
    tokens, none = prompts.reading(loads.side)
    seen, pictures = prompts.seeing(loads.side)
    assert len(tokens) == len(seen) == 8 * 8 + image_figures.TEXT
    assert none is None and [each.tokens for each in pictures.images] == [64]
    assert engine.encoding is not None
    made, before = prompts.source.made, engine.encoding.encoded
    assert image_figures._chats(engine, loads, prompts.seeing, 0.3) > 0
    finish(engine)
    assert engine.encoding.encoded - before == prompts.source.made - made > loads.chats
    text = image_figures.closed(engine, loads, prompts.reading)
    assert text.images == 0 < text.tokens and engine.idle
    seeing = image_figures.closed(engine, loads, prompts.seeing)
    assert 0 < seeing.images < seeing.tokens and engine.idle


def test_beside_chats_every_image_that_comes_is_encoded(engine: Engine) -> None:
    prompts, loads = image_figures.Prompts(TINY, engine), image_figures.CPU
    assert engine.encoding is not None
    load, before = replace(loads.beside, seconds=0.9), engine.encoding.encoded
    found = gaps.play(engine, load, lambda number: prompts.seeing(16))
    made, encoded = prompts.source.made, engine.encoding.encoded - before
    assert made >= 3 and made - found.unanswered <= encoded <= made
    assert len(found.gaps) > 10 * loads.beside.chats and found.first > 0


def test_a_repeated_image_is_encoded_once_and_finds_no_pages_of_text(engine: Engine) -> None:
    loads = image_figures.CPU
    found = image_figures.repeated(engine, image_figures.Prompts(TINY, engine), loads)
    assert len(found) == loads.pairs
    for each in found:
        assert (each.new.encoded, each.again.encoded, each.behind.encoded) == (1, 0, 0)
        # The image's pages, which are first; none behind another text.
        assert (each.new.found, each.again.found, each.behind.found) == (0, 64, 0)
        assert min(each.new.seconds, each.again.seconds, each.behind.seconds) > 0


def test_shares_are_of_what_has_no_images(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = image_figures.Rows("qwen3vl-8b", "a GPU")
    sizes = {memory.WEIGHTS: 100, memory.TOWER: 7, memory.ENCODER_WORK: 20, memory.ENCODER_CACHE: 5}
    seeing, alone = (
        Result(
            kv_tokens=tokens,
            bytes_per_token=16,
            source=Source.MEASURED,
            fingerprint="",
            free_mib=0,
            loop_ms=1,
            saved_ms=0,
            measured_at="2026-11-28T00:00:00Z",
            ranks=(memory.Memory(132, tuple(memory.Part(n, mib) for n, mib in sizes.items())),),
        )
        for tokens in (970, 1000)
    )
    image_figures.sizes(rows, seeing, alone)
    Rate = image_figures.Rate
    played = [Rate(90, 0), Rate(60, 20), Rate(100, 0), Rate(70, 25)]
    monkeypatch.setattr(image_figures, "closed", lambda *_: played.pop(0))
    asked = SimpleNamespace(reading=None, seeing=None)
    image_figures.rates(rows, None, asked, image_figures.GPU)
    firsts = [image_figures.First(s, 0, 0) for s in (0.1, 0.03, 0.05)]
    again = image_figures.Again(*firsts)
    monkeypatch.setattr(image_figures, "repeated", lambda *_: [again] * 3)
    image_figures.seen_before(rows, None, asked, image_figures.GPU)
    assert recorded(results) == {
        "kv-tokens-of-text-qwen3vl-8b": 0.97,
        "tower-mib-qwen3vl-8b": 32,
        "images-per-s-qwen3vl-8b": 25,
        "image-text-ratio-qwen3vl-8b": 0.7,
        "image-new-ttft-ms": 100,
        "image-repeat-ttft-ratio": 0.3,
        "image-repeat-ttft-ratio-behind-text": 0.5,
    }

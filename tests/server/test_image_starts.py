"""A start of a model that sees images: what its encoder takes is reserved before the KV cache, or
images are refused by name."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vision_models
from engines import finish, greedy
from image_models import Part, prompt, prompt_of
from safetensors.torch import load_file, save_file
from servers import launch_config
from vision_models import PATCH, picture

from kvline_contract.launch import CapacityOptions, Device, EngineOptions, Images
from kvline_contract.memory import ENCODER_CACHE, ENCODER_WORK, TOWER
from kvline_server.engine_process.start import LoadedRank, load_rank, start
from kvline_server.errors import (
    ConfigInvalid,
    ModelInvalid,
    ModelNotFound,
    ModelUnsupported,
    StepTooLong,
)
from kvline_server.images.digests import digest
from kvline_server.ipc.messages import Progress
from kvline_server.kernels.torch_encoder import TorchEncoder
from kvline_server.model.config import read_config
from kvline_server.options.clients import ClientLimits
from kvline_server.sizing import images, pace
from kvline_server.worker.encoder import Given

LARGE = 8192 << 20  # has room beside what other tests left in the process
LENGTH = 256
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": PATCH,
    "merge_size": 2,
    "size": {"shortest_edge": 4 * PATCH**2, "longest_edge": 400 * PATCH**2},
    "image_mean": list(vision_models.BY.mean),
    "image_std": list(vision_models.BY.std),
}
GEMMA = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 8 * PATCH, "width": 8 * PATCH},
    "image_mean": list(vision_models.BY.mean),
    "image_std": list(vision_models.BY.std),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_processor("qwen3_vl", tmp_path_factory.mktemp("images"))


def with_processor(family: str, into: Path) -> Path:
    shutil.copytree(vision_models.saved(family).folder, into, dirs_exist_ok=True)
    processor = GEMMA if family.startswith("gemma3") else PREPROCESSOR
    (into / "preprocessor_config.json").write_text(json.dumps(processor))
    return into


def loaded(folder: Path, heard: list[Any] | None = None, **engine: Any) -> LoadedRank:
    engine = dict[str, Any](max_model_len=LENGTH, images=Images.REQUIRED) | engine
    send = (lambda message: None) if heard is None else heard.append
    launch = launch_config(folder, EngineOptions(**engine))
    return load_rank(launch, send, LARGE, os.getpid(), wait_for_neighbours=lambda: None)


def test_an_encoder_has_its_bytes_for_good(folder: Path) -> None:
    heard: list[Any] = []
    made = loaded(folder, heard, max_image_patches=64, max_prefill_tokens=48)
    sees, encoder = made.settings.images, made.local.encoder
    assert sees is not None and encoder is not None
    assert (sees.patches, sees.tokens, sees.per_request) == (64, 16, images.PER_REQUEST)
    parts = {part.name: part.fixed for part in made.loaded.owned}
    assert parts[TOWER] == encoder.tower.nbytes(encoder.embeddings.dtype) > 0
    # A chunk's rows and an image's, each an embedding and two that deepstack adds; and zeros.
    assert len(encoder.embeddings) == 48 + 16
    assert parts[ENCODER_CACHE] == 4 * 48 * (64 * 3 + 2)
    assert encoder.deepstack.shape == (2, 64, 48)
    stages = [message.stage for message in heard if isinstance(message, Progress)]
    (stage,) = [each for each in stages if each is not None and each.name == "encoder"]
    assert stage.detail == "images of up to 64 patches"
    assert made.settings.encoder_bytes == stage.bytes and not stage.bytes % (1 << 20)
    effective = made.settings.effective(LENGTH)
    assert (effective.max_images_per_request, effective.max_image_patches) == (8, 64)
    text = loaded(folder, images=None, max_prefill_tokens=48)
    kept = made.settings.reserved() - text.settings.reserved()
    clients = ClientLimits().on(Device.CPU).image_memory()
    assert kept == stage.bytes + clients, "what its largest images take, and its clients'"
    assert text.local.encoder is None and text.settings.encoder_bytes == 0
    assert not {TOWER, ENCODER_CACHE} & {part.name for part in text.loaded.owned}
    assert text.settings.effective(LENGTH).max_image_patches is None
    assert text.loaded.fingerprint != made.loaded.fingerprint


def test_what_passes_keep_is_their_own_and_what_they_give_back_stays_free(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernels, whatever the device: torch's on a GPU keep nothing."""
    made = loaded(folder, max_image_patches=64)
    assert made.settings.encoder_bytes
    assert ENCODER_WORK not in {part.name for part in made.loaded.owned}
    monkeypatch.setattr(TorchEncoder, "keeps_memory", True)
    kept = loaded(folder, max_image_patches=64)
    assert kept.settings.encoder_bytes == 0
    assert {part.name: part.fixed for part in kept.loaded.owned}[ENCODER_WORK] > 0


def test_a_start_ends_with_an_engine_that_answers_to_an_image(folder: Path, tmp_path: Path) -> None:
    options = EngineOptions(max_model_len=LENGTH, max_running_requests=2, images=Images.REQUIRED)
    engine, result = start(
        launch=launch_config(folder, options, CapacityOptions(4096, 8)),
        send=lambda message: None,
        attempts=tmp_path / "attempts.json",
        record=None,
        wait_for_neighbours=lambda: None,
        memory=LARGE,
        root=os.getpid(),
    )
    own, pictures = prompt([5, picture(40, 24), 7])
    engine.submit(0, own, greedy(5), pictures)
    assert len(finish(engine)[0]) == 5
    (memory,) = result.ranks
    names = [part.name for part in memory.parts]
    assert {TOWER, ENCODER_CACHE, ENCODER_WORK} <= set(names)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_processor("gemma3_large", tmp_path_factory.mktemp("gemma"))


def test_steps_have_room_for_an_image_that_they_do_not_cut(gemma: Path, tmp_path: Path) -> None:
    """Of 64 tokens, where 8 are asked for. The stress plays such steps, and the encoder has rows
    for them."""
    asked = EngineOptions(LENGTH, 3, 8, images=Images.REQUIRED)
    launch, heard = launch_config(gemma, asked, CapacityOptions(4096, 8)), list[Any]()
    engine, result = start(
        launch=launch,
        send=heard.append,
        attempts=tmp_path / "attempts.json",
        record=None,
        wait_for_neighbours=lambda: None,
        memory=LARGE,
        root=os.getpid(),
    )
    updates = [message for message in heard if isinstance(message, Progress)]
    assert [m.warning for m in updates if m.warning and "maxPrefillTokens" in m.warning] == [
        "spec.engine.maxPrefillTokens is 8, and steps have up to 66 rows: an image of this model "
        "is computed in one step, beside the decodes of other requests"
    ]
    assert engine.scheduler.max_step_tokens == 66
    assert {m.current.name for m in updates if m.current is not None} >= {"images", "last-chunk"}
    (effective,) = {m.effective for m in updates if m.effective is not None}
    assert (effective.max_prefill_tokens, effective.max_image_patches) == (66, 64)
    parts: list[Part] = [5, picture(8 * PATCH, 8 * PATCH), 7]
    for id in range(3):
        own, pictures = prompt_of("gemma3_large", parts)
        engine.submit(id, own, greedy(5), pictures)
    found = finish(engine)
    assert [[t for o in found[id] for t in o.tokens] for id in found] == [
        [t for o in found[0] for t in o.tokens]
    ] * 3
    names = [part.name for part in result.ranks[0].parts]
    assert {TOWER, ENCODER_CACHE, ENCODER_WORK} <= set(names)


def test_images_of_one_size_have_its_patches_or_are_refused(gemma: Path) -> None:
    made = loaded(gemma, max_image_patches=200).settings
    assert made.images is not None
    assert (made.images.patches, made.images.whole) == (64, 64)
    assert made.images.within(70) == 64, "prompts that do not fit are refused as others are"
    assert made.least_rows(1) == 64 and replace(made, draft_tokens=4).least_rows(1) == 128
    assert made.seeing(None).least_rows(1) == 1
    with pytest.raises(ConfigInvalid, match="maxImagePatches: expected 64 to 240"):
        loaded(gemma, max_image_patches=63)
    with pytest.raises(ModelUnsupported, match="79 tokens has no room for an image"):
        loaded(gemma, max_model_len=79)


def test_the_largest_passes_are_a_square_the_widest_strip_and_many_small_images(
    folder: Path,
) -> None:
    sees = loaded(folder, max_image_patches=4 * 210).settings.images
    assert sees is not None and sees.tokens == 100, "the model's own limit is lower"
    wide = replace(sees, patches=4 * 810)
    side = 2 * PATCH
    square, strip, small = wide.largest()
    assert square == [(28 * side, 28 * side)]
    assert strip == [(3 * side, 270 * side)]
    assert small == [(side, side)] * 810
    for sizes in (square, strip, small):
        assert sum(h * w for h, w in sizes) <= 810 * side**2


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        ({"max_image_patches": 3 * 256 * 4}, ConfigInvalid, "maxImagePatches: expected 4 to 960"),
        ({"max_model_len": 16}, ModelUnsupported, r"16 tokens has no room .*maxModelLen"),
    ],
)
def test_bounds_that_do_not_fit_are_refused_by_their_field(
    change: dict[str, Any], error: type[Exception], why: str, folder: Path
) -> None:
    with pytest.raises(error, match=why):
        loaded(folder, **change)


def test_images_that_are_not_served_are_refused_where_they_are_required(
    folder: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    shutil.copytree(folder, text)
    raw = json.loads((text / "config.json").read_text())
    (text / "config.json").write_text(json.dumps(raw | {"vision_config": {}}))
    heads = tmp_path / "heads"
    shutil.copytree(folder, heads)
    tower = raw["vision_config"] | {"hidden_size": 264, "num_heads": 2}
    (heads / "config.json").write_text(json.dumps(raw | {"vision_config": tower}))
    required, served = (
        EngineOptions(max_model_len=LENGTH, images=each)
        for each in (Images.REQUIRED, Images.IF_SERVED)
    )
    for given, device, why in (
        (heads, Device.CUDA, "hidden_size / heads = 132"),
        (text, Device.CPU, "no vision_config: the model is one of text"),
    ):
        launch = replace(launch_config(given, required), device=device)
        model = read_config(given)
        with pytest.raises(ModelUnsupported, match=why):
            images.asked(launch, model, LENGTH)
        sees, warning = images.asked(replace(launch, engine=served), model, LENGTH)
        assert sees is None
        assert warning == "" if given is text else why in warning


@pytest.mark.parametrize("device", Device)
def test_images_whose_tokens_see_each_other_are_served_on_any_device(
    gemma: Path, device: Device
) -> None:
    asked = EngineOptions(max_model_len=LENGTH, images=Images.REQUIRED)
    launch = replace(launch_config(gemma, asked), device=device)
    sees, warning = images.asked(launch, read_config(gemma), LENGTH)
    assert sees is not None and (sees.whole, warning) == (64, "")


def test_a_gpu_s_images_have_sixteen_times_a_cpu_s_patches(folder: Path, tmp_path: Path) -> None:
    """By default; of a CPU they would take minutes of every start."""
    large, longest = tmp_path / "large", 100_000
    shutil.copytree(folder, large)
    file = large / "preprocessor_config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps(raw | {"size": raw["size"] | {"longest_edge": 1 << 24}}))
    launch = launch_config(large, EngineOptions(max_model_len=longest, images=Images.REQUIRED))
    for device, patches in ((Device.CPU, 1024), (Device.CUDA, 16384)):
        sees, _ = images.asked(replace(launch, device=device), read_config(large), longest)
        assert sees is not None and sees.patches == patches


@pytest.mark.parametrize("what", ["preprocessor", "token", "tensor"])
def test_files_that_lack_what_images_need_are_served_as_text_where_nobody_requires_images(
    what: str, folder: Path, tmp_path: Path
) -> None:
    """As they were before there were images; the warning has the file and the name."""
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    if what == "preprocessor":
        (broken / "preprocessor_config.json").unlink()
        named: type[Exception] = ModelNotFound
    elif what == "token":
        raw = json.loads((broken / "config.json").read_text())
        (broken / "config.json").write_text(json.dumps(raw | {"image_token_id": None}))
        named = ModelInvalid
    else:
        tensors = load_file(broken / "model.safetensors")
        del tensors["model.visual.blocks.1.norm1.weight"]
        save_file(tensors, broken / "model.safetensors")
        named = ModelInvalid
    with pytest.raises(named):
        loaded(broken)
    heard: list[Any] = []
    made = loaded(broken, heard, images=Images.IF_SERVED)
    assert made.settings.images is None and made.local.encoder is None
    warnings = [m.warning for m in heard if isinstance(m, Progress) and m.warning]
    wanted = {
        "preprocessor": "preprocessor_config.json",
        "token": "image_token_id",
        "tensor": "model.visual.blocks.1.norm1.weight",
    }
    assert any("images are not served" in text and wanted[what] in text for text in warnings)


def test_slices_and_the_longest_step_follow_what_the_largest_passes_took(folder: Path) -> None:
    found = loaded(folder).settings
    assert 1 < found.encoder_pace < 1 << 31 and found.images is not None
    assert images.slice_of(100) == 2 and images.slice_of(1) == 1
    pace.check_layer(replace(found, images=None, encoder_pace=1), 30.0)
    pace.check_layer(found, 30.0)
    assert found.images.tokens == 100
    slow = replace(found, encoder_pace=1)
    with pytest.raises(StepTooLong, match=r"lower spec\.engine\.maxImagePatches to 160") as refused:
        pace.check_layer(slow, 50.0)
    assert [knob.value for knob in refused.value.knobs] == [160]
    fixed = replace(found.images, vision=replace(found.images.vision, image=32))
    with pytest.raises(StepTooLong, match=r"leave image out of spec\.engine\.modalities"):
        pace.check_layer(replace(slow, images=fixed), 50.0)


def test_pixels_are_normalised_as_the_models_files_say(folder: Path) -> None:
    encoder = loaded(folder).local.encoder
    assert encoder is not None and encoder.normalisation == vision_models.BY
    drawn = picture(8, 8)
    given = Given(1, digest(drawn), drawn)
    assert not encoder.begin([given], np.arange(1, dtype=np.int64))
    assert encoder.run(0)
    want = vision_models.rows(vision_models.loaded("qwen3_vl"), [drawn])
    torch.testing.assert_close(encoder.embeddings[0], want[0, :48])
    torch.testing.assert_close(encoder.deepstack[:, 0].flatten(), want[0, 48:])

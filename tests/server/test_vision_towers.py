"""Towers against those of transformers, in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from vision_models import (
    BY,
    FAMILIES,
    PATCH,
    Picture,
    expected,
    load,
    loaded,
    picture,
    rows,
    saved,
    tensors,
)

from kvline_server.errors import ModelInvalid
from kvline_server.kernels.torch import TorchKernels
from kvline_server.model.dequantised import Dequantised
from kvline_server.model.linear import Tensors
from kvline_server.model.loader import RandomSource, SafetensorsSource
from kvline_server.model.quantization import Quantization
from kvline_server.model.shard import Shard
from kvline_server.model.vision.patches import ROWS
from kvline_server.model.vision.read import read_tower

EVERY = pytest.mark.parametrize("family", FAMILIES)
TOKEN = 2 * PATCH  # pixels of its side, in Qwen's towers
SIDE = 8 * PATCH
TWICE = picture(SIDE, SIDE, 5)
IMAGES: dict[str, list[Picture]] = {
    "square": [TWICE],
    "wide": [picture(3 * TOKEN, 5 * TOKEN)],
    "tall": [picture(7 * TOKEN, TOKEN)],
    "widest": [picture(TOKEN, 200 * TOKEN)],
    "one token": [picture(TOKEN, TOKEN)],
    "several": [picture(SIDE, SIDE), picture(2 * TOKEN, 7 * TOKEN), picture(5 * TOKEN, TOKEN)],
    "twice": [TWICE, picture(3 * TOKEN, TOKEN), TWICE],
}
CASES = [
    *((family, name) for family in FAMILIES if family != "gemma3" for name in IMAGES),
    ("gemma3", "square"),
]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_tower_s_rows_equal_the_reference(family: str, name: str) -> None:
    made, want = rows(loaded(family), IMAGES[name]), expected(family, IMAGES[name])
    assert made.shape == want.shape
    assert float(want.std()) > 0.1, "rows of which errors would be seen"
    torch.testing.assert_close(made, want, atol=1e-4, rtol=0)


def test_images_of_one_size_equal_the_reference() -> None:
    pictures = [TWICE, picture(SIDE, SIDE, 6), TWICE]
    made = rows(loaded("gemma3"), pictures)
    torch.testing.assert_close(made, expected("gemma3", pictures), atol=1e-4, rtol=0)
    assert torch.equal(made[:4], made[8:]) and not torch.equal(made[:4], made[4:8])


def test_an_image_of_more_patches_than_are_computed_at_once_equals_the_reference() -> None:
    large = [picture(TOKEN, TOKEN), picture(33 * TOKEN, 34 * TOKEN)]
    assert large[1][:, :, 0].size > ROWS * PATCH**2
    made = rows(loaded("qwen3_vl"), large)
    torch.testing.assert_close(made, expected("qwen3_vl", large), atol=1e-4, rtol=0)


@EVERY
def test_slices_of_layers_make_the_same_rows(family: str) -> None:
    pictures = IMAGES["twice" if family != "gemma3" else "square"]
    whole = rows(loaded(family), pictures)
    for layers in (1, 2):
        assert torch.equal(rows(loaded(family), pictures, layers), whole)


@torch.inference_mode()
def test_two_passes_of_one_tower_may_be_under_way() -> None:
    tower, kernels = loaded("qwen3_vl"), TorchKernels()
    first, second = (
        tower.begin(kernels, [torch.from_numpy(picture(SIDE, SIDE, seed))], BY) for seed in (1, 2)
    )
    assert not first.run(1) and not second.run(2) and first.run(2) and second.run(1)
    assert first.complete and first.run(1), "and what is complete stays so"
    for made, seed in ((first, 1), (second, 2)):
        assert torch.equal(made.rows, rows(tower, [picture(SIDE, SIDE, seed)]))


def test_an_image_s_rows_depend_on_no_other() -> None:
    for family in ("qwen3_vl", "qwen2_5_vl"):
        together = rows(loaded(family), IMAGES["several"])
        apart = torch.cat([rows(loaded(family), [each]) for each in IMAGES["several"]])
        torch.testing.assert_close(together, apart, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "shape"),
    [("qwen3_vl", (12, 16)), ("qwen2_5_vl", (16, 4)), ("gemma3", (16, 64)), ("gemma3", (64, 64))],
)
def test_sides_that_no_image_is_resized_to_are_refused(family: str, shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"expected uint8 \[height, width, 3\] with sides of"):
        rows(loaded(family), [picture(*shape)])
    with pytest.raises(ValueError, match=r"got torch\.float32"):
        rows(loaded(family), [picture(SIDE, SIDE).astype(np.float32)])


@EVERY
def test_every_tensor_of_a_tower_is_read_and_one_that_is_missing_is_named(family: str) -> None:
    own = saved(family)
    source = SafetensorsSource(own.folder)
    names = [name for name in source.where if any(x in name for x in ("vis", "multi_modal"))]
    assert len(names) > 20
    heard: set[str] = set()
    check = source.check

    def listen(name: str, shape: tuple[int, ...]) -> None:
        heard.add(name)
        check(name, shape)

    source.check = listen  # type: ignore[method-assign]
    read_tower(Tensors(source), own.config)
    assert heard == set(names)
    for name in names:
        at = source.where.pop(name)
        with pytest.raises(ModelInvalid, match=rf"{name}\b"):
            read_tower(Tensors(source), own.config)
        source.where[name] = at


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    own, name = saved("qwen3_vl"), "model.visual.patch_embed.proj.weight"
    held = load_file(own.folder / "model.safetensors")
    save_file(held | {name: held[name].flatten(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelInvalid, match=name):
        read_tower(Tensors(SafetensorsSource(tmp_path)), own.config)


@pytest.mark.parametrize(
    ("family", "prefix", "others"),
    [
        ("gemma3", "vision_tower.", ["vision_tower.vision_model."]),
        ("qwen2_5_vl", "visual.", ["model.visual."]),
        ("qwen3_vl", "model.visual.", ["visual."]),
    ],
)
def test_files_with_other_prefixes_have_the_same_tower(
    family: str, prefix: str, others: list[str], tmp_path: Path
) -> None:
    own = saved(family)
    held = load_file(own.folder / "model.safetensors")
    want = list(tensors(loaded(family)))
    for other in others:
        renamed = {
            other + name.removeprefix(prefix) if name.startswith(prefix) else name: tensor
            for name, tensor in held.items()
        }
        assert renamed.keys() != held.keys()
        save_file(renamed, tmp_path / "model.safetensors")
        made = list(tensors(load(SafetensorsSource(tmp_path), own.config)))
        assert all(torch.equal(a, b) for a, b in zip(made, want, strict=True))


@EVERY
def test_bytes_that_are_counted_are_those_of_its_tensors_on_every_rank(family: str) -> None:
    own = saved(family)
    for dtype in (torch.float32, torch.bfloat16):
        for rank in range(2):
            kernels, source = TorchKernels(dtype), SafetensorsSource(own.folder)
            made = load(source, own.config, kernels, Shard(rank, 2))
            assert made.nbytes(dtype) == sum(each.nbytes for each in tensors(made))
            assert all(each.dtype is dtype for each in tensors(made))


@EVERY
def test_random_weights_need_only_the_config(family: str) -> None:
    made = load(RandomSource(), saved(family).config)
    assert [x.shape for x in tensors(made)] == [x.shape for x in tensors(loaded(family))]
    found = rows(made, [TWICE])
    assert bool(found.isfinite().all()) and float(found.std()) > 0


def test_weights_in_fp8_are_what_they_stand_for(tmp_path: Path) -> None:
    """In the dtype of the model. A patch embedding in fp8 is refused by name."""
    own, name = saved("qwen3_vl"), "model.visual.blocks.1.mlp.linear_fc1.weight"
    held = load_file(own.folder / "model.safetensors")
    values, scales = held[name].to(torch.float8_e4m3fn), torch.full((len(held[name]), 1), 0.5)
    format = Quantization("_scale", None)
    save_file(held | {name: values, f"{name}_scale": scales}, tmp_path / "model.safetensors")
    made = load(Dequantised(SafetensorsSource(tmp_path), format), own.config)
    assert torch.equal(made.layers[1].mlp.up.weight, values.float() * 0.5)
    name = "model.visual.patch_embed.proj.weight"
    save_file(held | {name: held[name].to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelInvalid, match=f"{name} is fp8"):
        load(Dequantised(SafetensorsSource(tmp_path), format), own.config)

"""Grids and pixels are those of transformers' processors of the same files; what would change them
and is not served is refused by name.

transformers has two processors of each class. This holds the ones that resize by Pillow; those that
resize by torchvision need it installed, and their distance is not measured here.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import gemma, gradient, noise, processor, saved, text
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from kvline_server.errors import ConfigInvalid, ModelInvalid, ModelNotFound, ModelUnsupported
from kvline_server.images.bounds import Bounds, ImageRefused
from kvline_server.images.container import opened
from kvline_server.images.pixels import pixels
from kvline_server.images.processor import Processor
from kvline_server.model.vision import preprocessor

QWEN = {"image_processor_type": "Qwen2VLImageProcessorFast"}
QWEN3_VL = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    **QWEN,
}
QWEN25_VL = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
}
# The first files of each, as they are still deployed.
EARLY_25 = {**QWEN25_VL, "image_processor_type": "Qwen2_5_VLImageProcessor"}
EARLY_2 = {**QWEN25_VL, "max_pixels": 1048576}
EARLY_2["size"] = {"max_pixels": 1048576, "min_pixels": 3136}
GEMMA3 = {
    "do_convert_rgb": None,
    "do_normalize": True,
    "do_pan_and_scan": None,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Gemma3ImageProcessor",
    "image_seq_length": 256,
    "image_std": [0.5, 0.5, 0.5],
    "pan_and_scan_max_num_crops": None,
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 896, "width": 896},
}
# As transformers' class for torchvision saves it.
SAVED_FAST = {
    **QWEN3_VL,
    "crop_size": None,
    "data_format": "channels_first",
    "default_to_square": True,
    "device": None,
    "do_center_crop": None,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "max_pixels": None,
    "min_pixels": None,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "return_tensors": None,
}
SMALL = {**QWEN3_VL, "patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 480}}
NO_FIELDS = {"image_processor_type": "Qwen2VLImageProcessor"}
CONFIG = {"vision_config": {"patch_size": 14, "image_size": 896}, "mm_tokens_per_image": 256}


def read(folder: Path, raw: dict[str, Any], config: dict[str, Any] | None = None) -> Processor:
    (folder / "config.json").write_text(
        json.dumps({"vision_config": {}} if config is None else config)
    )
    (folder / "preprocessor_config.json").write_text(json.dumps(raw))
    return preprocessor.read(folder)


def reference(raw: dict[str, Any]) -> Any:
    kind = Gemma3ImageProcessorPil if "Gemma3" in str(raw) else Qwen2VLImageProcessorPil
    return kind(**{k: v for k, v in raw.items() if k != "image_processor_type"})


def normalised(processor: Processor, values: Any) -> Any:
    """[height, width, 3] of uint8 as the vision encoder gets them."""
    by = processor.normalisation
    mean, std = np.asarray([by.mean, by.std], np.float32)
    return (values.astype(np.float32) * by.rescale - mean) / std


def patches(processor: Processor, values: Any) -> Any:
    """Rows as Qwen's processors give them: blocks that become one token outermost; in a row colour,
    time, row, column."""
    height, width, _ = values.shape
    p, m = processor.patch, processor.merge
    blocks = values.reshape(height // p // m, m, p, width // p // m, m, p, 3)
    blocks = blocks.transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]
    blocks = np.repeat(blocks, processor.temporal, 5)
    return blocks.reshape(-1, 3 * processor.temporal * p * p)


def sizes(count: int) -> list[tuple[int, int]]:
    """Of height and width: of all magnitudes, halves of a side of 28 and 32, strips, and pixels."""
    drawn = random.Random(39)
    found = [(1, 1), (80, 112), (112, 80), (20, 4000), (4000, 20), (1, 200), (14, 42), (8065, 6048)]
    found += [(16 * n, 14 * (n + 2)) for n in range(1, 30, 2)]
    while len(found) < count:
        height = int(2 ** drawn.uniform(0, 12.5))
        found.append((height, max(1, int(height * 200 ** drawn.uniform(-1, 1)))))
    return [s for s in found if max(s) <= 200 * min(s)]


@pytest.mark.parametrize(
    "raw",
    [QWEN3_VL, QWEN25_VL, EARLY_25, EARLY_2, SMALL, NO_FIELDS, SAVED_FAST],
    ids=["qwen3-vl", "qwen2.5-vl", "early 2.5", "early 2", "small", "defaults", "saved fast"],
)
def test_patches_are_as_many_as_transformers_has(raw: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = read(tmp_path, raw), reference(raw)
    checked = sizes(230)
    assert len(checked) >= 200
    for height, width in checked:
        grid = ours.grid(height, width)
        assert grid.patches == theirs.get_number_of_image_patches(height, width), (height, width)
        assert grid.tokens * 4 == grid.patches == ours.patches_of(*ours.resized(height, width))


@pytest.mark.parametrize("raw", [QWEN3_VL, QWEN25_VL, SMALL, NO_FIELDS])
@pytest.mark.parametrize(
    ("draw", "width", "height"),
    [(noise, 80, 112), (text, 333, 90), (gradient, 40, 700), (noise, 7, 5), (text, 900, 20)],
)
def test_pixels_are_transformers(
    raw: dict[str, Any], draw: Any, width: int, height: int, tmp_path: Path
) -> None:
    """Equal in every bit before they are normalised, and nearly so after."""
    ours, image = read(tmp_path, raw), draw(width, height)
    found = pixels(opened(saved(image, "PNG"), Bounds()), ours)
    theirs = reference(raw)(image)
    assert theirs["image_grid_thw"].tolist() == [[1, found.grid.rows, found.grid.columns]]
    rows = patches(ours, normalised(ours, found.values))
    assert rows.shape == theirs["pixel_values"].shape
    least = 1 / 255 / max(ours.normalisation.std)  # of one step of a pixel
    assert np.abs(rows - theirs["pixel_values"]).max() < least / 1000


@pytest.mark.parametrize(("width", "height"), [(1000, 400), (20, 30), (896, 896), (3000, 10)])
def test_gemma_s_pixels_are_transformers(width: int, height: int, tmp_path: Path) -> None:
    ours, image = read(tmp_path, GEMMA3, CONFIG), text(width, height)
    assert ours == gemma()
    found = pixels(opened(saved(image, "PNG"), Bounds()), ours)
    assert (found.grid.rows, found.grid.columns, found.grid.tokens) == (64, 64, 256)
    theirs = np.asarray(reference(GEMMA3)(image)["pixel_values"])[0].transpose(1, 2, 0)
    assert np.abs(normalised(ours, found.values) - theirs).max() < 2 / 255 / 1000


def test_a_tiny_gemma_has_the_tokens_that_its_config_says(tmp_path: Path) -> None:
    config = {"vision_config": {"patch_size": 4, "image_size": 32}, "mm_tokens_per_image": 4}
    ours = read(tmp_path, {**GEMMA3, "size": {"height": 32, "width": 32}}, config)
    assert ours.grid(7, 99).tokens == 4 and ours.merge == 4


def test_what_transformers_5_saves_is_read_first(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="image_processor_type Other"):
        read(tmp_path, {"image_processor_type": "Other"})
    nested = {"processor_class": "Qwen3VLProcessor", "image_processor": QWEN3_VL}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert preprocessor.read(tmp_path) == processor()
    del nested["image_processor"]
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    with pytest.raises(ModelUnsupported, match="image_processor_type Other"):
        preprocessor.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"do_resize": False}, "do_resize False is not served; True is"),
        ({"do_rescale": False}, "do_rescale False"),
        ({"do_normalize": False}, "do_normalize False"),
        ({"do_convert_rgb": False}, "do_convert_rgb False"),
        ({"do_center_crop": True}, "do_center_crop True is not served; False is"),
        ({"do_pan_and_scan": True}, "do_pan_and_scan True"),
        ({"do_pad": True}, "do_pad True"),
        ({"resample": 1}, "resample 1 is not served; 2 (bilinear) and 3 (bicubic) are"),
        ({"do_sharpen": 1}, "do_sharpen 1 is not served; this server does not know it"),
        ({"image_processor_type": "CLIPImageProcessor"}, "image_processor_type CLIPImageProcessor"),
        ({"image_processor_type": None}, "image_processor_type None is not served"),
    ],
)
@pytest.mark.parametrize("raw", [QWEN3_VL, GEMMA3], ids=["qwen", "gemma"])
def test_what_is_not_served_is_refused_by_name(
    raw: dict[str, Any], change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelUnsupported) as refused:
        read(tmp_path, {**raw, **change}, CONFIG if raw is GEMMA3 else None)
    assert named in str(refused.value) and "preprocessor_config.json" in str(refused.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"merge_size": 0}, "merge_size: expected a positive integer, got 0"),
        ({"merge_size": True}, "merge_size: expected a positive integer, got True"),
        ({"size": {"longest_edge": 64}}, "size.shortest_edge: expected a positive integer"),
        ({"size": [1, 2]}, "size: expected an object"),
        ({"min_pixels": 16777217}, "size.shortest_edge: expected at most size.longest_edge"),
        ({"image_mean": [0.5, 0.5]}, "image_mean: expected three numbers"),
        ({"image_std": [0.5, 0.5, 0]}, "image_std: expected numbers of at least"),
        ({"rescale_factor": "x"}, "rescale_factor: expected numbers"),
        ({"patch_size": 14}, "patch_size: expected 16 as in config.json's vision_config"),
        ({"temporal_patch_size": 1}, "temporal_patch_size: expected 2 as in config.json's"),
    ],
)
def test_a_broken_field_is_named(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    config = {"vision_config": {"patch_size": 16, "temporal_patch_size": 2}}
    with pytest.raises(ModelInvalid) as refused:
        read(tmp_path, {**QWEN3_VL, **change}, config)
    assert named in str(refused.value)


@pytest.mark.parametrize("broken", ["[]", "{", "[" * 100_000])
def test_a_broken_file_is_named(broken: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="preprocessor_config"):
        preprocessor.read(tmp_path)
    read(tmp_path, QWEN3_VL)
    (tmp_path / "preprocessor_config.json").write_text(broken)
    with pytest.raises(ModelInvalid, match=r"preprocessor_config\.json: "):
        preprocessor.read(tmp_path)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "vision_config: expected an object"),
        ({**CONFIG, "mm_tokens_per_image": 255}, "mm_tokens_per_image: expected a square"),
        ({**CONFIG, "mm_tokens_per_image": 81}, "mm_tokens_per_image: expected a square"),
        ({"vision_config": {"patch_size": 14, "image_size": 448}}, "height and width 448"),
    ],
)
def test_a_gemma_whose_files_differ_is_named(
    config: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelInvalid) as refused:
        read(tmp_path, GEMMA3, config)
    assert named in str(refused.value)


@pytest.mark.parametrize("most", [4, 20, 64, 255, 800, 4096, 16_384, 10**6])
def test_a_bound_lowers_the_processor_s_and_is_never_exceeded(most: int) -> None:
    """Every shape but narrow strips fits; what was within it before is resized as before."""
    usual, bounded = processor(), processor().within(most)
    largest = 0
    for height, width in sizes(400):
        before = usual.grid(height, width)
        try:
            grid = bounded.grid(height, width)
        except ImageRefused as refused:
            assert f"at most {most} patches" in str(refused) and most < 800
            assert (max(height, width) // min(height, width)) * 4 > most / 2
            continue
        assert grid.patches <= most
        assert before.patches > most or grid == before
        largest = max(largest, grid.patches)
    assert most > 65_536 or largest > most * 0.8


def test_a_bound_below_any_image_is_an_error() -> None:
    assert gemma().within(4096).grid(5, 5).patches == 4096
    with pytest.raises(ConfigInvalid, match=r"maxImagePatches: expected at least 4096.* got 4095"):
        gemma().within(4095)
    with pytest.raises(ConfigInvalid, match=r"expected at least 4, .* got 3"):
        processor().within(3)


def test_detail_is_a_limit_of_pixels() -> None:
    usual = processor().within(16_384)
    assert usual.detailed("high") == usual.detailed("auto") == usual
    low = usual.detailed("low")
    for height, width in sizes(230):
        assert low.grid(height, width).tokens <= 512 * 512 / 32**2
    assert low.grid(1000, 1000).tokens == 256 and low.grid(300, 300) == usual.grid(300, 300)
    assert gemma().detailed("low") == gemma()
    with pytest.raises(ImageRefused, match="detail: expected low, high or auto, got 'original'"):
        usual.detailed("original")


def test_a_shape_that_is_too_narrow_is_refused_before_it_is_decoded() -> None:
    file = opened(saved(gradient(20_000, 1), "PNG"), Bounds())
    with pytest.raises(ImageRefused, match="a ratio of at most 200, got 20000 x 1 pixels"):
        pixels(file, processor())
    assert pixels(file, gemma()).values.shape == (896, 896, 3)
    assert processor().grid(1, 200).tokens > 0
    with pytest.raises(ImageRefused, match="200, got 201 x 1"):
        processor().grid(1, 201)

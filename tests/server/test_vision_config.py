"""What config.json says of a tower."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vision_models import FAMILIES, SIGLIP, STACKED, TEXT, WINDOWS, saved

from kvline_server.errors import ModelInvalid, ModelUnsupported
from kvline_server.model.fields import Fields
from kvline_server.model.vision.config import GEMMA, QWEN, VisionConfig, read_vision

AT = Path("config.json")
DEFAULTS = {
    "qwen3_5": VisionConfig(
        kind="qwen3",
        prefixes=QWEN,
        layers=27,
        hidden=1152,
        intermediate=4304,
        heads=16,
        patch=16,
        merge=2,
        frames=2,
        out=3584,
        eps=1e-6,
        theta=10000.0,
        positions=48,
    ),
    "qwen2_5_vl": VisionConfig(
        kind="qwen2_5",
        prefixes=QWEN[::-1],
        layers=32,
        hidden=3584,
        intermediate=3420,
        heads=16,
        patch=14,
        merge=2,
        frames=2,
        out=3584,
        eps=1e-6,
        theta=10000.0,
        window=4,
        whole=frozenset((7, 15, 23, 31)),
    ),
    "gemma3": VisionConfig(
        kind="siglip",
        prefixes=GEMMA,
        layers=12,
        hidden=768,
        intermediate=3072,
        heads=12,
        patch=16,
        merge=2,
        frames=1,
        out=2304,
        eps=1e-6,
        positions=14,
        image=224,
        two_way=True,
    ),
}
DEFAULTS["qwen3_5_moe"] = DEFAULTS["qwen3_5"]
DEFAULTS["qwen3_vl"] = DEFAULTS["qwen3_vl_moe"] = replace(
    DEFAULTS["qwen3_5"], deepstack=(8, 16, 24)
)


def read(kind: str, vision: dict[str, Any], text: dict[str, Any] = TEXT, **more: Any) -> Any:
    raw = {"model_type": kind, "vision_config": vision, "text_config": text, **more}
    return read_vision(Fields(copy.deepcopy(raw), AT))


@pytest.mark.parametrize("kind", FAMILIES)
def test_absent_fields_have_the_defaults_of_transformers(kind: str) -> None:
    import transformers

    tokens = {"mm_tokens_per_image": 49}  # which divides the default image
    made = read(kind, {}, {}, **tokens)
    assert made == DEFAULTS[kind]
    whole = getattr(transformers, f"{FAMILIES[kind][0]}Config")()
    assert read(kind, whole.vision_config.to_dict(), {}, **tokens) == made
    if kind == "gemma3":
        assert made.out == whole.text_config.hidden_size
        assert whole.mm_tokens_per_image == 256
        large = read(kind, {"image_size": 896, "patch_size": 14}, {})
        assert (large.merge, large.positions) == (4, 64)


def test_sizes_follow_from_the_fields() -> None:
    made = saved("qwen3_vl").config
    assert (made.head_dim, made.factor, made.inputs, made.width) == (16, 8, 96, 3 * 48)
    assert made.reads("model.visual.") and not made.reads("mtp.")
    assert saved("gemma3").config.reads("multi_modal_projector.")
    assert (saved("gemma3").config.inputs, saved("gemma3").config.merge) == (48, 4)


def test_a_text_model_s_fields_may_be_beside_the_section() -> None:
    """As in older files."""
    raw = {"model_type": "qwen2_5_vl", "vision_config": WINDOWS, **TEXT}
    assert read_vision(Fields(raw, AT)).out == 48
    with pytest.raises(ModelInvalid, match="out_hidden_size"):
        read_vision(Fields(raw | {"hidden_size": 64}, AT))


VL, WINDOWED, GEMMA3 = ("qwen3_vl", STACKED), ("qwen2_5_vl", WINDOWS), ("gemma3", SIGLIP)


@pytest.mark.parametrize(
    ("of", "change"),
    [
        (VL, {"hidden_act": "gelu"}),
        (VL, {"temporal_patch_size": 1}),
        (VL, {"in_channels": 4}),
        (VL, {"model_type": "siglip_vision_model"}),
        (VL, {"rope_parameters": {"rope_type": "default"}}),
        (VL, {"rope_parameters": {"factor": 2.0}}),
        (VL, {"head_dim": 8}),
        (("qwen3_5", STACKED), {"deepstack_visual_indexes": [0]}),
        (WINDOWED, {"hidden_act": "gelu"}),
        (WINDOWED, {"spatial_patch_size": 7}),
        (WINDOWED, {"in_chans": 1}),
        (GEMMA3, {"model_type": "siglip2_vision_model"}),
        (GEMMA3, {"hidden_act": "gelu"}),
        (GEMMA3, {"num_channels": 1}),
        (GEMMA3, {"use_mean_pooling": True}),
    ],
)
def test_an_option_that_is_not_served_is_refused_by_name(
    of: tuple[str, dict[str, Any]], change: dict[str, Any]
) -> None:
    kind, vision = of
    (name,) = change
    read(kind, {**vision, "deepstack_visual_indexes": []}, mm_tokens_per_image=4)
    with pytest.raises(ModelUnsupported, match=rf"vision_config\.{name}\b"):
        read(kind, vision | change, mm_tokens_per_image=4)


@pytest.mark.parametrize(
    ("of", "change"),
    [
        (VL, {"patch_size": [4, 4]}),
        (VL, {"hidden_size": 33}),
        (VL, {"hidden_size": 36}),
        (VL, {"num_position_embeddings": 17}),
        (VL, {"out_hidden_size": 64}),
        (VL, {"deepstack_visual_indexes": [1, 0]}),
        (VL, {"deepstack_visual_indexes": [0, 3]}),
        (VL, {"deepstack_visual_indexes": [True]}),
        (WINDOWED, {"window_size": 7}),
        (WINDOWED, {"fullatt_block_indexes": 1}),
    ],
)
def test_a_value_that_fits_no_tower_is_refused_by_name(
    of: tuple[str, dict[str, Any]], change: dict[str, Any]
) -> None:
    (name,) = change
    with pytest.raises(ModelInvalid, match=rf"vision_config\.{name}\b"):
        read(of[0], of[1] | change)


@pytest.mark.parametrize("tokens", [5, 9, 256])
def test_tokens_of_an_image_are_a_square_that_divides_its_patches(tokens: int) -> None:
    with pytest.raises(ModelInvalid, match="mm_tokens_per_image: expected a square that divides"):
        read("gemma3", SIGLIP, mm_tokens_per_image=tokens)


def test_a_model_without_a_known_tower_is_refused() -> None:
    with pytest.raises(ModelUnsupported, match="model_type 'llava' is not supported, towers of"):
        read("llava", {})


def test_reading_it_imports_no_torch() -> None:
    program = "import sys, kvline_server.model.vision.config as c; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

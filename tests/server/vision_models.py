"""Tiny models with towers, made by the library whose answers are the reference; and towers loaded
from what it saves."""

from __future__ import annotations

import atexit
import copy
import functools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import families
import numpy as np
import torch
from numpy.typing import NDArray

from kvline_server.images.processor import Normalisation
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.torch import TorchKernels
from kvline_server.model.fields import Fields, read_json
from kvline_server.model.linear import Tensors, TensorSource
from kvline_server.model.loader import Loading, SafetensorsSource
from kvline_server.model.shard import WHOLE, Shard
from kvline_server.model.vision.config import VisionConfig, read_vision
from kvline_server.model.vision.read import read_tower
from kvline_server.model.vision.tower import Tower

Picture = NDArray[np.uint8]  # [height, width, 3]
PATCH = 4
IMAGE = 300  # the token, in place of each one of an image
TEXT: dict[str, Any] = families.SMALL | {"num_hidden_layers": 3}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
QWEN: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": PATCH,
    "out_hidden_size": 48,
}
TABLE = {"num_position_embeddings": 16}
STACKED = QWEN | TABLE | {"deepstack_visual_indexes": [0, 1]}
# Two tokens of a window's side, so that most images end within one.
WINDOWS = QWEN | {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]}
SIGLIP: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8 * PATCH,
    "patch_size": PATCH,
    "vision_use_head": False,
}
# With recurrent layers, of which the state passes through images.
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": MROPE | {"partial_rotary_factor": 1.0},
}


def windowed(tokens: int) -> dict[str, Any]:
    """Gemma 3's text model: layers with a window and one without."""
    of_layers = ["sliding_attention", "full_attention", "sliding_attention"]
    return TEXT | {
        "sliding_window": tokens,
        "layer_types": of_layers,
        "query_pre_attn_scalar": 20,
        "rope_parameters": families.GEMMA3_ROPE,
    }


GEMMA: dict[str, Any] = {
    "image_token_index": IMAGE,
    "boi_token_index": IMAGE + 1,
    "eoi_token_index": IMAGE + 2,
}
# The class without Config and ForConditionalGeneration; the sections; fields beside them.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": ("Qwen3VL", STACKED, TEXT | {"rope_parameters": MROPE}, {}),
    "qwen3_vl_moe": ("Qwen3VLMoe", STACKED, TEXT | EXPERTS | {"rope_parameters": MROPE}, {}),
    "qwen3_5": ("Qwen3_5", QWEN | TABLE, TEXT | HYBRID, {}),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        QWEN | TABLE,
        TEXT | HYBRID | EXPERTS | {"shared_expert_intermediate_size": 16},
        {},
    ),
    "qwen2_5_vl": ("Qwen2_5_VL", WINDOWS, TEXT | {"rope_parameters": MROPE}, {}),
    "gemma3": ("Gemma3", SIGLIP, windowed(11), GEMMA | {"mm_tokens_per_image": 4}),
}
# With images larger than a window, and than what steps of decodes have for prompts; and without a
# window that hides anything, as prefixes that it has left are not found again.
TOKENS = {"mm_tokens_per_image": 64}
LARGE: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3_large": ("Gemma3", SIGLIP, windowed(24), GEMMA | TOKENS),
    "gemma3_wide": ("Gemma3", SIGLIP, windowed(4096), GEMMA | TOKENS),
}
# In sizes that a GPU's kernels are built for.
WIDE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rope_parameters": MROPE | {"mrope_section": [24, 20, 20]},
}
WIDE_TOWER = {"hidden_size": 144, "out_hidden_size": 512}
WIDE_HYBRID: dict[str, Any] = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": MROPE | {"mrope_section": [6, 5, 5], "partial_rotary_factor": 0.25},
}


def heads(dim: int) -> dict[str, Any]:
    """Of the sizes of Gemma 3's, with scores that differ from one key to another."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "query_pre_attn_scalar": dim // 16}
    return sizes | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": dim}


WIDE_SIGLIP = SIGLIP | {"hidden_size": 144}
LARGE |= {
    "gemma3_256": ("Gemma3", WIDE_SIGLIP, windowed(24) | heads(256), GEMMA | TOKENS),
    "gemma3_128": ("Gemma3", WIDE_SIGLIP, windowed(4096) | heads(128), GEMMA | TOKENS),
    "qwen3_vl_wide": ("Qwen3VL", STACKED | WIDE_TOWER, TEXT | WIDE, {}),
    "qwen2_5_vl_wide": ("Qwen2_5_VL", WINDOWS | WIDE_TOWER, TEXT | WIDE, {}),
    "qwen3_5_wide": ("Qwen3_5", QWEN | TABLE | WIDE_TOWER, TEXT | HYBRID | WIDE | WIDE_HYBRID, {}),
}
# CLIP's, of which no two channels share one.
BY = Normalisation(1 / 255, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.275777))


@dataclass(frozen=True, slots=True)
class Saved:
    """A family's model, and what it saved."""

    model: Any
    folder: Path

    @property
    def config(self) -> VisionConfig:
        path = self.folder / "config.json"
        return read_vision(Fields(read_json(path), path))


@functools.cache
def saved(family: str) -> Saved:
    """In float32, with weights of which none is without effect."""
    import transformers

    torch.manual_seed(11)
    kind, vision, text, more = (FAMILIES | LARGE)[family]
    ids = {"image_token_id": IMAGE, "video_token_id": IMAGE + 1} if kind != "Gemma3" else {}
    given = {"vision_config": vision, "text_config": text, **ids, **more}
    # It writes to what it gets, which families share.
    config = getattr(transformers, f"{kind}Config")(**copy.deepcopy(given))
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float().eval()
    deviation = 0.2 * (TEXT["hidden_size"] / text["hidden_size"]) ** 0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):  # or its states are soon forgotten
                parameter.copy_(torch.linspace(-3, 1, len(parameter)))
            elif parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.3)
                if name.endswith("language_model.norm.weight") and kind == "Gemma3":
                    parameter[::2] -= 2  # or each token would follow itself: its LM head is tied
            else:
                parameter.normal_(0, deviation)
        if kind == "Gemma3":  # or an answer could have an image's token: its LM head is tied
            model.get_input_embeddings().weight[IMAGE] = 0
    folder = Path(tempfile.mkdtemp(prefix=f"{family}-"))
    atexit.register(shutil.rmtree, folder)
    model.save_pretrained(folder)
    return Saved(model, folder)


def pixel_values(family: str, pictures: Sequence[Picture]) -> Any:
    """By transformers' processor, of pictures that need no other size."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    gemma = family.startswith("gemma3")
    kind = Gemma3ImageProcessorPil if gemma else Qwen2VLImageProcessorPil
    more: dict[str, Any] = {} if gemma else {"patch_size": PATCH, "merge_size": 2}
    made = kind(do_resize=False, do_convert_rgb=False, image_mean=BY.mean, image_std=BY.std, **more)
    return made([each.transpose(2, 0, 1) for each in pictures], return_tensors="pt")


@torch.inference_mode()
def expected(family: str, pictures: Sequence[Picture]) -> torch.Tensor:
    """What transformers' tower makes of them, what deepstack adds behind. [tokens, width]"""
    model, given = saved(family).model.model, pixel_values(family, pictures)
    if family.startswith("gemma3"):
        made: torch.Tensor = model.get_image_features(given["pixel_values"]).pooler_output
        return made.flatten(0, 1)
    found = model.visual(given["pixel_values"], grid_thw=given["image_grid_thw"])
    return torch.cat([found.pooler_output, *getattr(found, "deepstack_features", ())], dim=1)


def load(
    source: TensorSource,
    config: VisionConfig,
    kernels: Kernels | None = None,
    shard: Shard = WHOLE,
) -> Tower:
    """As a model's other weights: first all is checked."""
    kernels = kernels or TorchKernels()
    counted = read_tower(Tensors(source, shard, kernels), config)
    made = read_tower(Loading(source, kernels, 0, lambda *at: None, shard), config)
    assert made.elements == counted.elements
    return made


@functools.cache
def loaded(family: str) -> Tower:
    own = saved(family)
    return load(SafetensorsSource(own.folder), own.config)


@torch.inference_mode()
def rows(
    tower: Tower,
    pictures: Sequence[Picture],
    layers: int = 99,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """What a pass makes, in slices of so many layers."""
    kernels = kernels or TorchKernels()
    given = [torch.from_numpy(each).to(kernels.device) for each in pictures]
    made = tower.begin(kernels, given, BY)
    while not made.run(layers):
        assert not made.complete
    return made.rows


def picture(height: int, width: int, seed: int = 0) -> Picture:
    """Noise."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def tensors(of: Any) -> Iterator[torch.Tensor]:
    """All that a tower, or a block of it, has."""
    if isinstance(of, torch.Tensor):
        yield of
    elif isinstance(of, list):
        for each in of:
            yield from tensors(each)
    elif is_dataclass(of):
        for field in fields(of):
            yield from tensors(getattr(of, field.name))
    elif isinstance(of, Tower):
        for value in vars(of).values():
            yield from tensors(value)

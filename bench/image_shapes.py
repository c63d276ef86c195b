"""The shapes of models that see images: Qwen3-VL-8B and Qwen3.5-9B, each with its tower, and tiny
ones of the same kinds for what a CPU can show."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import hybrid_shapes
import torch

from kvline_server.images.processor import Processor
from kvline_server.model.config import ModelConfig, Names
from kvline_server.model.positions import Rope
from kvline_server.model.towers import QWEN
from kvline_server.model.vision import preprocessor

VL, HYBRID = "Qwen3VLForConditionalGeneration", QWEN.architecture
TYPES = {VL: "qwen3_vl", HYBRID: QWEN.model_type}  # of a whole model; its text model's has _text
TURNED = 60  # pairs that turn by rows or columns, and time, one after the other


def _seeing(text: ModelConfig, architecture: str) -> ModelConfig:
    """As it is in a checkpoint with a tower."""
    names, left_out = Names(decoder=QWEN.decoders[0]), (*QWEN.towers, *text.left_out)
    return replace(text, architecture=architecture, names=names, left_out=left_out)


def _vl(pairs: int, **fields: Any) -> ModelConfig:
    axes = tuple(pair % 3 if pair < TURNED else 0 for pair in range(pairs))
    made = ModelConfig(
        architecture=VL,
        head_dim=2 * pairs,
        max_position=262144,
        norm_eps=1e-6,
        rope=Rope(5_000_000.0, axes=axes),
        qk_norm="head",
        **fields,
    )
    return _seeing(made, VL)


VL8B = {"layers": 36, "hidden": 4096, "intermediate": 12288, "heads": 32, "kv_heads": 8}
VL_TINY = {"layers": 3, "hidden": 64, "intermediate": 128, "heads": 4, "kv_heads": 2}
SEEING = {
    "qwen3vl-8b": _vl(64, vocabulary=151936, **VL8B),
    "qwen3vl-tiny": _vl(8, vocabulary=512, **VL_TINY),
    "qwen35-9b-images": _seeing(hybrid_shapes.QWEN9B, HYBRID),
    "qwen35-tiny-images": _seeing(hybrid_shapes.QWEN_TINY, HYBRID),
}
TOWER: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
}
TINY: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
TOWERS = {
    "qwen3vl-8b": TOWER | {"deepstack_visual_indexes": [8, 16, 24]},
    "qwen3vl-tiny": TINY | {"deepstack_visual_indexes": [0, 1]},
    "qwen35-9b-images": TOWER,
    "qwen35-tiny-images": TINY,
}
IMAGE_TOKENS = {"qwen3vl-8b": 151655, "qwen35-9b-images": 248056}
LEAST, MOST = 64, 16384  # tokens of a resized image, by the models' own files


def usual() -> list[str]:
    """Those of a command's figures: of a CPU the tiny ones."""
    return [name for name in SEEING if ("tiny" in name) != torch.cuda.is_available()]


def image_token(name: str) -> int:
    return IMAGE_TOKENS.get(name, SEEING[name].vocabulary - 12)


def whole(name: str, text: dict[str, Any]) -> dict[str, Any]:
    """config.json of such a shape, by the fields of its text model's."""
    shape = SEEING[name]
    kind, own = TYPES[shape.architecture], dict(text)
    del own["architectures"]
    tower = {"model_type": kind, "out_hidden_size": shape.hidden, "spatial_merge_size": 2}
    return {
        "architectures": [shape.architecture],
        "model_type": kind,
        "image_token_id": image_token(name),
        "tie_word_embeddings": shape.tied_embeddings,
        "text_config": own | {"model_type": f"{kind}_text"},
        "vision_config": tower | TOWERS[name],
    }


def write_processor(name: str, folder: Path) -> None:
    """preprocessor_config.json."""
    patch = TOWERS[name]["patch_size"]
    of_token = (2 * patch) ** 2
    body = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": LEAST * of_token, "longest_edge": MOST * of_token},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(body))


def processor(name: str, tokens: int) -> Processor:
    """Of images of up to so many tokens."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_text(json.dumps({"vision_config": TOWERS[name]}))
        write_processor(name, folder)
        return preprocessor.read(folder).within(tokens * 4)

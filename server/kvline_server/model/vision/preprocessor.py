"""The image processor that a model folder's files describe.

A field that is absent or null is the class's default in transformers. One that changes the result
in a way that is not served is refused by name, and so is one that this does not know. Imports no
torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from kvline_server.errors import ModelInvalid, ModelNotFound, ModelUnsupported
from kvline_server.images.processor import Normalisation, Processor
from kvline_server.model.fields import Fields, read_json
from kvline_server.model.vision.config import SECTION

PREPROCESSOR, NESTED, CONFIG = "preprocessor_config.json", "processor_config.json", "config.json"
BILINEAR, BICUBIC = 2, 3  # Pillow's numbers
NUMBER = (int, float)

# Of transformers' classes; a size of Qwen's is numbers of pixels, whatever its keys say.
QWEN: dict[str, Any] = {
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "resample": BICUBIC,
    "rescale_factor": 1 / 255,
}
GEMMA: dict[str, Any] = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"height": 224, "width": 224},
    "resample": BILINEAR,
    "rescale_factor": 1 / 255,
}
CLASSES = {
    "Qwen2VLImageProcessor": QWEN,
    "Qwen2_5_VLImageProcessor": QWEN,  # as the first files of Qwen2.5-VL have it
    "Gemma3ImageProcessor": GEMMA,
}
# Flags, each with the one value that is served.
SERVED = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "do_center_crop": False,
    "do_pad": False,
    "do_pan_and_scan": False,
}
LIMITS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # earlier names
IGNORED = {  # they change nothing of a picture's pixels here
    "image_processor_type",
    "processor_class",
    "crop_size",  # of a crop that is off
    "pad_size",
    "data_format",
    "default_to_square",
    "device",
    "disable_grouping",
    "feature_extractor_type",
    "image_seq_length",
    "input_data_format",
    "return_tensors",
    "pan_and_scan_max_num_crops",
    "pan_and_scan_min_crop_size",
    "pan_and_scan_min_ratio_to_activate",
}


def read(folder: Path) -> Processor:
    """Of a model with images. Raises ModelNotFound, ModelInvalid or ModelUnsupported, with the file
    and the field."""
    path, raw = _preprocessor(folder)
    config = Fields(read_json(folder / CONFIG), folder / CONFIG)
    kind = str(raw.get("image_processor_type")).removesuffix("Fast")
    if kind not in CLASSES:
        served = "Qwen2VLImageProcessor and Gemma3ImageProcessor are"
        raise ModelUnsupported(f"{path}: image_processor_type {kind:.60} is not served; {served}")
    if config.value(SECTION) is None:
        raise config.invalid(SECTION, "an object")
    defaults = CLASSES[kind]
    _refuse_others(Fields(raw, path), {*defaults, *(LIMITS if defaults is QWEN else ())})
    given = {key: value for key, value in raw.items() if value is not None}
    found = Fields(defaults | given, path)
    return _qwen(found, config) if defaults is QWEN else _gemma(found, config)


def _preprocessor(folder: Path) -> tuple[Path, dict[str, Any]]:
    """transformers from 5 on saves the image processor's fields within those of the processor, and
    reads them first where they are there."""
    nested, path = folder / NESTED, folder / PREPROCESSOR
    if nested.is_file() and "image_processor" in (outer := read_json(nested)):
        inner = outer["image_processor"]
        if not isinstance(inner, dict):
            raise ModelInvalid(f"{nested}: image_processor: expected an object")
        return nested, inner
    if not path.is_file():
        raise ModelNotFound(f"{path}: no such file; a model with images has {PREPROCESSOR}")
    return path, read_json(path)


def _refuse_others(found: Fields, read: Collection[str]) -> None:
    """Raises ModelUnsupported for what is not served, and for what nobody reads."""
    for key, value in found.raw.items():
        if value is None or key in read or key in IGNORED or key.startswith("_"):
            continue
        if key not in SERVED:
            raise _not_served(found, key, "this server does not know it, and it may change pixels")
        if value is not SERVED[key]:
            raise _not_served(found, key, f"{SERVED[key]} is")


def _not_served(found: Fields, key: str, hint: str) -> ModelUnsupported:
    return ModelUnsupported(f"{found.path}: {key} {found.raw[key]!r:.60} is not served; {hint}")


def _qwen(found: Fields, config: Fields) -> Processor:
    vision = config.section(SECTION)
    for ours, theirs in (
        ("patch_size", "patch_size"),
        ("merge_size", "spatial_merge_size"),
        ("temporal_patch_size", "temporal_patch_size"),
    ):
        if (value := vision.value(theirs)) is not None and value != found.value(ours):
            raise found.invalid(ours, f"{value!r:.20} as in {CONFIG}'s {SECTION}.{theirs}")
    size = dict(found.section("size").raw)
    size |= {new: v for old, new in LIMITS.items() if (v := size.pop(old, None)) is not None}
    size |= {new: v for old, new in LIMITS.items() if (v := found.value(old)) is not None}
    edges = Fields(size, found.path, at="size.")
    shortest, longest = edges.integer("shortest_edge"), edges.integer("longest_edge")
    if shortest > longest:
        raise edges.invalid("shortest_edge", f"at most size.longest_edge, {longest}")
    return Processor(
        patch=found.integer("patch_size"),
        merge=found.integer("merge_size"),
        temporal=found.integer("temporal_patch_size"),
        shortest=shortest,
        longest=longest,
        normalisation=_normalisation(found),
        resample=_resample(found),
    )


def _gemma(found: Fields, config: Fields) -> Processor:
    size, vision = found.section("size"), config.section(SECTION)
    height, width, patch = (
        size.integer("height"),
        size.integer("width"),
        vision.integer("patch_size"),
    )
    if (height, width) != (side := vision.integer("image_size"), side):
        raise size.invalid(
            "height", f"height and width {side} as in {CONFIG}'s {SECTION}.image_size"
        )
    count = config.integer("mm_tokens_per_image", 256)
    merge = side // patch // math.isqrt(count)
    if not merge or (side // patch // merge) ** 2 != count or side % (patch * merge):
        square = f"a square that divides {side // patch} ** 2 patches"
        raise config.invalid("mm_tokens_per_image", square)
    return Processor(
        patch=patch,
        merge=merge,
        temporal=1,
        normalisation=_normalisation(found),
        resample=_resample(found),
        fixed=(height, width),
    )


def _normalisation(found: Fields) -> Normalisation:
    return Normalisation(
        rescale=_number(found, "rescale_factor", found.value("rescale_factor")),
        mean=_colours(found, "image_mean"),
        std=_colours(found, "image_std", least=1e-6),
    )


def _resample(found: Fields) -> int:
    if (value := found.value("resample")) not in (BILINEAR, BICUBIC):
        raise _not_served(found, "resample", f"{BILINEAR} (bilinear) and {BICUBIC} (bicubic) are")
    return int(value)


def _colours(found: Fields, key: str, least: float = 0.0) -> tuple[float, float, float]:
    """One number for each of red, green and blue, or one for all."""
    value = found.value(key)
    values = [value] * 3 if isinstance(value, NUMBER) else value
    if not isinstance(values, list) or len(values) != 3:
        raise found.invalid(key, "three numbers")
    red, green, blue = (_number(found, key, each, least) for each in values)
    return red, green, blue


def _number(found: Fields, key: str, value: Any, least: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, NUMBER) or not least <= value < 1e6:
        raise found.invalid(key, f"numbers of at least {least}")
    return float(value)

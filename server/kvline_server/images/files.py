"""The image processor that a model folder's files describe.

A field that is absent or null is the class's default in transformers. One that changes the result
in a way that is not served is refused by name, and so is one that this does not know.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from kvline_server.errors import ModelInvalid, ModelNotFound, ModelUnsupported
from kvline_server.images.processor import Normalisation, Processor

PREPROCESSOR, NESTED, CONFIG = "preprocessor_config.json", "processor_config.json", "config.json"
TOKENS = ("image_token_id", "image_token_index")  # in config.json: the token of images
MAX_BYTES = 16 << 20  # of a file: config.json may list many modules
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
    config = _Object(folder / CONFIG, _json(folder / CONFIG))
    kind = str(raw.get("image_processor_type")).removesuffix("Fast")
    if kind not in CLASSES:
        served = "Qwen2VLImageProcessor and Gemma3ImageProcessor are"
        raise ModelUnsupported(f"{path}: image_processor_type {kind:.60} is not served; {served}")
    found = _Object(path, raw, CLASSES[kind])
    if found.defaults is QWEN:
        found.refuse_others(LIMITS)
        return _qwen(found, config)
    found.refuse_others()
    return _gemma(found, config)


def _preprocessor(folder: Path) -> tuple[Path, dict[str, Any]]:
    """transformers from 5 on saves the image processor's fields within those of the processor, and
    reads them first where they are there."""
    nested = folder / NESTED
    if nested.is_file() and "image_processor" in (outer := _json(nested)):
        inner = outer["image_processor"]
        if not isinstance(inner, dict):
            raise ModelInvalid(f"{nested}: image_processor: expected an object")
        return nested, inner
    return folder / PREPROCESSOR, _json(folder / PREPROCESSOR)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelNotFound(f"{path}: no such file; a model with images has {PREPROCESSOR}")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ModelInvalid(f"{path}: {size} bytes are more than the {MAX_BYTES} that are read")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelInvalid(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelInvalid(f"{path}: expected a JSON object")
    return value


def _qwen(found: _Object, config: _Object) -> Processor:
    vision = config.section("vision_config")
    for ours, theirs in (
        ("patch_size", "patch_size"),
        ("merge_size", "spatial_merge_size"),
        ("temporal_patch_size", "temporal_patch_size"),
    ):
        if (value := vision.raw.get(theirs)) is not None and value != found.value(ours):
            found.invalid(ours, f"{value!r:.20} as in {CONFIG}'s vision_config.{theirs}")
    size = dict(found.section("size").raw)
    size |= {new: v for old, new in LIMITS.items() if (v := size.pop(old, None)) is not None}
    size |= {new: v for old, new in LIMITS.items() if (v := found.raw.get(old)) is not None}
    edges = _Object(found.path, size, at="size.")
    shortest, longest = edges.whole("shortest_edge"), edges.whole("longest_edge")
    if shortest > longest:
        edges.invalid("shortest_edge", f"at most size.longest_edge, {longest}")
    return Processor(
        patch=found.whole("patch_size"),
        merge=found.whole("merge_size"),
        temporal=found.whole("temporal_patch_size"),
        shortest=shortest,
        longest=longest,
        normalisation=_normalisation(found),
        resample=_resample(found),
    )


def _gemma(found: _Object, config: _Object) -> Processor:
    size, vision = found.section("size"), config.section("vision_config")
    height, width, patch = size.whole("height"), size.whole("width"), vision.whole("patch_size")
    if (height, width) != (side := vision.whole("image_size"), side):
        size.invalid("height", f"height and width {side} as in {CONFIG}'s vision_config.image_size")
    tokens = _Object(config.path, config.raw, {"mm_tokens_per_image": 256})
    count = tokens.whole("mm_tokens_per_image")
    merge = side // patch // math.isqrt(count)
    if not merge or (side // patch // merge) ** 2 != count or side % (patch * merge):
        tokens.invalid("mm_tokens_per_image", f"a square that divides {side // patch} ** 2 patches")
    return Processor(
        patch=patch,
        merge=merge,
        temporal=1,
        normalisation=_normalisation(found),
        resample=_resample(found),
        fixed=(height, width),
    )


def _normalisation(found: _Object) -> Normalisation:
    return Normalisation(
        rescale=found.number("rescale_factor"),
        mean=found.colours("image_mean"),
        std=found.colours("image_std", least=1e-6),
    )


def _resample(found: _Object) -> int:
    if (value := found.value("resample")) not in (BILINEAR, BICUBIC):
        found.unsupported("resample", f"{BILINEAR} (bilinear) and {BICUBIC} (bicubic) are")
    return int(value)


class _Object:
    """Typed reads; errors name the file and the field."""

    def __init__(
        self,
        path: Path,
        raw: dict[str, Any],
        defaults: Mapping[str, Any] = MappingProxyType({}),
        at: str = "",
    ) -> None:
        """`at` is where the fields are in the file, such as `size.`"""
        self.path, self.raw, self.defaults, self.at = path, raw, defaults, at

    def value(self, key: str) -> Any:
        found = self.raw.get(key)
        return self.defaults.get(key) if found is None else found

    def whole(self, key: str) -> int:
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            self.invalid(key, "a positive integer")
        return int(value)

    def number(self, key: str, least: float = 0.0) -> float:
        return self._number(key, self.value(key), least)

    def colours(self, key: str, least: float = 0.0) -> tuple[float, float, float]:
        """One number for each of red, green and blue, or one for all."""
        value = self.value(key)
        values = [value] * 3 if isinstance(value, NUMBER) else value
        if not isinstance(values, list) or len(values) != 3:
            self.invalid(key, "three numbers")
        red, green, blue = (self._number(key, each, least) for each in values)
        return red, green, blue

    def section(self, key: str) -> _Object:
        """An object within, whose own defaults do not add to what is there, as in transformers."""
        value = self.value(key)
        if not isinstance(value, dict):
            self.invalid(key, "an object")
        return _Object(self.path, value, at=f"{self.at}{key}.")

    def refuse_others(self, read: Collection[str] = ()) -> None:
        """Raises ModelUnsupported for what is not served, and for what nobody reads."""
        known = {*self.defaults, *IGNORED, *read}
        for key, value in self.raw.items():
            if value is None or key in known or key.startswith("_"):
                continue
            if key not in SERVED:
                self.unsupported(key, "this server does not know it, and it may change pixels")
            if value is not SERVED[key]:
                self.unsupported(key, f"{SERVED[key]} is")

    def unsupported(self, key: str, hint: str) -> NoReturn:
        raise ModelUnsupported(
            f"{self.path}: {self.at}{key} {self.value(key)!r:.60} is not served; {hint}"
        )

    def invalid(self, key: str, expected: str) -> NoReturn:
        raise ModelInvalid(
            f"{self.path}: {self.at}{key}: expected {expected}, got {self.value(key)!r:.60}"
        )

    def _number(self, key: str, value: object, least: float) -> float:
        if isinstance(value, bool) or not isinstance(value, NUMBER) or not least <= value < 1e6:
            self.invalid(key, f"numbers of at least {least}")
        return float(value)

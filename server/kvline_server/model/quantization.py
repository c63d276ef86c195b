"""fp8 weights: what config.json says of their scales. Imports no torch.

Served are e4m3 with a scale of each row, as compressed-tensors writes «channel», and with one of
each block of 128 x 128, as Qwen3's fp8 checkpoints have. A weight's dtype in the file says whether
it is quantised, so lists of modules that are not need not be read.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvline_server.errors import ModelUnsupported
from kvline_server.model.fields import Fields

FIELD = "quantization_config"
SERVED = (
    "of quantised weights fp8 is served: in blocks (quant_method fp8, weight_block_size), or by "
    "channel (quant_method compressed-tensors, format float-quantized)"
)


@dataclass(frozen=True, slots=True)
class Quantization:
    """Of fp8 weights: weight times scale is what the model was trained with, or near it."""

    suffix: str  # of the scales' name after that of a weight, such as _scale
    block: tuple[int, int] | None  # rows and columns of a scale; None: a row

    def scales(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The shape of a weight's scales."""
        rows, columns = shape
        if self.block is None:
            return rows, 1
        return -(-rows // self.block[0]), -(-columns // self.block[1])


def read(fields: Fields) -> Quantization | None:
    """Raises ModelUnsupported, by name, for what is not served."""
    quantized = fields.section(FIELD)
    if not quantized.raw:
        return None
    method = quantized.value("quant_method")
    if method == "fp8":
        return _in_blocks(fields, quantized)
    if method == "compressed-tensors":
        return _by_channel(fields, quantized)
    raise _refused(fields, f"{FIELD}.quant_method", method, SERVED)


def _in_blocks(fields: Fields, quantized: Fields) -> Quantization:
    block = quantized.value("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(_is_size(n) for n in block)):
        raise _refused(fields, f"{FIELD}.weight_block_size", block, SERVED)
    for key, wanted in (("fmt", "e4m3"), ("activation_scheme", "dynamic")):
        if (value := quantized.value(key, wanted)) != wanted:
            raise _refused(fields, f"{FIELD}.{key}", value, f"{wanted} is")
    return Quantization("_scale_inv", (block[0], block[1]))


def _by_channel(fields: Fields, quantized: Fields) -> Quantization:
    if (form := quantized.value("format")) != "float-quantized":
        raise _refused(fields, f"{FIELD}.format", form, SERVED)
    if (cache := quantized.value("kv_cache_scheme")) is not None:
        raise _refused(fields, f"{FIELD}.kv_cache_scheme", cache, "null is")
    groups = quantized.section("config_groups")
    if not groups.raw:
        raise quantized.invalid("config_groups", "an object with a group")
    for name in groups.raw:
        group = groups.section(name)
        weights, inputs = group.section("weights"), group.section("input_activations")
        wanted = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}
        _same(fields, f"{name}.weights", weights, wanted)
        if inputs.raw:  # else the activations stay as they are
            wanted = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
            _same(fields, f"{name}.input_activations", inputs, wanted)
    return Quantization("_scale", None)


def _same(fields: Fields, at: str, given: Fields, wanted: dict[str, object]) -> None:
    for key, value in wanted.items():
        if (got := given.value(key)) != value:
            raise _refused(fields, f"{FIELD}.config_groups.{at}.{key}", got, f"{value!r} is")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**16


def _refused(fields: Fields, at: str, value: object, hint: str) -> ModelUnsupported:
    return ModelUnsupported(f"{fields.path}: {at} {value!r:.60} is not served; {hint}")

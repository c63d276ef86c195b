"""fp8 weights: what config.json says of their scales. Imports no torch.

Served are e4m3 with a scale of each row, as compressed-tensors writes «channel», and with one of
each block of 128 x 128, as Qwen3's fp8 checkpoints have. A weight's dtype in the file says whether
it is quantised, so lists of modules that are not need not be read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvline_server.model.fields import Fields, read_json

FIELD = "quantization_config"
BESIDE = "hf_quant_config.json"
E4M3 = ("e4m3", "float8_e4m3fn")
# Which modules are quantised their weights' dtype says; the rest tells how the file was made.
LISTS = (
    "global_compression_ratio",
    "ignore",
    "ignored_layers",
    "modules_to_not_convert",
    "quantization_status",
    "version",
)
SPARSITY = (
    "global_sparsity",
    "ignore",
    "registry_requires_subclass",
    "sparsity_structure",
    "targets",
)
OBSERVED = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
FP8 = {"num_bits": 8, "type": "float"}
CACHE = {**FP8, "strategy": "tensor", "dynamic": False, "symmetric": True}
SERVED = (
    "; of quantised weights fp8 is served: in blocks (quant_method fp8, weight_block_size), or by "
    "channel (quant_method compressed-tensors, format float-quantized), and experts in MXFP4 "
    "(quant_method mxfp4)"
)
MXFP4_BLOCK = 32  # numbers of a row with a common scale
MXFP4_VALUES, MXFP4_SCALES = "_blocks", "_scales"  # what their names end with


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


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Of experts, all of them: numbers of 4 bits, a scale for each MXFP4_BLOCK of a row."""


def read(fields: Fields, layers: int) -> Quantization | Mxfp4 | None:
    """Of a model with so many layers. Raises ModelUnsupported, by name, for what is not served."""
    quantized = fields.section(FIELD)
    if not quantized.raw:
        _refuse_beside(fields.path.with_name(BESIDE))
        return None
    method = quantized.value("quant_method")
    made: Quantization | Mxfp4
    if method == "mxfp4":
        made = _of_experts(quantized, layers)
    elif method == "fp8":
        made = _in_blocks(quantized)
    elif method == "compressed-tensors":
        made = _by_channel(quantized)
    else:
        own = "quant_algo" if method is None and quantized.value("quant_algo") else "quant_method"
        raise quantized.unsupported(own, SERVED)
    quantized.refuse_unread(LISTS)
    return made


def _refuse_beside(path: Path) -> None:
    """ModelOpt's older checkpoints have their quantisation in a file of its own alone. One of the
    cache changes no weight: scales of the cache are read from the weights' files."""
    if not path.is_file():
        return
    scheme = Fields(read_json(path), path).section("quantization")
    if not scheme.raw:
        raise scheme.invalid("quant_algo", "a name or null")
    if scheme.value("quant_algo") is not None:
        raise scheme.unsupported("quant_algo", SERVED)


def _in_blocks(quantized: Fields) -> Quantization:
    block = quantized.value("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(_is_size(n) for n in block)):
        raise quantized.unsupported("weight_block_size", SERVED)
    if quantized.value("fmt", E4M3[0]) not in E4M3:
        raise quantized.unsupported("fmt", f", {E4M3[0]!r} is")
    _same(quantized, {"activation_scheme": "dynamic"})
    return Quantization("_scale_inv", (block[0], block[1]))


def _by_channel(quantized: Fields) -> Quantization:
    if quantized.value("format") != "float-quantized":
        raise quantized.unsupported("format", SERVED)
    cache = quantized.section("kv_cache_scheme")
    if cache.raw:  # its scales are read where the KV cache is fp8 (kv_scales.py)
        _same(cache, CACHE, all_given=True)
        cache.refuse_unread(OBSERVED)
    # Weights without half of their elements would be stored in another way.
    sparsity = quantized.section("sparsity_config")
    _same(sparsity, {"format": "dense"})
    sparsity.refuse_unread(SPARSITY)
    groups = quantized.section("config_groups")
    if not groups.raw:
        raise quantized.invalid("config_groups", "an object with a group")
    for name in groups.raw:
        group = groups.section(name)
        weights, inputs = group.section("weights"), group.section("input_activations")
        _same(weights, {**FP8, "strategy": "channel", "dynamic": False}, all_given=True)
        _same(weights, {"symmetric": True})
        weights.refuse_unread(OBSERVED)
        if inputs.raw:  # else the activations stay as they are
            _same(inputs, {**FP8, "strategy": "token", "dynamic": True}, all_given=True)
            _same(inputs, {"symmetric": True})
            inputs.refuse_unread(OBSERVED)
        _same(group, {"format": "float-quantized"})
        group.refuse_unread(("targets",))
    return Quantization("_scale", None)


def _of_experts(quantized: Fields, layers: int) -> Mxfp4:
    """Every layer's experts are quantised and nothing else is, which its list must agree with."""
    quantized.value("dequantize")  # how transformers runs it: the weights are the same
    excepted = quantized.value("modules_to_not_convert", [])
    if not isinstance(excepted, list) or not all(isinstance(name, str) for name in excepted):
        raise quantized.invalid("modules_to_not_convert", "a list of names")
    experts = [f"model.layers.{layer}.mlp.experts" for layer in range(layers)]
    for name in excepted:
        if any(_is_of(each, name) for each in experts):
            hint = f": {name[:80]} names experts, which are served all in MXFP4 or none"
            raise quantized.unsupported("modules_to_not_convert", hint)
    return Mxfp4()


def _is_of(module: str, pattern: str) -> bool:
    """Whether the module is named as transformers reads such a list: by how its name begins or
    ends, where * is any text."""
    if pattern.strip(".*").startswith(module):
        return True
    parts = [re.escape(part) for part in re.split(r"(?:\.?\*)+", pattern)]
    return module.endswith(pattern) or re.match(".*?".join(parts), module) is not None


def _same(given: Fields, wanted: dict[str, object], all_given: bool = False) -> None:
    """Raises ModelUnsupported for another value; one that is not given is as wanted, or not."""
    for key, value in wanted.items():
        if given.value(key, None if all_given else value) != value:
            raise given.unsupported(key, f", {value!r} is")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**16

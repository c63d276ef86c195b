"""Triton kernels as cubins: compiled ahead of time, launched through the CUDA driver.

Triton itself builds a small C launcher when a kernel first runs, which needs a C compiler in the
pod. Compiling to a cubin needs neither that nor a GPU: an image has all variants beside this file
(kernels/build.py); a machine without them compiles a variant at its first launch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from cuda.bindings import driver

from kvline_server.memory.cuda import call

# Modules beside this one.
SOURCES = (
    "triton_kernels",
    "triton_cache",
    "triton_attention",
    "triton_fp8",
    "triton_experts",
    "triton_mxfp4",
    "triton_recurrent",
    "triton_delta_rule",
    "triton_scan",
    "triton_encoder",
)
# Modules whose lists the numbers of tuning.Choices are indices of.
CHOOSERS = ("bf16_linear", "fp8_linear", "cuda_experts", "cuda_mxfp4")
BUILT = Path(__file__).with_name("cubins.bin")
CONSTANT = "constexpr"
TYPES = {"i32": ctypes.c_int32, "fp32": ctypes.c_float}
TRITON_TYPES = {
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}
# They may start before the kernel before them has ended, for which they wait.
CHAINED = (
    *("one_row", "write", "write_fp8", "one_shot", "one_shot_ll"),
    *("quantise", "scaled", "add_parts", "one_row_fp8"),
    *("route", "sort", "grouped", "grouped_mxfp4", "add_chosen"),
    *("attend_fp8", "merge_splits", "apply_sinks", "copy_pages"),
    *("convolve_rows", "delta_rows", "delta_lines", "delta_tiles", "delta_pass"),
    *("delta_short", "scan_rows", "scan_lines", "scan_tiles", "scan_pass"),
    *("norm_then_gate", "gate_then_norm"),
)
SHARED_BY_DEFAULT = 48 << 10  # bytes; a larger kernel needs a function attribute


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel of SOURCES with its argument types and constants; one cubin each."""

    kernel: str
    arguments: tuple[str, ...]  # Triton's type of each, in order
    aligned: tuple[int, ...]  # indices of arguments that are divisible by 16
    constants: tuple[tuple[str, int | str], ...]
    warps: int = 4
    stages: int = 3  # of loads under way in a loop

    @property
    def name(self) -> str:
        constants = (f"{name.lower()}{value}" for name, value in self.constants)
        aligned = "".join(f".{at}" for at in self.aligned)
        runs = f"w{self.warps}s{self.stages}"
        return "-".join((self.kernel, *self.arguments, *constants, f"a{aligned}", runs))


class Cubin(msgspec.Struct, forbid_unknown_fields=True):
    code: bytes
    entry: str
    warps: int
    shared: int  # bytes


class Built(msgspec.Struct, forbid_unknown_fields=True):
    """All variants for one compute capability, and the hash of their source."""

    source: str
    capability: int
    cubins: dict[str, Cubin]


@dataclass(frozen=True, slots=True)
class _Loaded:
    function: Any
    types: tuple[Any, ...]
    threads: int
    shared: int


def launch(variant: Variant, programs: int, *arguments: torch.Tensor | int | float) -> None:
    """Launches `programs` programs on torch's current stream. Raises DeviceFailure."""
    if not programs:
        return
    loaded = _load(variant, torch.cuda.current_device())
    values = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments)
    stream = torch.cuda.current_stream().cuda_stream
    config = driver.CUlaunchConfig()
    config.gridDimX, config.blockDimX = programs, loaded.threads
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.sharedMemBytes, config.hStream = loaded.shared, stream
    if variant.kernel in CHAINED:
        config.attrs, config.numAttrs = [_chained()], 1
    # After its own arguments a Triton kernel takes two scratch pointers, unused by these kernels.
    call(driver.cuLaunchKernelEx, config, loaded.function, ((*values, 0, 0), loaded.types), 0)


@functools.cache
def _chained() -> Any:
    made = driver.CUlaunchAttribute()
    made.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    made.value.programmaticStreamSerializationAllowed = 1
    return made


@functools.cache
def _load(variant: Variant, device: int) -> _Loaded:
    major, minor = torch.cuda.get_device_capability(device)
    cubin = _built(10 * major + minor).get(variant.name)
    cubin = cubin or compile(variant, 10 * major + minor)
    module = call(driver.cuModuleLoadData, cubin.code)
    function = call(driver.cuModuleGetFunction, module, cubin.entry.encode())
    if cubin.shared > SHARED_BY_DEFAULT:
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call(driver.cuFuncSetAttribute, function, most, cubin.shared)
    types = [TYPES.get(kind, ctypes.c_void_p) for kind in variant.arguments]
    types += [ctypes.c_void_p] * 2
    return _Loaded(function, tuple(types), 32 * cubin.warps, cubin.shared)


@functools.cache
def _built(capability: int) -> dict[str, Cubin]:
    """The prebuilt cubins for this source and architecture; empty without any."""
    if not BUILT.is_file():
        return {}
    found = msgspec.msgpack.decode(BUILT.read_bytes(), type=Built)
    fits = found.source == source_hash() and found.capability == capability
    return found.cubins if fits else {}


def source_hash() -> str:
    return _hash_of(_modules(SOURCES))


def identity() -> str:
    """A hash of all that a number of tuning.Choices depends on: our kernels, compiled or not, what
    lists them, and the CUDA whose cuBLASLt proposes algorithms. FlashInfer's version is apart."""
    built = [BUILT] if BUILT.is_file() else []
    return f"{torch.version.cuda} {_hash_of([*_modules(SOURCES + CHOOSERS), *built])}"


def _modules(names: tuple[str, ...]) -> list[Path]:
    return [Path(__file__).with_name(f"{name}.py") for name in names]


def _hash_of(files: list[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _source_of(kernel: str) -> Any:
    """The Triton function of that name."""
    for name in SOURCES:
        module = importlib.import_module(f"kvline_server.kernels.{name}")
        if (found := getattr(module, kernel, None)) is not None:
            return found
    raise AssertionError(f"no Triton kernel {kernel}")


def compile(variant: Variant, capability: int) -> Cubin:
    """Compiles a variant; needs no GPU and no C compiler. Source: triton.compile, version 3.6.0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = _source_of(variant.kernel)
    constants = dict(variant.constants)
    runtime = [name for name in function.arg_names if name not in constants]
    signature = dict(zip(runtime, variant.arguments, strict=True))
    order = {name: signature.get(name, CONSTANT) for name in function.arg_names}
    attributes = {(at,): [["tt.divisibility", 16]] for at in variant.aligned}
    made = triton.compile(
        ASTSource(function, order, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": variant.warps, "num_stages": variant.stages},
    )
    needs = made.metadata.global_scratch_size + made.metadata.profile_scratch_size
    assert not needs, f"{variant.name} needs scratch memory, which launch() does not pass"
    return Cubin(made.asm["cubin"], made.metadata.name, variant.warps, made.metadata.shared)

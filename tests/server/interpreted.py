"""Our Triton kernels without a GPU: in Triton's interpreter, which a process of its own takes, and
compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import paths
import pytest
import torch

from kvline_server.kernels import cubins
from kvline_server.kernels.build import CAPABILITY
from kvline_server.kernels.cubins import Cubin, Variant

SHARED = 227 << 10  # bytes of a program on Hopper, at most


def run(script: str) -> None:
    """A script, in which this module and what it imports can be imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    script = f"import gc, interpreted\ninterpreted.quicken()\ngc.freeze()\n{script}"
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def launcher(kernels: ModuleType) -> Callable[..., None]:
    """cubins.launch in a script, of the kernels of that module, with what is promised of alignment
    checked."""
    from triton.runtime import interpreter

    kernels._after_the_last = lambda: None  # type: ignore[attr-defined] # an instruction it lacks
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, *words: Any) -> None:
        patch(tensor, *words)
        # A bound of a range is an array of one number there, of which numpy makes none itself.
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched

    def launch(variant: Variant, programs: int, *arguments: Any) -> None:
        assert len(arguments) == len(variant.arguments)
        for at in variant.aligned:
            given = arguments[at]
            number = given.data_ptr() if isinstance(given, torch.Tensor) else given
            assert number % 16 == 0, (variant.kernel, at)
        if programs:
            getattr(kernels, variant.kernel)[(programs,)](*arguments, **dict(variant.constants))

    return launch


def quicken() -> None:
    """Takes out what the interpreter does anew for each operation: it looks
    for what to replace in Triton's modules at each call of a function of the language, and lists
    all types for each that it translates."""
    from triton import language
    from triton.runtime import interpreter

    replace, translate = interpreter._patch_lang, interpreter._get_np_dtype
    launch = interpreter.GridExecutor.__call__
    seen: set[int] = set()  # functions that were called in this launch
    types: dict[str, Any] = {}

    def launch_anew(executor: Any, *words: Any, **options: Any) -> None:
        seen.clear()
        launch(executor, *words, **options)

    def replace_once(function: Any) -> Any:
        if id(function) in seen:
            return None  # a call within a launch, which does not ask for it
        seen.add(id(function))
        return replace(function)

    def translate_once(kind: Any) -> Any:
        kind = kind.element_ty if isinstance(kind, language.block_type) else kind
        if kind.name not in types:
            types[kind.name] = translate(kind)
        return types[kind.name]

    interpreter.GridExecutor.__call__ = launch_anew
    interpreter._patch_lang = replace_once
    interpreter._get_np_dtype = translate_once


def compiled(
    variants: Iterable[Variant], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Cubin]]:
    """Of each variant its name and its program. Triton's cache survives the run, because a quarter
    of this stage's CPU time is LLVM's: a program has the key of its source, options and Triton."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(paths.CACHE / "triton"))
    for variant in variants:
        made = cubins.compile(variant, CAPABILITY)
        assert made.code.startswith(b"\x7fELF"), variant.name
        yield variant.name, made

"""Our own GPU kernels are made without a GPU and a C compiler, and an image is built with them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from kvline_server.kernels import build, cubins, cuda_rows, cuda_write
from kvline_server.kernels.cubins import Built, Variant

ELF = b"\x7fELF"


def variants() -> list[Variant]:
    return [*cuda_rows.variants(), *cuda_write.variants(torch.bfloat16)]


def test_each_variant_has_a_name_of_its_own() -> None:
    names = [v.name for v in variants()]
    assert len(names) == len(set(names)) > 100


def test_kernels_are_made_without_a_compiler_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    all_of_them = variants()
    some = [v for v in all_of_them if v.name.startswith(("score-*bf16", "draw-*fp32"))][:2]
    monkeypatch.setattr(cuda_rows, "variants", lambda: iter(some))
    monkeypatch.setattr(cuda_write, "variants", lambda _: iter(all_of_them[-1:]))
    file = tmp_path / "cubins.bin"
    assert build.build(file) == len(some) + 1
    made = msgspec.msgpack.decode(file.read_bytes(), type=Built)
    for variant in some:
        cubin = made.cubins[variant.name]
        assert cubin.code.startswith(ELF) and cubin.warps == variant.warps
        assert cubin.entry == variant.kernel

    monkeypatch.setattr(cubins, "BUILT", file)
    cubins._built.cache_clear()
    assert set(cubins._built(90)) == set(made.cubins)
    cubins._built.cache_clear()
    assert cubins._built(80) == {}, "made for another GPU"
    monkeypatch.setattr(cubins, "source_hash", lambda: "changed since")
    cubins._built.cache_clear()
    assert cubins._built(90) == {}, "made from another source"
    cubins._built.cache_clear()


def test_a_model_with_more_heads_than_kernels_hold_is_told_so() -> None:
    cuda_write.check(128, 8)
    with pytest.raises(RuntimeError, match="144 heads of queries"):
        cuda_write.check(144, 8)

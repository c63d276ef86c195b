"""Tests on a CUDA GPU: make test-gpu. Without one they are reported as not run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvline_server.memory.cuda import CudaArena
from kvline_server.model.config import ModelConfig
from kvline_server.model.positions import Rope

sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in (i for i in items if i.get_closest_marker("gpu")):
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU here"))


@pytest.fixture(autouse=True)
def unmapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test's arenas map goes back with it: a server has one arena, until it ends."""
    made: list[CudaArena] = []
    begin = CudaArena.__init__

    def noted(arena: CudaArena, *arguments: Any) -> None:
        begin(arena, *arguments)
        made.append(arena)

    monkeypatch.setattr(CudaArena, "__init__", noted)
    yield
    for arena in made:
        arena.resize(0)


@pytest.fixture
def shape() -> Callable[..., ModelConfig]:
    """A small Llama, or a Qwen3 with norms of query and key, in sizes the kernels are built for."""

    def make(head_dim: int = 128, qk_norm: bool = False, **more: Any) -> ModelConfig:
        numbers: dict[str, Any] = {
            "layers": 3,
            "hidden": 512,
            "intermediate": 1024,
            "heads": 8,
            "kv_heads": 2,
            "vocabulary": 5003,
            "max_position": 4096,
        }
        return ModelConfig(
            architecture="Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM",
            head_dim=head_dim,
            norm_eps=1e-5,
            rope=Rope(500_000.0),
            tied_embeddings=qk_norm,
            qk_norm="head" if qk_norm else "",
            **(numbers | more),
        )

    return make

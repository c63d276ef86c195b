"""The arena on CUDA virtual memory: addresses stay, contents stay, captured graphs stay valid."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvline_server.errors import DeviceOutOfMemory
from kvline_server.model.config import ModelConfig
from kvline_server.model.decoder import kv_shape

pytestmark = pytest.mark.gpu


@pytest.fixture
def arena(shape: Callable[..., ModelConfig]):  # type: ignore[no-untyped-def]
    from kvline_server.memory.cuda import CudaArena

    return CudaArena(kv_shape(shape(), torch.bfloat16), 1 << 22)


def test_growth_and_shrink_keep_addresses_contents_and_graphs(arena) -> None:  # type: ignore[no-untyped-def]
    arena.resize(5000)
    layer = arena.layers()[1]
    address = layer.values.data_ptr()
    layer.values[1234] = 3.0
    out = torch.zeros((), dtype=torch.float32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(layer.values[1234].float().sum())
    for pages in (100_000, 2000, 60_000):
        arena.resize(pages)
        assert arena.pages == pages
        assert arena.layers()[1].values.data_ptr() == address
        graph.replay()
        torch.cuda.synchronize()
        assert float(out) == 3.0 * layer.values[1234].numel()
    assert float(arena.layers()[2].keys[2500:].abs().amax()) == 0  # new pages come zeroed


def test_shrinking_gives_memory_back(arena) -> None:  # type: ignore[no-untyped-def]
    free = torch.cuda.mem_get_info()[0]
    arena.resize(300_000)
    taken = free - torch.cuda.mem_get_info()[0]
    assert 0 <= taken - arena.nbytes < 64 << 20
    arena.resize(10)
    assert free - torch.cuda.mem_get_info()[0] < 64 << 20


def test_too_much_is_an_error_value_and_the_context_lives(arena) -> None:  # type: ignore[no-untyped-def]
    total = torch.cuda.mem_get_info()[1]
    pages = total // arena._page_bytes + 100
    with pytest.raises(DeviceOutOfMemory):
        arena.resize(pages)
    arena.resize(10)
    assert float(torch.ones(8, device="cuda").sum()) == 8.0

"""The arena on CUDA virtual memory: addresses stay, contents stay, captured graphs stay valid."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvline_server.errors import DeviceOutOfMemory
from kvline_server.memory.arena import Scales
from kvline_server.model.config import ModelConfig
from kvline_server.model.decoder import cache_groups

pytestmark = pytest.mark.gpu


@pytest.fixture
def arena(shape: Callable[..., ModelConfig]):  # type: ignore[no-untyped-def]
    from kvline_server.memory.cuda import CudaArena

    return CudaArena(cache_groups(shape(), 64, torch.bfloat16)[0].shape, 1 << 22)


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


def test_a_page_of_an_fp8_cache_takes_half_and_overlaps_no_other(
    shape: Callable[..., ModelConfig],
) -> None:
    from kvline_server.memory.cuda import CudaArena

    scales = tuple(Scales(1.0 + layer, 0.5) for layer in range(3))
    halves = [
        CudaArena(cache_groups(shape(), 64, dtype, scales)[0].shape, 5000)
        for dtype in (torch.float8_e4m3fn, torch.bfloat16)
    ]
    assert 2 * halves[0]._page_bytes == halves[1]._page_bytes
    arena = halves[0]
    arena.resize(5000)
    parts = [part for layer in arena.layers() for part in (layer.keys, layer.values)]
    for number, part in enumerate(parts):
        assert part.dtype == torch.float8_e4m3fn and part.shape[0] == 5000
        part.view(torch.uint8).fill_(number + 1)
    for number, part in enumerate(parts):
        assert (part.view(torch.uint8) == number + 1).all()
    assert [layer.scales for layer in arena.layers()] == list(scales)


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

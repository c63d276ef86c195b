"""Patches and windows against those of transformers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from vision_models import BY, PATCH, picture, pixel_values, saved

from kvline_server.images.processor import Grid
from kvline_server.kernels.torch import TorchKernels
from kvline_server.model.vision import patches
from kvline_server.model.vision.patches import Colours, cut, grid, places, strips
from kvline_server.model.vision.qwen2_5 import windows

TOKEN = 2 * PATCH
COLOURS = Colours.of(BY, TorchKernels())
SIZES = [(4, 4), (3, 5), (1, 9), (7, 1), (1, 200)]  # in tokens


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("size", SIZES)
def test_patches_are_those_of_the_processor(
    family: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, and of strips of few rows."""
    image, config = picture(size[0] * TOKEN, size[1] * TOKEN), saved(family).config
    given = pixel_values(family, [image])
    want, own = given["pixel_values"], torch.from_numpy(image)
    assert given["image_grid_thw"].tolist() == [[1, size[0] * 2, size[1] * 2]]
    torch.testing.assert_close(cut(own, config, COLOURS, torch.float32), want, atol=1e-6, rtol=0)
    monkeypatch.setattr(patches, "ROWS", 2 * (4 * size[1]))
    parts = list(strips(own, config))
    assert len(parts) == -(-size[0] // 2)
    made = torch.cat([cut(part, config, COLOURS, torch.float32) for part in parts])
    assert torch.equal(made, cut(own, config, COLOURS, torch.float32))
    assert len(made) == grid(own, config).patches == grid(own, config).tokens * 4


def test_patches_of_an_image_of_one_size_are_the_processor_s_pixels() -> None:
    """In the order of the squares that are averaged."""
    config, image = saved("gemma3").config, picture(8 * PATCH, 8 * PATCH)
    values = pixel_values("gemma3", [image])["pixel_values"][0]  # [channels, height, width]
    made = cut(torch.from_numpy(image), config, COLOURS, torch.float32)
    found = places(grid(torch.from_numpy(image), config), made.device).tolist()
    assert found[:6] == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1]]
    for patch, (row, column) in zip(made, found, strict=True):
        at = (slice(each * PATCH, (each + 1) * PATCH) for each in (row, column))
        want = values[:, *at].flatten()
        torch.testing.assert_close(patch, want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [(4, 4), (6, 10), (2, 2), (2, 14), (10, 6)])
@pytest.mark.parametrize("side", [2, 3])
def test_windows_are_those_of_the_reference(size: tuple[int, int], side: int) -> None:
    from transformers.vision_utils import get_vision_window_index

    want, starts = get_vision_window_index(torch.tensor([[1, *size]]), 2, side * TOKEN, PATCH)
    order, lengths = windows(Grid(*size, merge=2), side)
    assert order.tolist() == want.tolist()
    assert [4 * each for each in lengths] == [b - a for a, b in pairwise(starts.tolist())]

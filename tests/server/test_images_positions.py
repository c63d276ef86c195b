"""Where pictures are in a prompt, and positions as transformers' models have them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from kvline_server.images.bounds import ImageRefused
from kvline_server.images.positions import Placed, expand, mrope
from kvline_server.images.processor import Grid

IMAGE, TEXT = 900, 7
MODELS = [Qwen3VLModel, Qwen2_5_VLModel, Qwen3_5Model]
TALL, WIDE, ONE = Grid(8, 4, 2), Grid(4, 12, 2), Grid(2, 2, 2)
# Numbers of text tokens, and pictures.
PROMPTS: dict[str, list[int | Grid]] = {
    "no picture": [9],
    "in the middle": [3, WIDE, 5],
    "at the very start": [TALL, 4],
    "at the very end": [4, WIDE],
    "alone": [TALL],
    "several": [2, TALL, 1, WIDE, 6, ONE, 1, TALL, 3],
    "two identical": [1, WIDE, 1, WIDE, 1],
    "large": [100, Grid(128, 128, 2), 50, Grid(2, 400, 2), 7],
}


def templated(parts: list[int | Grid]) -> tuple[list[int], list[Grid]]:
    grids = [part for part in parts if isinstance(part, Grid)]
    tokens = [
        token
        for part in parts
        for token in ([IMAGE] if isinstance(part, Grid) else range(TEXT, TEXT + part))
    ]
    return tokens, grids


def theirs(model: Any, tokens: Any, grids: list[Grid]) -> tuple[Any, int]:
    """Positions and delta of a model's own method, which reads only its configuration."""
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    self = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    self.get_vision_position_ids = lambda *args, **more: model.get_vision_position_ids(
        self, *args, **more
    )
    ids = torch.tensor(np.asarray(tokens, np.int64))[None]
    thw = torch.tensor([[1, grid.rows, grid.columns] for grid in grids]) if grids else None
    found, delta = model.get_rope_index(self, ids, (ids == IMAGE).int(), thw)
    return found[:, 0].numpy(), int(delta)


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: str(model.__name__))
def test_positions_are_transformers(name: str, model: Any) -> None:
    before, grids = templated(PROMPTS[name])
    tokens, placed = expand(before, IMAGE, grids)
    positions, delta = mrope(len(tokens), placed)
    expected, expected_delta = theirs(model, tokens, grids)
    assert positions.shape == (3, len(tokens))
    assert np.array_equal(positions, expected) and delta == expected_delta


def test_a_decode_goes_on_behind_the_last_position() -> None:
    """Positions run behind tokens' numbers: 3 of text, 2 x 3 of a picture, which are 3, then 1."""
    tokens, placed = expand([1, 2, 3, IMAGE, 4], IMAGE, [Grid(4, 6, 2)])
    positions, delta = mrope(len(tokens), placed)
    assert positions[:, 3:9].tolist() == [[3] * 6, [3, 3, 3, 4, 4, 4], [3, 4, 5, 3, 4, 5]]
    assert positions[:, 9].tolist() == [6, 6, 6] and delta == -3
    assert len(tokens) + delta == 7


@pytest.mark.parametrize("name", PROMPTS)
def test_placeholders_are_as_many_as_tokens(name: str) -> None:
    before, grids = templated(PROMPTS[name])
    tokens, placed = expand(before, IMAGE, grids)
    expected: list[int] = []
    spans: list[Placed] = []
    images = iter(grids)
    for token in before:
        if token != IMAGE:
            expected.append(token)
            continue
        grid = next(images)
        spans.append(Placed(len(expected), grid.rows // 2, grid.columns // 2))
        expected += [IMAGE] * grid.tokens
    assert tokens.tolist() == expected and list(placed) == spans
    assert all((tokens[span.start : span.end] == IMAGE).all() for span in placed)


@pytest.mark.parametrize(
    ("tokens", "grids", "named"),
    [
        ([1, IMAGE, 2], [], "each of its 0 images, got 1"),
        ([IMAGE, IMAGE], [ONE], "each of its 1 images, got 2"),
        ([1, IMAGE], [ONE, ONE], "each of its 2 images, got 1"),
    ],
)
def test_an_image_token_without_an_image_is_refused(
    tokens: list[int], grids: list[Grid], named: str
) -> None:
    with pytest.raises(ImageRefused) as refused:
        expand(tokens, IMAGE, grids)
    assert named in str(refused.value) and f"(id {IMAGE}) out of texts" in str(refused.value)


@pytest.mark.parametrize("tokens", [[], [1, 2]])
def test_a_template_that_writes_no_image_is_named(tokens: list[int]) -> None:
    """No text of the client is why."""
    with pytest.raises(ImageRefused, match="the model's chat template writes no images") as refused:
        expand(tokens, IMAGE, [ONE])
    assert "out of texts" not in str(refused.value)

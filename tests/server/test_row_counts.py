"""Steps are padded to a few row counts; on the CPU all run once before the budget is measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn import Drawn
from engines import decoder, engine, finish, greedy, mapped, worker
from servers import Server, serving
from ties import mostly_same, same_tokens

from kvline_server.engine.scheduler import WAVE
from kvline_server.kernels.attention import SlotMapping
from kvline_server.kernels.experts import Given
from kvline_server.kernels.layout import GroupLayout, Layout
from kvline_server.kernels.projection import Operand, Projection
from kvline_server.kernels.row_counts import TRIED, captured, compiled, padded, tried
from kvline_server.memory.pages import PAGE_SIZE

MIB = 1 << 20


def test_a_step_is_padded_to_the_next_row_count_and_by_little() -> None:
    assert [padded(n, dense=True) for n in (0, 1, 2, 3, 17, 33, 65, 129, 512, 513)] == [
        *(0, 2, 2, 4, 20, 40, 80, 160, 512, 576)
    ]
    for rows in range(1, 9000):
        count = padded(rows, dense=True)
        assert rows <= count == padded(count, dense=True)
        assert rows < 8 or count < rows * 5 / 4
        assert rows < 256 or count <= rows * 9 / 8
    assert len(compiled(512)) == 32
    assert len(compiled(8192)) == 64


def test_graphs_have_fewer_row_counts_for_few_rows_and_the_same_for_more() -> None:
    counts = captured(8192)
    assert counts[:8] == [1, 2, 4, 8, 16, 24, 32, 48] and len(counts) == 55
    assert {*counts} - {1} < {*compiled(8192)}
    assert [n for n in counts if n > 128] == [n for n in compiled(8192) if n > 128]
    assert all(padded(rows) == rows for rows in range(WAVE, 8193, WAVE)), "no pads"


@pytest.mark.parametrize("most", [1, 3, 100, 300, 8192, 10_000])
def test_every_step_has_a_graph_of_which_half_is_no_padding(most: int) -> None:
    counts = captured(most)
    assert counts[-1] == most
    for rows in range(1, most + 1):
        count = min(padded(rows), most)
        assert count in counts and rows <= count < 2 * rows


@pytest.mark.parametrize("most", [1, 300, 2048, 8192, 10_000])
def test_trials_cover_the_prompt_ceiling_and_stay_below_it(most: int) -> None:
    rows = tried(most)
    assert rows[-1] == most and rows[0] == 1 and rows == sorted(set(rows))
    assert {*rows} <= {*captured(most)} and len(rows) == len({n for n in TRIED if n < most}) + 1


def test_padding_changes_no_output(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GEMM's result may depend on its row count in the last bits; output tokens must not but at a
    tie, and padding rows must not reach real ones through the dummy page."""
    sides = []
    asked = [greedy(6, logprobs=2, seed=id) for id in range(6)]
    for as_served in (True, False):
        made = engine(make_model("qwen2"))
        drawn = Drawn(made)
        if not as_served:
            monkeypatch.setattr(worker(made).kernels.gemms, "padded", lambda rows: rows)
        for id, length in enumerate((1, 17, 33, 61, 100, 131)):
            made.submit(id, [(7 * id + i) % 300 for i in range(length)], asked[id])
        sides.append(finish(made))
    (with_pads, without) = sides
    compared = []
    for id, outputs in without.items():
        got, want = (
            [token for o in side for token in o.tokens] for side in (with_pads[id], outputs)
        )
        same = same_tokens(got, want, asked[id], drawn.logits(asked[id], 6))
        compared.append(same)
        for one, other in zip(with_pads[id][:same], outputs[:same], strict=True):
            assert one.scores is not None and other.scores is not None
            assert abs(one.scores.values - other.scores.values).max() < 1e-4
    mostly_same(compared, 6 * 6, least=0.5)


def test_steps_run_only_at_row_counts_of_the_warm_up(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the last layer's GEMMs, which run for the LM head's rows alone."""
    made = engine(make_model("qwen2"), step=128)
    shapes: set[tuple[int, int, int]] = set()
    linear = worker(made).kernels.gemms.linear

    def noted(x: Operand, projection: Projection, *more: Any) -> torch.Tensor:
        shapes.add((len(x), *projection.weight.shape))
        return linear(x, projection, *more)

    monkeypatch.setattr(worker(made).kernels.gemms, "linear", noted)
    assert worker(made).warm_up(128) == len(compiled(128))
    met = {*shapes, (16, 307, 48)}  # the LM head's blocks have one row count
    for id, length in enumerate(range(1, 300, 7)):
        more = {"prompt_logprobs": 1} if id % 3 == 0 else {}
        made.submit(id, [(id + i) % 300 for i in range(length)], greedy(3, **more))
    finish(made)
    assert shapes <= met


@pytest.mark.parametrize("on_device", [False, True])
def test_no_expert_of_any_layer_gets_padding(
    on_device: bool, make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured graphs are replayed with another number of rows that are none each time, so it is a
    number on the device there."""
    made, rows, count = decoder(make_model("qwen3-moe"), 64), 5, 8
    arena = mapped(made, 64, 2)
    ids = torch.arange(count)
    where = SlotMapping(ids, torch.where(ids < rows, PAGE_SIZE + ids, 0))
    lengths = np.array([rows], np.int32)
    starts = np.array([0, rows], np.int32)
    layout = Layout(
        positions=np.arange(rows, dtype=np.int32),
        row_starts=starts,
        decodes=0,
        groups=(
            GroupLayout(
                lengths=lengths,
                page_starts=np.array([0, 1], np.int32),
                pages=np.array([1], np.int32),
                slots=PAGE_SIZE + np.arange(rows),
                cleared=np.zeros(0, np.int64),
            ),
        ),
    )
    asked: list[int] = []
    run: Callable[..., torch.Tensor] = made.kernels.experts.run

    def counted(*words: Any) -> torch.Tensor:
        *others, given = words
        assert (given.on_device is not None) == on_device
        count = given.rows if given.on_device is None else int(given.on_device[0])
        asked.append(count)
        return run(*others, Given(count))

    monkeypatch.setattr(made.kernels.experts, "run", counted)
    plans, kv = made.plan(layout), arena.layers()
    numbers = torch.tensor([rows, 0], dtype=torch.int32)
    given = Given(count, on_device=numbers) if on_device else Given(rows)
    logits_indices = ids if on_device else ids[:rows]
    got = made.forward(ids, [where], kv, plans, logits_indices, given)
    assert asked == [rows] * made.config.layers
    monkeypatch.undo()
    where = SlotMapping(where.positions[:rows], where.slots[:rows])
    want = made.forward(ids[:rows], [where], kv, plans, ids[:rows])
    torch.testing.assert_close(got[:rows], want)


def test_a_device_without_compiled_row_counts_runs_as_it_is_asked(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = decoder(make_model("llama"))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert made.kernels.gemms.padded(17) == 17
    assert made.kernels.gemms.row_counts(512) == []


def test_the_workspace_of_the_gather_is_whole_from_the_first_step_on(
    make_model: Callable[..., Path],
) -> None:
    """Else it would grow after the budget was measured, or be mapped anew for each layer."""
    made = engine(make_model("llama"))
    seen = set()
    for id, length in enumerate((3, 40, 200)):
        made.submit(id, [id + 1] * length, greedy(4))
        finish(made)
        gathered = worker(made).kernels.attention.gathered  # type: ignore[attr-defined]
        seen.add((gathered.data_ptr(), gathered.numel()))
    assert len(seen) == 1


@pytest.mark.process
def test_prompts_of_ever_different_lengths_take_no_memory(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Each new length took 2.4 MiB for good, until the container was killed."""
    with serving(Server(make_model("wide"), tmp_path)) as server:
        for length in (1, 240):
            server.complete(prompt=[7] * length, max_tokens=2)
        before = server.resident()
        for length in range(3, 240, 5):
            server.complete(prompt=[length % 300] * length, max_tokens=2)
        after = server.resident()
    for name, mib in after.items():
        assert mib - before[name] < 12, (name, before, after)

"""What the benchmarks of a GPU do besides measuring: shapes, names of results, comparisons."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvline_contract import memory
from kvline_contract.launch import KVCacheDtype
from kvline_contract.report import Result, Source
from kvline_server.kernels import cuda_experts
from kvline_server.kernels.cuda_experts import TORCH, ExpertGemms, candidates
from kvline_server.kernels.experts import Layer, Routing
from kvline_server.model.config import read_config
from kvline_server.model.decoder import state_shapes
from kvline_server.model.loader import RandomSource, checked

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

import experts
import left
import offline
import reads
import shapes

AUTO, FP8 = KVCacheDtype


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Results by name, with their values."""
    made: dict[str, float] = {}

    def record(name: str, value: float, *_: Any, **__: Any) -> None:
        made[name] = value

    for module in (experts, offline):
        monkeypatch.setattr(module, "record", record)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    return made


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_a_shape_s_configuration_is_read_as_that_shape(name: str, tmp_path: Path) -> None:
    assert read_config(shapes.write_config(name, tmp_path)) == shapes.SHAPES[name]


def test_an_fp8_model_and_an_fp8_cache_are_compared_with_what_ran_beside_them(
    recorded: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "CACHES", [AUTO, FP8])
    rows = offline.compared(
        {
            ("llama8b", AUTO): {"kv-tokens": [1000.0], "r512": [90.0, 100.0], "nano": [50.0]},
            ("llama8b", FP8): {"kv-tokens": [1990.0], "nano": [60.0, 55.0], "long": [70.0]},
            ("llama8b-fp8", AUTO): {"r512": [150.0, 140.0]},
            ("qwen06b", FP8): {"nano": [33.0]},
        }
    )
    assert recorded == {
        "r512-fp8-ratio-llama8b": 1.5,
        "kv-tokens-fp8kv-ratio-llama8b": 1.99,
        "nano-fp8kv-ratio-llama8b": 1.2,
    }
    assert ["llama8b-fp8kv", "nano / llama8b's", "1.200", "1.100", ""] in rows
    assert offline.label("qwen30b", AUTO) == "qwen30b"
    assert offline.label("llama8b-fp8", FP8) == "llama8b-fp8-fp8kv"


def test_a_model_is_compared_with_one_of_another_kind_by_its_throughput(
    recorded: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "CACHES", [AUTO])
    figures = {"kv-tokens": [1000.0], "r512": [90.0, 100.0]}
    offline.compared(
        {
            ("llama8b", AUTO): figures,
            ("qwen35-9b", AUTO): {"kv-tokens": [500.0], "r512": [80.0, 75.0], "nano": [1.0]},
            ("qwen35-35b", AUTO): {"r512": [70.0]},
        }
    )
    assert recorded == {"r512-of-llama8b-qwen35-9b": 0.8}


def test_a_benchmark_that_compares_no_caches_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert offline.only_cache() is AUTO
    monkeypatch.setattr(offline, "CACHES", [AUTO, FP8])
    with pytest.raises(SystemExit, match=r"KVLINE_BENCH_KV_CACHE names several: .* offline"):
        offline.only_cache()


def test_what_requests_need_of_the_experts_takes_its_time_to_read() -> None:
    """All of them: 48 layers of 128 experts with three matrices of 768 x 2048, two bytes each."""
    shape = shapes.SHAPES["qwen30b"]
    assert shape.experts is not None
    every = 48 * 128 * 3 * 768 * 2048 * 2 / 4.2e12 * 1e3
    assert reads.experts_ms(shape, shape.experts, 256) == pytest.approx(every)
    assert reads.experts_ms(shape, shape.experts, 1) == pytest.approx(every * 8 / 128)
    for name, size in (("gptoss20b", 17 / 32), ("gptoss20b-bf16", 2)):  # bytes of a number
        model, many = shapes.SHAPES[name], shapes.SHAPES[name].experts
        assert many is not None
        want = 1e3 * 24 * 4 * 3 * 2880 * 2880 * size / reads.BANDWIDTH
        assert reads.experts_ms(model, many, 1) == pytest.approx(want)


def test_the_floor_of_a_decode_has_projections_the_head_and_windows() -> None:
    model = shapes.SHAPES["gptoss20b"]
    assert model.experts is not None
    projections = 24 * 2880 * 64 * (64 + 64 + 8 + 8)
    keys_and_values = 12 * (448 + 128) * 2 * 8 * 64
    others = 2 * (projections + 201_088 * 2880 + 64 * keys_and_values) / reads.BANDWIDTH
    want = reads.experts_ms(model, model.experts, 64) + 1e3 * others
    assert reads.decode_ms(model, model.experts, 64, 448) == pytest.approx(want)


def test_kv_tokens_are_compared_with_what_weights_windows_and_graphs_leave() -> None:
    """All other parts count as lost, headroom too; of the rank that has least."""
    sizes = {memory.WEIGHTS: 100, memory.SCALES: 10, memory.EXPERTS: 200, memory.WINDOWS: 40}
    sizes |= {memory.GRAPHS: 50, memory.KV_CACHE: 570, memory.HEADROOM: 20, memory.OTHERS: 10}
    parts = tuple(memory.Part(name, mib) for name, mib in sizes.items())
    spare = tuple(replace(p, mib=p.mib + 5) if p.name == memory.HEADROOM else p for p in parts)
    ranks = memory.Memory(1005, spare), memory.Memory(1000, parts)
    source, when = Source.MEASURED, "2026-11-28T00:00:00Z"
    result = Result(570 * 64, (1 << 20) // 64, source, "", 0, 1, 0, when, ranks)
    assert left.tokens_left(result) == 600 * 64
    assert left.share(result) == 0.95
    assert left.line("m", result) == (
        "m: 36480 KV tokens, 0.9500 of the 38400 that 1000 MiB less weights 100, scales 10, "
        "experts 200, windows 40, graphs 50 leave at 16384 bytes each"
    )


def test_without_a_gpu_its_kernels_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"bench experts: .* CUDA finds none"):
        experts.run()


def test_every_choice_is_measured_whole_and_by_its_gemms(
    recorded: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole it takes longer by routing and sum; bytes are those of the experts that are chosen."""
    launched: list[str] = []
    monkeypatch.setattr(cuda_experts, "launch", lambda variant, *_: launched.append(variant.kernel))
    monkeypatch.setattr(cuda_experts, "grouped_mm", lambda x, weight, offs: x @ weight[0])

    def replay_time(work: Callable[[int], None], count: int, best_yet: float) -> float:
        assert count == 2
        launched.clear()
        work(1)
        return 5.0 * len(launched) if launched else 7.0

    def halves(both: torch.Tensor, activation: str) -> torch.Tensor:
        return both.chunk(2, dim=1)[0]

    layer = Layer(torch.zeros((128 * 2 * 16, 32)), torch.zeros((128 * 32, 16)))
    gemms, routing = ExpertGemms({}, halves), Routing(8, True, "silu")
    met = {}
    for kind, made in experts.ROUTINGS.items():
        logits = made(256, 128, 8).to(torch.bfloat16).float()
        timings = experts.measured(gemms, [layer] * 2, routing, logits, replay_time)
        named = [gemms.named(choice) for choice in (TORCH, *candidates(2048, 128))]
        assert [one.choice for one in timings] == named
        for one in timings[1:]:
            # route, sort, grouped, grouped, add_chosen; of which two are GEMMs
            assert (one.whole, one.both) == (25.0, 10.0)
        assert (timings[0].whole, timings[0].both) == (15.0, 7.0)
        met[kind] = timings[0].read // (3 * 16 * 32 * 4)
    assert met == {"random": 128, "even": 128, "most unequal": 8}
    experts.keep("qwen30b", 256, timings, "a GPU")
    assert recorded == {"grouped-us-256": 7.0, "grouped-us-torch-256": 7.0}
    (first, *_), last = experts.shown(timings), experts.shown(timings)[-1]
    assert first == ["torch", "15.0", "1.000", "7.0", "7", "0.00", "best"]
    assert last[:3] == ["32x128x64", "25.0", "1.667"] and not last[-1]


def test_what_a_hybrid_s_step_reads_is_its_weights_and_states() -> None:
    """Of one request without a context all weights but the embedding's, of experts those that a
    token has."""
    for name in ("qwen35-9b", "qwen35-35b", "nemotron-h-8b"):
        model = shapes.SHAPES[name]
        counted = checked(RandomSource(), model).counts.total()
        counted -= model.vocabulary * model.hidden
        states = sum(one.nbytes(torch.bfloat16, torch.float32) for one in state_shapes(model))
        if (many := model.experts) is not None:
            unread = (many.count - many.chosen) * 3 * model.hidden * model.intermediate
            counted -= model.layers * unread
        read = reads.hybrid_ms(model, 1, 0) * reads.BANDWIDTH / 1e3
        assert read == pytest.approx(2 * counted + 2 * states, rel=1e-3)
        assert reads.hybrid_ms(model, 2, 0) > reads.hybrid_ms(model, 1, 0)

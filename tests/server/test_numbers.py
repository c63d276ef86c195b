"""Extreme numbers: no accepted request ends the engine, and no output is outside the vocabulary,
even where a model computes NaN or infinity."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import httpx
import numpy as np
import pytest
import torch
from drawn import Drawn
from engines import engine, finish, greedy, worker
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic.fields import FieldInfo
from servers import STRESS, Server
from ties import mostly_same, same_tokens
from waiting import limit

from kvline_server.engine.engine import Engine
from kvline_server.http.errors import BadRequest
from kvline_server.http.generate import RequestLimits, check_prompt, sampling
from kvline_server.http.protocol.completions import CompletionRequest
from kvline_server.http.protocol.strict import parse
from kvline_server.ipc.sampling_params import SamplingParams

VOCABULARY = 307
LIMITS = RequestLimits("tiny", VOCABULARY, 512, 20, 1 << 20)


def bounds(field: FieldInfo) -> dict[str, float]:
    """ge, gt and le of a numeric field, from any part of its annotation."""
    parts = [*field.metadata, *(m for arm in get_args(field.annotation) for m in _metadata(arm))]
    return {n: getattr(p, n) for p in parts for n in ("ge", "gt", "le") if hasattr(p, n)}


def _metadata(arm: Any) -> list[Any]:
    found = list(getattr(arm, "__metadata__", ()))
    return [m for item in found for m in (getattr(item, "metadata", None) or [item])]


def numbers() -> dict[str, tuple[list[float], list[float]]]:
    """Each numeric field of a completion: values at and next to its bounds, and beyond them."""
    out: dict[str, tuple[list[float], list[float]]] = {}
    for name, field in CompletionRequest.model_fields.items():
        found = bounds(field)
        if "le" not in found:
            continue
        real = "float" in str(field.annotation)
        low, high = found.get("ge", found.get("gt", 0)), found["le"]
        if real:
            least = low if "ge" in found else 5e-324
            inside = [least, math.nextafter(least, high), math.nextafter(high, low), high]
            inside += [v for v in (0.0, 1e-300, 1e-38, 1e-7, 1e-5, 1.0) if least <= v <= high]
            beyond = [math.nextafter(least, -math.inf), math.nextafter(high, math.inf), 1e308]
        else:
            inside, beyond = [low, low + 1, high - 1, high], [low - 1, high + 1, 2**70]
        out[name] = inside, beyond
    return out


NUMBERS = numbers()


def test_every_number_has_two_bounds_and_is_covered_here() -> None:
    numeric = {
        name
        for name, field in CompletionRequest.model_fields.items()
        if re.search(r"\b(int|float)\b", str(field.annotation))
        and "dict" not in str(field.annotation)
    }
    assert numeric - {"prompt"} <= set(NUMBERS)
    assert {"temperature", "repetition_penalty", "seed", "top_p", "max_tokens"} <= set(NUMBERS)


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_a_number_beyond_its_bounds_is_refused_with_field_and_range(name: str) -> None:
    for value in NUMBERS[name][1]:
        with pytest.raises(BadRequest) as caught:
            parse(CompletionRequest, {"model": "tiny", "prompt": [1], name: value})
        assert caught.value.param == name
        assert caught.value.message.startswith(f"{name}: must be ")
        assert " to " in caught.value.message


def test_a_penalty_that_would_overflow_is_refused() -> None:
    """1e-38 made every repeated token's logit infinite, and ended the engine."""
    with pytest.raises(BadRequest, match=r"repetition_penalty: must be from 0.01 to 2"):
        parse(CompletionRequest, {"model": "m", "prompt": [1], "repetition_penalty": 1e-38})


bodies = st.fixed_dictionaries(
    {"prompt": st.lists(st.sampled_from([0, 1, 7, 256, 306]), min_size=1, max_size=40)},
    optional={
        name: st.sampled_from(inside)
        for name, (inside, _) in NUMBERS.items()
        if name not in ("max_tokens", "min_tokens", "best_of")  # these are bound to other fields
    }
    | {
        "max_tokens": st.integers(1, 12),
        "logit_bias": st.dictionaries(
            st.integers(0, 306).map(str),
            st.sampled_from([-100.0, 100.0, 5e-324, 0.0]),
            max_size=307,
        ),
    },
)


@pytest.fixture(scope="module")
def served(make_model: Callable[..., Path]) -> Engine:
    return engine(make_model("llama"), pages=400, running=8)


@settings(max_examples=60)
@given(asked=st.lists(bodies, min_size=1, max_size=6))
def test_no_accepted_body_ends_the_engine(served: Engine, asked: list[dict[str, Any]]) -> None:
    """Requests with numbers at their bounds, batched on one engine: each is rejected by validation
    or ends with tokens of the vocabulary."""
    before = 0
    for body in asked:
        try:
            request = parse(CompletionRequest, {"model": "tiny", **body})
            ids = request.prompt[0]
            check_prompt(ids, LIMITS, "prompt")
            params = sampling(
                request,
                LIMITS,
                len(ids),
                request.max_tokens or 4,
                request.logprobs,
                request.prompt_logprobs,
            )
        except BadRequest:
            continue
        served.submit(before, list(ids), params)
        before += 1
    outputs = finish(served)
    assert set(outputs) == set(range(before))
    for items in outputs.values():
        assert items[-1].finish in ("stop", "length")
        assert all(0 <= token < VOCABULARY for item in items for token in item.tokens)


BAD = [float("nan"), float("inf"), float("-inf")]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "scored": {"temperature": 1.0, "logprobs": 3},
    "penalised": {"temperature": 1.0, "repetition_penalty": 0.01, "logit_bias": {3: 100.0}},
}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_row_that_is_not_finite_fails_its_request_alone(
    make_model: Callable[..., Path], kind: str, value: float, depth: int
) -> None:
    """The third step's logits of one sequence of three: that one ends with an error after
    its two tokens, and the others' outputs do not change."""
    asked = [
        SamplingParams(max_tokens=8, ignore_eos=True, **KINDS[kind] | {"seed": 5 + id})
        for id in range(3)
    ]
    generated: list[dict[int, list[int]]] = []
    drawn = []
    for breaks in (False, True):
        made = engine(make_model("llama"))
        drawn.append(Drawn(made))
        worker(made).kernels.depth = depth
        for id in range(3):
            made.submit(id, [9 * id + 1, 4, 200 + id], asked[id])
        compute, step = worker(made).decoder.compute_logits, 0

        def broken(
            hidden: torch.Tensor, compute: Any = compute, breaks: bool = breaks
        ) -> torch.Tensor:
            nonlocal step
            logits: torch.Tensor = compute(hidden)
            step += 1
            if breaks and step == 3:
                logits[1, slice(None) if value == float("-inf") else 40] = value
            return logits

        worker(made).decoder.compute_logits = broken  # type: ignore[method-assign]
        outputs = finish(made)
        generated.append(
            {id: [token for o in items for token in o.tokens] for id, items in outputs.items()}
        )
        if breaks:
            assert [items[-1].finish for _, items in sorted(outputs.items())] == [
                "length",
                "error",
                "length",
            ]
            assert made.caches.used == 0
    same = []
    for id in (0, 2):  # in a smaller batch from then on
        logits = drawn[0].logits(asked[id], 8)
        same.append(same_tokens(generated[1][id], generated[0][id], asked[id], logits))
    mostly_same(same, 2 * 8, least=0.5)
    assert generated[1][1] == generated[0][1][:2]


def test_prompt_logprobs_that_are_not_numbers_fail_their_request(
    make_model: Callable[..., Path],
) -> None:
    made = engine(make_model("llama"), step=8)
    compute = worker(made).decoder.compute_logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = compute(hidden)
        if len(hidden) > 3:
            logits[2] = float("nan")
        return logits

    worker(made).decoder.compute_logits = broken  # type: ignore[method-assign]
    made.submit(0, list(range(20)), greedy(4, prompt_logprobs=2))
    made.submit(1, list(range(50, 58)), greedy(4))
    outputs = finish(made)
    assert [outputs[id][-1].finish for id in (0, 1)] == ["error", "length"]
    assert outputs[0][-1].prompt_scores is None


def test_the_engine_survives_a_request_that_failed(start: Callable[..., Server]) -> None:
    server = start(faults={"KVLINE_FAULT_STEP": f"{STRESS + 1}:nan"})
    server.wait()
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}
    failed = httpx.post(f"{server.url}/v1/completions", json=body, timeout=limit(10))
    assert failed.status_code == 500
    assert failed.json()["error"]["code"] == "not_finite"
    assert (
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=limit(10)).status_code == 200
    )
    assert server.probe("/readyz")[0] == 200
    assert not np.isnan(server.probe("/load")[1]["usedTokens"])

"""A start of a model with recurrent layers: slots are reserved from what is asked, beside the
weights and before the KV cache, or refused with the number that fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_models import build, save
from servers import launch_config
from waiting import limit

from kvline_contract.launch import Device, EngineOptions, Method, Speculation, StateDtype
from kvline_contract.memory import SNAPSHOTS, STATES
from kvline_contract.report import Direction
from kvline_server.engine_process.start import LoadedRank, load_rank
from kvline_server.errors import ConfigInvalid, ModelUnsupported, OutOfMemory
from kvline_server.ipc.messages import Progress
from kvline_server.memory.state_shape import States
from kvline_server.model.config import read_config
from kvline_server.sizing.offers import RUNNING_FIELD, SNAPSHOTS_FIELD
from kvline_server.sizing.settings import EngineSettings, least_rows, resolve
from kvline_server.sizing.slots import Slots, fitting, refused

LARGE = 8192 << 20  # has room beside what other tests left in the process
SMALL_STATES = EngineOptions(state_dtype=StateDtype.BFLOAT16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3.5"), tmp_path_factory.mktemp("hybrid"))


def loaded(folder: Path, memory: int = LARGE, **engine: Any) -> LoadedRank:
    launch = launch_config(folder, EngineOptions(**engine))
    return load_rank(launch, lambda _: None, memory, os.getpid(), wait_for_neighbours=lambda: None)


def test_slots_are_what_is_asked_whatever_is_free(folder: Path) -> None:
    made = loaded(folder, max_running_requests=5, prefix_snapshots=3)
    slots = made.loaded.slots
    assert (slots.running, slots.snapshots) == (5, 3)
    # Of three layers: 3 inputs of 2 * 32 + 48 channels, and 6 heads of 16 by 8, in float32.
    assert slots.nbytes == 3 * 4 * (3 * 112 + 6 * 16 * 8)
    parts = {part.name: part.fixed for part in made.loaded.owned}
    assert (parts[STATES], parts[SNAPSHOTS]) == (6 * slots.nbytes, 3 * slots.nbytes)
    worker = made.local.worker
    worker.arena.resize((4,))
    states = [each for each in worker.arena.layers() if hasattr(each, "matrices")]
    assert [len(each.matrices) for each in states] == [9] * 3
    assert made.settings.snapshots == 3 and made.settings.state_slots == 9
    none = loaded(folder, max_running_requests=2, prefix_snapshots=0).loaded
    assert (none.slots.running, none.slots.snapshots) == (2, 0)
    assert SNAPSHOTS not in {part.name for part in none.owned}
    assert none.fingerprint != made.loaded.fingerprint


def test_states_in_bfloat16_take_half_but_for_the_inputs_of_the_convolution(folder: Path) -> None:
    """Inputs keep the dtype of hidden states. A record of before there was a choice is one of
    float32."""
    inputs, matrices = 3 * 4 * 3 * 112, 3 * 6 * 16 * 8
    asked = {"max_running_requests": 5, "prefix_snapshots": 3}
    unset, wide, small = (
        loaded(folder, **asked, state_dtype=dtype) for dtype in (None, *StateDtype)
    )
    assert wide.loaded.slots == unset.loaded.slots
    assert wide.loaded.slots.nbytes == inputs + 4 * matrices
    assert small.loaded.slots.nbytes == inputs + 2 * matrices == wide.loaded.slots.in_bfloat16
    assert not small.loaded.slots.in_bfloat16, "there is no other choice"
    parts = {part.name: part for part in small.loaded.owned}
    assert parts[STATES].fixed == 6 * small.loaded.slots.nbytes
    assert str(parts[STATES].detail).endswith("a sequence, in bfloat16")
    small.local.worker.arena.resize((4,))
    states = [x for x in small.local.worker.arena.layers() if isinstance(x, States)]
    assert {(x.inputs.dtype, x.matrices.dtype) for x in states} == {(torch.float32, torch.bfloat16)}
    assert unset.loaded.fingerprint == wide.loaded.fingerprint != small.loaded.fingerprint


def test_states_of_mamba2_are_not_served_in_bfloat16(tmp_path: Path) -> None:
    nemotron = save(build("nemotron-h"), tmp_path)
    launch, model = launch_config(nemotron, SMALL_STATES), read_config(nemotron)
    with pytest.raises(
        ModelUnsupported, match=r"spec\.engine\.stateDtype .* Mamba2 .* set float32$"
    ):
        resolve(launch, model, LARGE)
    asked = {"max_running_requests": 2, "prefix_snapshots": 0}
    made = loaded(nemotron, **asked, state_dtype=StateDtype.FLOAT32).loaded
    assert made.slots.dtype is StateDtype.FLOAT32 and not made.slots.in_bfloat16


@pytest.mark.process
def test_a_comparison_shows_what_states_in_bfloat16_leave(tmp_path: Path) -> None:
    """A layer's states of 256 KiB a sequence: half of 69 of them is 8 MiB."""
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--model", str(tmp_path), "--load", "random", "--device", "cpu", "--memory", "900Mi"]
    words += ["--max-running-requests", "4", "--prefix-snapshots", "64", "--json"]
    words += ["--compare", "stateDtype=bfloat16"]
    command = [sys.executable, "-m", "kvline_server", "size", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit(100), check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    wide, small = (report["result"] for report in json.loads(done.stdout).values())
    matrices, inputs = 4 * 128 * 128, 4 * 3 * (2 * 2 + 4) * 128
    assert (wide["slotBytes"], wide["stateDtype"]) == (inputs + 4 * matrices, "float32")
    assert wide["bfloat16SlotBytes"] == small["slotBytes"] == inputs + 2 * matrices
    assert small["stateDtype"] == "bfloat16" and "bfloat16SlotBytes" not in small
    assert small["fingerprint"] != wide["fingerprint"]
    assert small["kvTokens"] > wide["kvTokens"]


def test_slots_that_do_not_fit_are_refused_with_the_numbers_that_do(folder: Path) -> None:
    """Half of the snapshots would, but for what else is reserved; no number of requests would."""
    made = loaded(folder, max_running_requests=2, prefix_snapshots=60_000)
    need, each = made.loaded.slots.reserved, made.loaded.slots.nbytes
    assert need > 600 << 20
    memory = made.backend.device.used() - need // 2
    del made
    with pytest.raises(OutOfMemory, match="recurrent states of 2 requests and 60000") as error:
        loaded(folder, memory, max_running_requests=2, prefix_snapshots=60_000)
    (knob,) = error.value.knobs
    assert (knob.spec_field, knob.direction) == (SNAPSHOTS_FIELD, Direction.LOWER)
    assert knob.value is not None and 4_000 < knob.value < need // each // 2
    assert f"lower {SNAPSHOTS_FIELD} to {knob.value} at most" in str(error.value)
    fewer = loaded(folder, memory + (64 << 20), max_running_requests=2, prefix_snapshots=knob.value)
    assert fewer.loaded.slots.snapshots == knob.value


def test_where_both_must_be_lowered_the_numbers_that_fit_together_are_offered(
    folder: Path,
) -> None:
    """Neither would be enough: requests have memory of their own beside their states."""
    both = {"max_running_requests": 2000, "prefix_snapshots": 60_000}
    made = loaded(folder, **both)
    fewer = made.settings.changed(max_running_requests=300, asked_snapshots=64)
    slots, room = made.loaded.slots, Slots.of(fewer, made.loaded.slots.nbytes).reserved
    memory = made.backend.device.used() - slots.reserved + room + fewer.reserved()
    del made
    with pytest.raises(OutOfMemory) as error:
        loaded(folder, memory, **both)
    running, kept = error.value.knobs
    assert (running.spec_field, kept.spec_field) == (RUNNING_FIELD, SNAPSHOTS_FIELD)
    assert running.with_next and not kept.with_next
    assert running.value is not None and 8 < running.value < 2000
    assert kept.value == min(2 * running.value, 64)
    text = f"lower {RUNNING_FIELD} to {running.value} and {SNAPSHOTS_FIELD} to {kept.value} at most"
    assert text in str(error.value)
    now, spare = (running.value, kept.value), memory + (64 << 20)
    for lowered in ((now[0], 60_000), (2000, now[1])):
        with pytest.raises(OutOfMemory):
            loaded(folder, spare, max_running_requests=lowered[0], prefix_snapshots=lowered[1])
    pair = loaded(folder, spare, max_running_requests=now[0], prefix_snapshots=now[1]).loaded
    assert (pair.slots.running, pair.slots.snapshots) == now


@pytest.mark.parametrize(
    ("slots", "snapshots", "offered"),
    [
        (1 + 68 + 64, 200, (68, 64)),
        (1 + 30 + 12, 4000, (14, 28)),
        (1 + 30 + 12, 50, (14, 28)),
        (3, None, (1, 1)),
        (2, 9, (1, 0)),
        (1, 9, None),
    ],
)
def test_a_pair_is_the_most_requests_with_as_many_snapshots_as_they_have_by_default(
    slots: int, snapshots: int | None, offered: tuple[int, int] | None
) -> None:
    """No more than were asked, and fewer where that is all that fits beside one request."""
    asked = EngineSettings(None, 8192, 256, 512, 20, 0, 64, None)
    settings = replace(asked, recurrent=True, asked_snapshots=snapshots)
    knobs = [
        knob for each in fitting(settings, 1000, 1000 * slots) for knob in (each.knob, each.also)
    ]
    assert tuple(knob.value for knob in knobs if knob) == (offered or ())


@pytest.mark.parametrize("snapshots", [None, 0, 40])
def test_the_number_that_is_offered_is_the_largest_that_fits(snapshots: int | None) -> None:
    asked = EngineSettings(None, 8192, 256, 512, 20, 0, 64, None)
    settings = replace(asked, recurrent=True, asked_snapshots=snapshots)
    nbytes, free = 3 << 20, 400 << 20
    offers = {each.knob.spec_field: each.knob.value for each in fitting(settings, nbytes, free)}
    running = offers[RUNNING_FIELD]
    assert running is not None

    def taken(count: int) -> int:
        return Slots.of(settings.changed(max_running_requests=count), nbytes).reserved

    assert taken(running) <= free < taken(running + 1)
    assert SNAPSHOTS_FIELD not in offers, "of 256 requests no number fits"
    assert fitting(settings, nbytes, nbytes) == (), "nor a request without its dummy"
    assert refused(settings, nbytes, free) == fitting(settings, nbytes, free)
    unknown = refused(settings, nbytes, 1 << 40)  # a device that refuses what it has
    assert [each.knob.value for each in unknown] == [None] * (2 if settings.snapshots else 1)


def test_a_step_has_room_for_a_chunk_beside_all_decodes(folder: Path) -> None:
    model = read_config(folder)
    launch = launch_config(folder, EngineOptions(max_running_requests=600))
    assert resolve(launch, model, LARGE).max_prefill_tokens == least_rows(600, True) == 663
    small = launch_config(folder, EngineOptions(max_running_requests=8, max_prefill_tokens=64))
    with pytest.raises(ConfigInvalid, match=r"maxPrefillTokens is 64, too few .* and 64 .*: 71$"):
        resolve(small, model, LARGE)


@pytest.mark.parametrize(
    ("running", "tokens", "drafting", "drafts"),
    [(4, 0, None, 0), (4, 7, 3, 21), (4, 7, 64, 28), (4, 7, None, 7), (16, 2, None, 16)],
)
def test_draft_tokens_of_some_requests_have_slots(
    running: int, tokens: int, drafting: int | None, drafts: int
) -> None:
    """Of no more than run, beside all others; a step has no more draft tokens."""
    asked = EngineSettings(None, 8192, running, 512, 20, 0, 64, None, recurrent=True)
    plain = Slots.of(asked, 1000)
    settings = replace(asked, draft_tokens=tokens, asked_drafting=drafting)
    made = Slots.of(settings, 1000)
    assert made.drafts == drafts and made.reserved == plain.reserved + 1000 * drafts
    assert made.reserved == 1000 * settings.state_slots
    assert sum(part.fixed for part in made.parts()) == made.reserved
    pool = made.pool()
    assert pool is not None and pool.drafts == drafts
    details = [str(part.detail) for part in made.parts() if part.name == STATES]
    assert [f"{drafts} more behind draft tokens" in each for each in details] == [drafts > 0]
    assert not replace(settings, recurrent=False).draft_states


def test_draft_tokens_have_states_on_a_cpu_and_are_refused_on_a_gpu(folder: Path) -> None:
    drafts = Speculation(Method.NGRAM, 2, 3)
    made = loaded(folder, max_running_requests=5, prefix_snapshots=4, speculation=drafts)
    assert made.loaded.slots.drafts == 6
    made.local.worker.arena.resize((4,))
    states = [each for each in made.local.worker.arena.layers() if isinstance(each, States)]
    assert [len(each.matrices) for each in states] == [1 + 5 + 4 + 6] * 3
    fewer = Speculation(Method.NGRAM, 2, 2)
    others = ({"speculation": fewer}, {"speculation": None})
    for more in others:
        other = loaded(folder, max_running_requests=5, prefix_snapshots=4, **more)
        assert made.loaded.fingerprint != other.loaded.fingerprint
    launch = launch_config(folder, EngineOptions(speculation=drafts))
    with pytest.raises(ModelUnsupported, match=r"spec\.engine\.speculation: on GPUs"):
        resolve(replace(launch, device=Device.CUDA), read_config(folder), LARGE)


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("prefixSnapshots", EngineOptions(prefix_snapshots=4)),
        ("stateDtype", SMALL_STATES),
        ("stateDtype", EngineOptions(state_dtype=StateDtype.FLOAT32)),
        (
            r"speculation\.maxSequences",
            EngineOptions(speculation=Speculation(Method.NGRAM, max_sequences=2)),
        ),
    ],
)
def test_what_is_of_states_is_refused_for_a_model_without_any(
    field: str, asked: EngineOptions, make_model: Callable[..., Path]
) -> None:
    llama = make_model("llama")
    with pytest.raises(ConfigInvalid, match=rf"spec\.engine\.{field}: the model has no recurrent"):
        resolve(launch_config(llama, asked), read_config(llama), LARGE)


def test_as_many_run_as_leave_half_to_the_kv_cache(folder: Path) -> None:
    heard: list[str | None] = []

    def send(progress: Progress) -> None:
        if progress.current is not None:
            heard.append(progress.current.name)

    launch = launch_config(folder)
    made = load_rank(
        launch, send, LARGE, os.getpid(), wait_for_neighbours=lambda: heard.append("waited")
    )
    assert "waited" in heard, "what HTTP takes is known before slots are counted"
    assert made.settings.max_running_requests == 16 == made.loaded.slots.running

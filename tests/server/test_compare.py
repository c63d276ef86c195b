"""kvline-server size --compare: each change alone beside the model as given, in one table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mxfp4_checkpoints import CONFIG, change
from rich.console import Console
from servers import FAULTS, launch_config
from test_size import size
from waiting import limit

from kvline_contract.codec import ContractError
from kvline_contract.launch import (
    CapacityOptions,
    Device,
    EngineOptions,
    Images,
    KVCacheDtype,
    LoadFormat,
)
from kvline_contract.memory import (
    ENCODER_CACHE,
    ENCODER_WORK,
    SNAPSHOTS,
    STATES,
    TOWER,
    Memory,
    Part,
)
from kvline_contract.report import SizingReport
from kvline_operator.plan.forecast import estimates
from kvline_operator.store.capacity_status import CapacityStatus
from kvline_server.command.compare import (
    AS_GIVEN,
    SETTINGS,
    Measured,
    check_memory,
    choices,
    table,
)
from kvline_server.command.size import summary

AS_GIVEN_CELL = AS_GIVEN.replace(" ", "-")
GOLDEN = Path(__file__).parents[1] / "contract" / "golden"
NOWHERE = Path("/nowhere")  # where a choice that needs files would write them
GIVEN = launch_config(Path("/model"), engine=EngineOptions(max_model_len=64))


def test_each_choice_changes_one_setting_of_the_launch() -> None:
    first, cache, gpus, headroom = choices(
        "kvCacheDtype=fp8,gpus=2, headroomMiB=300", GIVEN, NOWHERE
    )
    assert (first.name, first.launch) == (AS_GIVEN, GIVEN)
    assert cache.launch.engine == EngineOptions(64, kv_cache_dtype=KVCacheDtype.FP8)
    assert (gpus.name, gpus.launch.tensor_parallel, gpus.launch.engine) == (
        "gpus=2",
        2,
        GIVEN.engine,
    )
    assert headroom.launch.capacity.headroom_mib == 300
    assert cache.launch.capacity == gpus.launch.capacity == GIVEN.capacity


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "fp8",
            "expected FIELD=VALUE, of maxModelLen, .*, stateDtype, .*, gpus, .*; got 'fp8'",
        ),
        ("device=cuda", "got 'device=cuda'"),
        ("gpus=", "got 'gpus='"),
        ("", "got ''"),
        (",", "got ''"),
        ("kvCacheDtype=fp9", "^kvCacheDtype=fp9: expected one of auto, fp8, got 'fp9'"),
        ("images=Required", "got 'images=Required'"),
        ("modalities=image", r"^modalities=image: expected text or text\+image"),
        ("maxImagesPerRequest=65", "^maxImagesPerRequest=65: expected 1 to 64, got 65"),
        ("gpus=9", "^gpus=9: expected 1 to 8, got 9"),
        ("gpus=-1", "^gpus=-1: expected 1 to 8, got -1"),
        ("gpus=two", "^gpus=two: expected an integer"),
        ("memory=two", "^memory=two: expected a quantity such as 2Gi, got 'two'"),
        ("memory=", "got 'memory='"),
        ("maxModelLen=1", "^maxModelLen=1: expected 16 to"),
        ("gpus=2,gpus=2", "expected each choice once"),
        (",".join(f"gpus={n}" for n in range(9)), "at most 8 choices, got 9"),
    ],
)
def test_a_wrong_choice_is_named(text: str, why: str) -> None:
    with pytest.raises(ContractError, match=why):
        choices(text, GIVEN, NOWHERE)


def test_a_pinned_budget_leaves_nothing_to_compare() -> None:
    pinned = launch_config(Path("/model"), capacity=CapacityOptions(kv_tokens=2048))
    with pytest.raises(ContractError, match="pinned kvTokens is the budget of every choice"):
        choices("gpus=2", pinned, NOWHERE)


def test_memory_is_compared_on_a_cpu_up_to_the_container_s_limit() -> None:
    first, more = every = choices("memory=1.5Gi", GIVEN, NOWHERE)
    assert (first.memory, more.memory, more.launch) == (None, 1536 << 20, GIVEN)
    check_memory(every, None)
    check_memory(every, 1536 << 20)
    with pytest.raises(ContractError, match=r"^memory=1.5Gi: more than the 1024 MiB that this"):
        check_memory(every, 1 << 30)
    with pytest.raises(ContractError, match=r"^memory=1.5Gi: memory of the host holds no KV cache"):
        choices("memory=1.5Gi", replace(GIVEN, device=Device.CUDA), NOWHERE)


@pytest.mark.process
def test_experts_in_4_bits_are_compared_with_those_that_are_not(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Random ones, of the same config.json; the waterfall of each has its weights as they are."""
    shape: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_local_experts": 24}
    (tmp_path / "config.json").write_bytes((make_model("gpt-oss") / "config.json").read_bytes())
    change(tmp_path, quantization_config=CONFIG, **shape)
    before = sorted(path.name for path in tmp_path.iterdir())
    words = ("--load", "random", "--compare", "weights=unquantised", "--json")
    found = json.loads(size(tmp_path, *words).stdout)
    packed, plain = (
        {part["name"]: part["mib"] for part in report["result"]["memory"]["parts"]}
        for report in found.values()
    )
    numbers = 4 * 24 * 3 * 256 * 512  # of all layers' experts
    assert list(found) == [AS_GIVEN, "weights=unquantised"]
    assert packed["experts"] == pytest.approx(numbers / 2 / 2**20, abs=2)
    assert packed["scales"] == pytest.approx(numbers / 32 / 2**20, abs=1)
    assert plain["experts"] == pytest.approx(4 * numbers / 2**20, abs=2)
    assert "scales" not in plain
    tokens = [report["result"]["kvTokens"] for report in found.values()]
    assert tokens[0] > tokens[1]
    slow = [any("MXFP4 are dequantised" in each for each in r["warnings"]) for r in found.values()]
    assert slow == [True, False]
    details = [stage["detail"] for stage in found[AS_GIVEN]["stages"] if stage["name"] == "load"]
    assert details[0].startswith("random, 18 MiB of experts in MXFP4 with 1 MiB of scales")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("load", "quantised", "why"),
    [
        (LoadFormat.RANDOM, False, "config.json has no quantization_config"),
        (LoadFormat.WEIGHTS, True, "weights=unquantised: the files have .*: add --load random"),
    ],
)
def test_weights_that_cannot_be_otherwise_are_not_compared(
    load: LoadFormat, quantised: bool, why: str, tmp_path: Path
) -> None:
    config = {"quantization_config": CONFIG} if quantised else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = launch_config(tmp_path)
    given = replace(given, model=replace(given.model, load_format=load))
    with pytest.raises(ContractError, match=why):
        choices("weights=unquantised", given, tmp_path)
    with pytest.raises(ContractError, match="expected each choice once"):
        choices("weights=unquantised,weights=unquantised", given, tmp_path)
    with pytest.raises(ContractError, match=r"^weights=int8: expected weights=unquantised"):
        choices("weights=int8", given, tmp_path)


def test_every_setting_of_the_engine_can_be_compared() -> None:
    assert {"maxModelLen", "maxRunningRequests", "kvCacheDtype", "stateDtype"} < set(SETTINGS)
    named = {"kvCacheDtype": "fp8", "stateDtype": "bfloat16", "gpus": "8"}
    named["modalities"] = "text+image"
    for field in SETTINGS:
        value = named.get(field, "20")
        _, choice = choices(f"{field}={value}", GIVEN, NOWHERE)
        assert choice.launch != GIVEN


def hybrid(name: str, tokens: int, running: int | None, snapshots: int | None) -> Measured:
    """Of a model whose layers keep recurrent states; None: of one that has no such layer."""
    report = SizingReport.parse((GOLDEN / "report-v2-ranks.json").read_bytes())
    assert report.result is not None
    states = Part(STATES, 10 * (running or 0)), Part(SNAPSHOTS, 10 * (snapshots or 0))
    parts = (Part("kv-cache", 2000), *states)
    rank = Memory(sum(part.mib for part in parts), parts)
    slot = None if running is None else 10 << 20
    has = replace(
        report.result,
        kv_tokens=tokens,
        ranks=(rank,),
        state_slots=running,
        snapshots=snapshots,
        slot_bytes=slot,
        state_dtype=None if running is None else "bfloat16",
    )
    return Measured(name, replace(report, result=has))


def test_recurrent_states_have_columns_where_a_choice_has_them() -> None:
    given = hybrid(AS_GIVEN, 200_000, 256, 64)
    more = hybrid("maxRunningRequests=512", 100_000, 512, 64)
    console = Console(width=120)
    with console.capture() as captured:
        console.print(table([given, more]))
    first, second = captured.get().splitlines()[2:4]
    assert first.split()[-4:] == ["256", "+", "64", "3,200"]
    assert second.split()[-4:] == ["512", "+", "64", "5,760"]
    with console.capture() as captured:
        console.print(table([hybrid(AS_GIVEN, 200_000, None, None)]))
    assert "snapshots" not in captured.get()
    result = given.report.result
    assert result is not None
    text = summary(given.report, result)
    assert "256 sequences at once and 64 snapshots of prefixes of 10.0 MiB each in bfloat16" in text
    plain = hybrid(AS_GIVEN, 200_000, None, None).report
    assert plain.result is not None and "snapshots" not in summary(plain, plain.result)


def test_text_alone_is_compared_without_images_and_their_bounds() -> None:
    """A choice is between commas, so that a list of two has a plus."""
    asked = EngineOptions(64, images=Images.IF_SERVED, max_images_per_request=4)
    sees = replace(GIVEN, engine=asked)
    first, text, many = choices("modalities=text,maxImagesPerRequest=8", sees, NOWHERE)
    assert (first.launch, text.launch) == (sees, GIVEN)
    assert many.launch.engine == replace(asked, max_images_per_request=8)
    _, both = choices("modalities=text+image", sees, NOWHERE)
    assert both.launch.engine == replace(asked, images=Images.REQUIRED)


def test_an_encoder_has_a_column_where_a_choice_has_one() -> None:
    """Its weights are in those of the model."""
    text = hybrid("modalities=text", 200_000, None, None)
    assert text.report.result is not None and text.report.effective is not None
    encoder = Part(TOWER, 1120), Part(ENCODER_WORK, 300), Part(ENCODER_CACHE, 512)
    parts = (Part("weights", 500), *encoder, Part("kv-cache", 1000))
    rank = Memory(sum(part.mib for part in parts), parts)
    result = replace(text.report.result, ranks=(rank,))
    effective = replace(text.report.effective, max_images_per_request=8, max_image_patches=16384)
    sees = Measured(AS_GIVEN, replace(text.report, result=result, effective=effective))
    console = Console(width=120)
    with console.capture() as captured:
        console.print(table([sees, text]))
    _, _, first, second = captured.get().splitlines()
    assert first.split()[-3:] == ["1,620", "1,000", "812"] and second.split()[-1] == "0"
    bounds = ", at most 8 images a request of 16384 patches each; "
    assert bounds in summary(sees.report, result)
    with console.capture() as captured:
        console.print(table([text]))
    assert "encoder" not in captured.get()
    assert "images" not in summary(text.report, text.report.result)


@pytest.mark.process
def test_a_number_of_gpus_that_does_not_divide_is_refused_before_all(shared_model: Path) -> None:
    """It was when its turn came, minutes after the command."""
    done = size(shared_model, "--compare", "kvCacheDtype=fp8,gpus=5", check=False)
    assert done.returncode == 32 and not done.stdout, done.stderr[-2000:]
    assert "--compare, gpus=5: --gpus is 5, which do not share this model evenly" in done.stderr
    assert AS_GIVEN not in done.stderr


@pytest.mark.process
def test_all_have_the_same_memory(tiny_model: Path) -> None:
    """Of a limit that nobody sets, half of what is free; each measurement looked anew."""
    command = [sys.executable, "-m", "kvline_server", "size", "--model", str(tiny_model), "--json"]
    command += ["--device", "cpu", "--compare", "maxModelLen=64,maxRunningRequests=4"]
    path = f"{FAULTS}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path, "KVLINE_FAULT_FREE": "2048"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=limit(300), check=True
    )
    totals = [r["result"]["memory"]["totalMiB"] for r in json.loads(done.stdout).values()]
    assert len(totals) == 3 and len(set(totals)) == 1
    assert done.stderr.count("no container limits memory") <= 1


@pytest.mark.process
def test_each_choice_is_measured_within_its_memory_and_the_operator_s_bounds(
    tiny_model: Path,
) -> None:
    """What status.capacity.estimates has of each change before anybody measures it."""
    words = ("--compare", "memory=1924Mi,kvCacheDtype=fp8,maxRunningRequests=8", "--json")
    found = json.loads(size(tiny_model, *words).stdout)
    reports = {name: SizingReport.parse(json.dumps(each)) for name, each in found.items()}
    totals = [r.result.memory.total_mib for r in reports.values() if r.result is not None]
    assert totals == [900, 1924, 900, 900]
    before = CapacityStatus.of([reports[AS_GIVEN]])
    assert before is not None
    given = {"model": {"source": "pvc://models/tiny"}, "resources": {"memory": "900Mi"}}
    rows = estimates(before, given, 16)
    assert len(rows) == 3
    for row in rows:
        choice = f"{row.field.rpartition('.')[2]}={row.value}"
        result = reports[choice].result
        assert result is not None
        if row.bound == "AtLeast":
            assert result.kv_tokens >= row.kv_tokens > before.kv_tokens, choice
        else:
            assert result.kv_tokens <= row.kv_tokens, choice


@pytest.mark.process
def test_all_are_measured_though_one_is_refused(shared_model: Path, tmp_path: Path) -> None:
    record = tmp_path / "records.json"
    words = ("--compare", "kvCacheDtype=fp8,maxModelLen=999999", "--write-record", str(record))
    done = size(shared_model, *words, check=False)
    assert done.returncode == 20, done.stderr[-2000:]
    text = done.stdout.replace(AS_GIVEN, AS_GIVEN_CELL)
    lines = {line.split()[0]: line.split() for line in text.splitlines()}
    names = AS_GIVEN_CELL, "kvCacheDtype=fp8"
    tokens = {name: int(lines[name][1].replace(",", "")) for name in names}
    kept = json.loads(record.read_text())["records"].values()
    assert sorted(each["kvTokens"] for each in kept) == sorted(tokens.values())
    ratio = tokens["kvCacheDtype=fp8"] / tokens[AS_GIVEN_CELL]
    assert lines["kvCacheDtype=fp8"][2] == f"{ratio:.2f}" and ratio > 1.5
    assert lines["maxModelLen=999999"][1:3] == ["-", "-"]
    assert "maxModelLen=999999: ConfigInvalid: --max-model-len is 999999" in done.stdout


@pytest.mark.process
@pytest.mark.parametrize("more", [["--json"], []])
def test_an_interrupted_comparison_shows_what_was_measured(
    tiny_model: Path, more: list[str]
) -> None:
    command = [sys.executable, "-m", "kvline_server", "size", "--model", str(tiny_model), *more]
    command += ["--device", "cpu", "--memory", "900Mi", "--compare", "maxModelLen=64"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any("maxModelLen=64 (2 of 2)" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=limit(30))
    assert process.returncode == 130
    if more:
        assert list(json.loads(out)) == [AS_GIVEN] and json.loads(out)[AS_GIVEN]["result"]
    else:
        assert AS_GIVEN in out and "maxModelLen=64: interrupted, not measured" in out

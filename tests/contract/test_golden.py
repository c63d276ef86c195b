"""Documents of earlier versions must stay readable."""

from __future__ import annotations

import json
from pathlib import Path

from kvline_contract.codec import decode, dumps, loads
from kvline_contract.launch import GateFile, LaunchConfig, Record, Records
from kvline_contract.load import Load, Percentiles
from kvline_contract.report import SizingReport, State, Termination

GOLDEN = Path(__file__).parent / "golden"


def test_version_1_report() -> None:
    report = SizingReport.parse((GOLDEN / "report-v1.json").read_bytes())
    assert report.state is State.VALIDATED
    assert report.result is not None
    assert report.result.kv_tokens == 19280
    assert report.result.memory.total_mib == 2048
    assert [a.number for a in report.attempts] == [0, 1]
    assert report.result.memory.mib("kv-cache") == 847


def test_a_report_and_a_record_of_two_ranks() -> None:
    report = SizingReport.parse((GOLDEN / "report-v2-ranks.json").read_bytes())
    assert report.result is not None
    assert [rank.mib("headroom") for rank in report.result.ranks] == [2300, 290]
    assert [rank.gpu for rank in report.result.ranks] == [0, 1]
    assert report.result.binding_rank == 1 and report.result.memory == report.result.ranks[1]
    records = Records.parse((GOLDEN / "records-v1-ranks.json").read_bytes())
    (record,) = records.records.values()
    assert record.ranks == 2 and record == Record.of(report.result)


def test_version_1_launch_file() -> None:
    launch = LaunchConfig.parse((GOLDEN / "launch-v1.json").read_bytes())
    assert launch.model.served_name == "smollm2"
    assert launch.engine.max_model_len == 4096


def test_version_1_termination_gate_records_and_load() -> None:
    ended = Termination.parse((GOLDEN / "termination-v1.json").read_bytes())
    assert ended.code == 40
    assert ended.knobs[0].spec_field == "spec.resources.memory"
    assert GateFile.parse((GOLDEN / "gate-v1.json").read_bytes()).threshold() == 1000
    assert list(Records.parse((GOLDEN / "records-v1.json").read_bytes()).records)
    load = decode(Load, loads((GOLDEN / "load-v1.json").read_bytes(), 4096), strict=True)
    assert load.refused_last60s == 2
    assert load.time_to_first_token_us is load.inter_token_latency_us is None


def test_a_load_with_fields_of_a_newer_server_is_read() -> None:
    old = loads((GOLDEN / "load-v1.json").read_bytes(), 4096)
    first = {"p50": 1200, "p90": 1900, "p99": 2_000_000}
    load = Load.parse(json.dumps({**old, "timeToFirstTokenUs": {**first, "p999": 3}, "later": {}}))
    assert load.time_to_first_token_us == Percentiles(1200, 1900, 2_000_000)
    assert loads(dumps(load), 4096) == {**old, "timeToFirstTokenUs": first}

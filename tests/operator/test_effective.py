"""status.effective: what holds where the spec says nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from services import PLAIN, hybrid_pod, image_pod, ready_pod, service_state

from kvline_operator.api.spec import parse
from kvline_operator.plan.podspec import pod_template
from kvline_operator.plan.revisions import Revision
from kvline_operator.report.effective import effective
from kvline_operator.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


def test_defaults_hold_where_the_spec_is_silent() -> None:
    assert effective(service_state(PLAIN)) == {
        "drainSeconds": 120,
        "startupSeconds": 21600,
        "upgradePolicy": "Pinned",
        "model": {"loadFormat": "weights"},
        "resources": {"gpus": 0, "sharedMemory": "64Mi"},
        "engine": {"kvCacheDtype": "auto"},
        "capacity": {"reuse": "Auto"},
        "rollout": {
            "strategy": "Surge",
            "minCapacityPercent": 95,
            "progressDeadlineSeconds": 1800,
            "onFailure": "Rollback",
            "paused": False,
        },
    }


def test_what_the_server_chose_is_that_of_its_report() -> None:
    made = effective(service_state(ready_pod(), spec={"engine": {"kvCacheDtype": "fp8"}}))
    assert made["engine"] == {
        "kvCacheDtype": "fp8",
        "maxModelLen": 1024,
        "maxRunningRequests": 4,
        "maxPrefillTokens": 512,
        "maxTopLogprobs": 20,
        "modalities": ["text"],
    }
    assert made["capacity"] == {"reuse": "Auto", "headroomMiB": 128}


def test_images_are_served_where_a_replica_has_reported_their_bounds() -> None:
    """Without the field this depends on its model and device; the bounds asked for may be the
    server's default."""
    asked = {"engine": {"modalities": ["text", "image"], "maxImagesPerRequest": 8}}
    for spec in ({}, asked):
        engine = effective(service_state(image_pod(), spec=spec))["engine"]
        assert engine["modalities"] == ["text", "image"]
        assert (engine["maxImagesPerRequest"], engine["maxImagePatches"]) == (8, 16384)
    assert "modalities" not in effective(service_state(PLAIN))["engine"], "nothing is known yet"
    assert effective(service_state(PLAIN, spec=asked))["engine"] == {
        "kvCacheDtype": "auto",
        **asked["engine"],
    }


def test_speculation_has_its_number_of_draft_tokens() -> None:
    for given, number in (({}, 7), ({"maxDraftTokens": 3}, 3)):
        engine = {"speculation": {"method": "NGram", **given}}
        made = effective(service_state(PLAIN, spec={"engine": engine}))["engine"]
        assert made["speculation"] == {"method": "NGram", "maxDraftTokens": number}
    engine = {"speculation": {"method": "NGram", "maxSequences": 4}}
    made = effective(service_state(PLAIN, spec={"engine": engine}))["engine"]
    assert made["speculation"]["maxSequences"] == 4


def paths(value: dict[str, Any], path: str = "") -> set[str]:
    found = set()
    for key, item in value.items():
        found |= paths(item, f"{path}.{key}") if isinstance(item, dict) else {f"{path}.{key}"}
    return found


def known(schema: dict[str, Any], path: str = "") -> set[str]:
    found = set()
    for name, body in schema["properties"].items():
        where = f"{path}.{name}"
        found |= known(body, where) if "properties" in body else {where}
    return found


def schema() -> Any:
    (version,) = yaml.safe_load((ROOT / "manifests" / "crd.yaml").read_text())["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]["properties"]


def test_the_schema_has_every_field_and_no_other() -> None:
    """A field that it lacks would be dropped by the API server, and be written again for ever."""
    spec = {
        "capacity": {"kvTokens": 2048},
        "autoscaling": {"maxReplicas": 2},
        "engine": {
            "speculation": {"method": "NGram", "maxSequences": 4},
            "defaultMaxTokens": 512,
            "toolCallParser": "Hermes",
        },
    }
    status = schema()["status"]["properties"]
    made = service_state(hybrid_pod(state_dtype="float32"), spec=spec)
    sees = service_state(image_pod(), spec=spec)
    assert paths(effective(made)) | paths(effective(sees)) == known(status["effective"])


def test_every_field_has_the_name_that_it_has_in_the_spec() -> None:
    fields = schema()
    assert known(fields["status"]["properties"]["effective"]) <= known(fields["spec"])


def test_the_deadline_of_a_rollout_may_be_as_long_as_a_start() -> None:
    """With Replace and Recreate a longer load would expire however long a start may take."""
    spec = schema()["spec"]["properties"]
    deadline = spec["rollout"]["properties"]["progressDeadlineSeconds"]
    assert deadline["maximum"] == spec["startupSeconds"]["maximum"]


def test_a_start_may_take_as_long_as_the_spec_says() -> None:
    """The kubelet would otherwise restart a load that takes longer, for ever."""
    body = {
        "metadata": {"name": "chat", "namespace": "ns", "uid": "u"},
        "spec": {
            "model": {"source": "pvc://models/tiny"},
            "resources": {"memory": "2Gi"},
            "startupSeconds": 90000,
        },
    }
    spec = parse(body)
    revision = Revision("aaaaa", "image", spec.inputs_json, 1)
    (container,) = pod_template("chat", spec, revision, Settings("image"))["spec"]["containers"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 90000

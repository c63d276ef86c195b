"""Inputs of a revision: one setting has one spelling, and what was stored before is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvline_kubectl import act
from kvline_operator.api.inputs import read
from kvline_operator.api.quantity import canonical
from kvline_operator.api.revision_hash import revision_hash
from kvline_operator.api.spec import parse
from kvline_operator.errors import SpecError
from kvline_operator.plan.render import Owner, controller_revision, launch_config
from kvline_operator.plan.revisions import Revision, known, wanted
from kvline_operator.report.status_cache import history
from kvline_operator.settings import Settings
from kvline_operator.store.verdict import Phase

HUB = "hf://org/name@0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (2, "2"),
        ("2", "2"),
        ("2000m", "2"),
        ("1.5", "1500m"),
        (".5", "500m"),
        ("1.", "1"),
        ("500m", "500m"),
        ("0", "0"),
        ("1024Mi", "1Gi"),
        ("1.5Gi", "1536Mi"),
        ("0.5Ki", "512"),
        ("2Gi", "2Gi"),
        ("1536Mi", "1536Mi"),
        (2147483648, "2147483648"),
        ("1000000000", "1G"),
        ("0.0001", "1m"),
    ],
)
def test_a_quantity_has_the_api_server_s_form(given: str | int, wanted: str) -> None:
    assert canonical(given, "field") == wanted
    assert canonical(wanted, "field") == wanted


@pytest.mark.parametrize("given", ["", "-1", "1e3", "2 Gi", "2gi", "1Zi", "x", "1.2.3"])
def test_what_is_no_quantity_is_refused_by_its_field(given: str) -> None:
    with pytest.raises(SpecError, match=r"^spec\.resources\.memory must be a quantity"):
        canonical(given, "spec.resources.memory")


def body(resources: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    given = {"cpu": "1500m", "memory": "2Gi", **(resources or {})}
    meta = {"name": "chat", "namespace": "ns", "uid": "u", "generation": 1}
    return {
        "metadata": meta,
        "spec": {"model": {"source": "pvc://models/tiny"}, "resources": given, **spec},
    }


def test_spellings_of_a_quantity_are_one_revision() -> None:
    plain = parse(body())
    for cpu in (1.5, "1.5", "1500m", ".0015k"):
        assert parse(body({"cpu": str(cpu), "memory": "2048Mi"})).inputs_json == plain.inputs_json
    assert parse(body({"cpu": 2})).inputs_json == parse(body({"cpu": "2"})).inputs_json
    # As of an operator that took quantities for text.
    assert revision_hash(plain.inputs_json, "image") == "q5kw9"


def stored(inputs: dict[str, Any], image: str = "image") -> dict[str, Any]:
    """The ControllerRevision of an operator that stored these inputs."""
    labels = {"kvline.dev/revision": "aaaaa"}
    data = {"inputs": inputs, "image": image, "servedName": "chat"}
    return {"metadata": {"labels": labels}, "data": data, "revision": 1}


BEFORE: dict[str, Any] = {
    "model": {
        "source": HUB,
        "tokenSecret": {"name": "hub", "key": "token"},
        "cache": {"claim": "models"},
    },
    "resources": {"memory": "2048Mi", "cpu": "1000m"},
    "access": {"tlsSecret": {"name": "tls"}, "apiKeySecret": {"name": "key", "key": "k"}},
}
TODAY: dict[str, Any] = {
    "model": {
        "source": HUB,
        "tokenSecretRef": {"name": "hub", "key": "token"},
        "cache": {"claimName": "models"},
    },
    "resources": {"memory": "2Gi", "cpu": "1"},
    "access": {"tlsSecretRef": {"name": "tls"}, "apiKeySecretRef": {"name": "key", "key": "k"}},
}


def test_names_and_quantities_of_before_are_read_as_today_s() -> None:
    before = str(BEFORE)
    assert read(BEFORE) == TODAY == read(TODAY)
    assert str(BEFORE) == before  # the stored object is not touched


@pytest.mark.parametrize("spec", [TODAY, {**TODAY, "resources": {"memory": "2Gi", "cpu": 1}}])
def test_a_spec_in_today_s_names_is_the_revision_that_is_stored_in_those_of_before(
    spec: dict[str, Any],
) -> None:
    """No pod restarts when a manifest is written anew, and a rollback is to the same revision."""
    found = wanted(parse(body(**spec)), known([stored(BEFORE)]), "new-image", "aaaaa")
    assert (found.name, found.image) == ("aaaaa", "image")


def test_the_launch_file_of_inputs_of_before_has_what_they_ask_for() -> None:
    launch = launch_config(Owner("ns", "chat", "u", "chat"), "aaaaa", stored(BEFORE)["data"])
    assert launch.require_api_key and launch.require_tls


def test_what_is_stored_of_a_new_revision_has_today_s_names() -> None:
    spec = parse(body(**TODAY))
    made = controller_revision(spec, Revision("aaaaa", "image", spec.inputs_json, 1), Settings("i"))
    assert made["data"]["inputs"] == TODAY


def pod_of(**spec: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Pod spec and launch file of a new revision."""
    made = parse(body(**spec))
    revision = Revision("aaaaa", "image", made.inputs_json, 1)
    data = controller_revision(made, revision, Settings("i", pull_secrets=("of-chart",)))["data"]
    return data["podTemplate"]["spec"], json.loads(data["launch"])


def test_account_and_pull_secrets_are_the_spec_s_or_else_the_operator_s() -> None:
    pod, _ = pod_of()
    assert pod["serviceAccountName"] == "chat"
    assert pod["imagePullSecrets"] == [{"name": "of-chart"}]
    secrets = [{"name": "registry.example"}]
    pod, launch = pod_of(serviceAccountName="identity", imagePullSecrets=secrets)
    assert (pod["serviceAccountName"], pod["imagePullSecrets"]) == ("identity", secrets)
    assert pod["automountServiceAccountToken"] is False
    assert "environment" not in launch and "cpuLimit" not in launch  # older images refuse them


def test_environment_and_cpu_limit_are_the_container_s_and_in_its_launch_file() -> None:
    env = [{"name": "OMP_NUM_THREADS", "value": "2"}]
    pod, launch = pod_of(env=env, resources={"memory": "2Gi", "cpu": 1, "cpuLimit": "2000m"})
    (container,) = pod["containers"]
    assert container["env"][-1] == env[0]
    assert container["resources"]["limits"] == {"memory": "2Gi", "cpu": "2"}
    assert launch["environment"] == {"OMP_NUM_THREADS": "2"} and launch["cpuLimit"] == "2"


def test_a_rollback_to_a_revision_of_before_writes_today_s_names() -> None:
    """The API server would drop those of before, and the spec would be another revision."""
    past = history({"aaaaa": stored(BEFORE)}, {}, {"aaaaa": Phase.ACCEPTED})
    revision, patch = act.rollback(body(), past, "aaaaa")
    (spec,) = [operation["value"] for operation in patch if operation["path"] == "/spec"]
    assert revision == "aaaaa" and {key: spec[key] for key in TODAY} == TODAY
    found = wanted(parse(body(**spec)), known([stored(BEFORE)]), "new-image", "aaaaa")
    assert found.name == "aaaaa"

"""The project's YAML passes two linters: kubeconform with the API server's schemas, and kube-score
with a reason for each exception."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from playground import ROOT

pytestmark = pytest.mark.integration

SHIPPED = ("manifests/install.yaml", "manifests/crd.yaml")
SAMPLES = "manifests/samples"
EXCEPTIONS = {
    "pod-probes-identical": "what makes it unhealthy makes it of no use, and nothing else does",
    "container-image-pull-policy": "images are named by digest, and are what they were",
    "deployment-replicas": "there is one operator; what serves does not need it",
    "deployment-strategy": "of two at a time each would undo the other's writes for a moment",
}


def tool(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    import binaries

    command = [str(binaries.ensure(name, print)), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def schemas(cluster: Any, tmp_path: Path) -> str:
    """A JSON schema for each kind of the API server, ours included, that allows no unknown field;
    named as kubeconform expects."""
    spec = json.loads(cluster.kubectl("get", "--raw", "/openapi/v2").stdout)
    known = spec["definitions"]
    for body in known.values():
        if "properties" in body:
            body["additionalProperties"] = False
    for name in ("util.intstr.IntOrString", "api.resource.Quantity"):
        known[f"io.k8s.apimachinery.pkg.{name}"] = {"type": ["string", "integer"]}
    for name, body in known.items():
        for kind in body.get("x-kubernetes-group-version-kind", []):
            group = kind["group"].partition(".")[0]
            words = [kind["kind"].lower(), *([group] if group else []), kind["version"]]
            schema = {"$ref": f"#/definitions/{name}", "definitions": known}
            if kind["kind"] in KINDS:
                (tmp_path / ("-".join(words) + ".json")).write_text(json.dumps(schema))
    return f"{tmp_path}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json"


KINDS = {
    body["kind"]
    for file in (*SHIPPED, *sorted(str(p) for p in (ROOT / SAMPLES).glob("*.yaml")))
    for body in yaml.safe_load_all((ROOT / file).read_text())
}


def test_each_manifest_and_sample_has_its_schema(schemas: str, tmp_path: Path) -> None:
    words = ("-strict", "-summary", "-schema-location", schemas)
    done = tool("kubeconform", *words, *SHIPPED, SAMPLES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Invalid: 0, Errors: 0, Skipped: 0" in done.stdout
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((ROOT / SHIPPED[0]).read_text().replace("replicas: 1", "replcas: 1"))
    refused = tool("kubeconform", *words, str(wrong))
    assert refused.returncode and "replcas" in refused.stdout


def test_what_installs_scores_without_a_complaint_but_those_with_a_reason() -> None:
    ignored = [word for name in EXCEPTIONS for word in ("--ignore-test", name)]
    # No CPU limit: decisions/008.
    done = tool("kube-score", "score", "--ignore-container-cpu-limit", *ignored, SHIPPED[0])
    assert done.returncode == 0, done.stdout
    bare = json.loads(tool("kube-score", "score", "--output-format", "json", SHIPPED[0]).stdout)
    found = {
        check["check"]["id"] for body in bare for check in body["checks"] if check["grade"] < 10
    }
    assert set(EXCEPTIONS) <= found, "an exception that nothing needs any more"

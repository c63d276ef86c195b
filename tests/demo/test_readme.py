"""The README's own YAML runs on the demo's cluster as it stands, beside what the demo runs."""

from __future__ import annotations

import re
import subprocess
from decimal import Decimal
from pathlib import Path
from typing import Any

import model
import settings
import yaml
from kubernetes.utils.quantity import parse_quantity
from local import NODE
from story import NAME

from kvline_operator.api.source import Claim
from kvline_operator.api.spec import parse

ROOT = Path(__file__).resolve().parents[2]
CORES = 2  # that the demo needs
SURGE = 1  # replicas beside those of the spec, while a changed spec is measured
Object = dict[str, Any]


def documents(path: str) -> list[Object]:
    return list(yaml.safe_load_all((ROOT / path).read_text()))


def readme() -> Object:
    found = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (body,) = (made for text in found if (made := yaml.safe_load(text))["kind"])
    return dict(body)


def cpu(quantity: Any) -> Decimal:
    return Decimal(parse_quantity(str(quantity)))  # type: ignore[no-untyped-call]


def asked(body: Object, replicas: int) -> Decimal:
    return cpu(body["spec"]["resources"]["cpu"]) * (replicas + SURGE)


def test_its_service_has_room_on_the_demo_s_node() -> None:
    """Beside the operator and the demo's two replicas, each with a change under way."""
    (operator,) = (d for d in documents("manifests/install.yaml") if d["kind"] == "Deployment")
    (container,) = operator["spec"]["template"]["spec"]["containers"]
    (demo,) = documents(f"manifests/samples/{NAME}.yaml")
    taken = cpu(container["resources"]["requests"]["cpu"]) + asked(demo, 2)
    assert taken + asked(readme(), 1) <= CORES


def test_its_model_is_in_the_demo_s_claim() -> None:
    made = readme()
    spec = parse({**made, "metadata": {**made["metadata"], "namespace": "default", "uid": "u"}})
    claim = yaml.safe_load(settings.claim("default", "models", "v", str(model.MODELS), NODE))
    assert isinstance(spec.source, Claim)
    assert spec.source.claim in [item["metadata"]["name"] for item in claim["items"]]
    assert model.MODELS / spec.source.path == model.MODEL
    minimum, measured = spec.min_kv_tokens, re.search(r"(\d+) KV tokens of", _story())
    assert measured is not None and minimum < int(measured[1])
    (demo,) = documents(f"manifests/samples/{NAME}.yaml")  # which measured that
    assert made["spec"]["resources"]["memory"] == demo["spec"]["resources"]["memory"]


def _story() -> str:
    return (ROOT / "README.md").read_text()


def test_a_claim_in_another_namespace_finds_a_volume_with_the_model() -> None:
    (claim,) = documents("demo/claim.yaml")
    assert "storageClassName" not in claim["spec"]  # of the default class, here as anywhere
    made = yaml.safe_load(settings.spare_volumes(1, str(model.MODELS), NODE))
    storage, volume = made["items"]
    default = "storageclass.kubernetes.io/is-default-class"
    assert storage["metadata"]["annotations"][default] == "true"
    assert volume["spec"]["storageClassName"] == storage["metadata"]["name"]
    assert set(claim["spec"]["accessModes"]) <= set(volume["spec"]["accessModes"])
    offered, wanted = volume["spec"]["capacity"], claim["spec"]["resources"]["requests"]
    assert cpu(wanted["storage"]) <= cpu(offered["storage"])
    assert volume["spec"]["local"]["path"] == str(model.MODELS)
    (loader,) = documents("demo/loader.yaml")
    (mounted,) = loader["spec"]["volumes"]
    assert mounted["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_its_service_is_a_sample_that_can_be_applied() -> None:
    assert documents("manifests/samples/chat.yaml") == [readme()]


def test_make_help_names_every_word_of_the_documents() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = {line.split()[0] for line in done.stdout.splitlines()}
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    named = {word for page in pages for word in re.findall(r"`make ([a-z0-9-]+)", page.read_text())}
    assert named and named <= listed

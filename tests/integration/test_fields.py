"""Every field of a spec, changed on a service that serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from playground import ROOT, Node

from kvline_contract.report import State

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

ROLLS, STAYS = "rolls out", "stays"  # else: what the refusal says
DIGEST = "localhost/kvline-server@sha256:" + "a" * 64
SECRET = {"name": "s", "key": "k"}
# In this order, each beside those before it.
CHANGES: list[tuple[str, Any, str]] = [
    ("image", DIGEST, ROLLS),
    ("model.source", "pvc://models/other", ROLLS),
    ("model.servedName", "other", ROLLS),
    ("model.loadFormat", "random", ROLLS),
    ("model.tokenSecret.name", "s", "tokenSecret"),
    ("model.tokenSecret.key", "k", "tokenSecret"),
    ("model.cache.claim", "c", "cache is for hf:// sources"),
    ("replicas", 2, STAYS),
    ("resources.gpus", 2, "spec.resources.gpus"),
    ("resources.cpu", "500m", ROLLS),
    ("resources.memory", "3Gi", ROLLS),
    ("engine.maxModelLen", 512, ROLLS),
    ("engine.maxRunningRequests", 4, ROLLS),
    ("engine.maxPrefillTokens", 256, ROLLS),
    ("engine.maxTopLogprobs", 5, ROLLS),
    ("capacity.minKVTokens", 2000, STAYS),
    ("capacity.kvTokens", 4096, ROLLS),
    ("capacity.headroomMiB", 64, ROLLS),
    ("capacity.reuse", "Never", STAYS),
    ("rollout.strategy", "Recreate", STAYS),
    ("rollout.minCapacityPercent", 50, STAYS),
    ("rollout.progressDeadlineSeconds", 600, STAYS),
    ("rollout.onFailure", "Hold", STAYS),
    ("scheduling.nodeSelector", {"disk": "fast"}, ROLLS),
    ("scheduling.tolerations", [{"key": "gpu", "operator": "Exists"}], ROLLS),
    ("access.apiKeySecret.name", "s", "spec.access.apiKeySecret.key"),
    ("access.apiKeySecret", SECRET, ROLLS),
    ("access.apiKeySecret.key", "other", ROLLS),
    ("autoscaling.maxReplicas", 3, STAYS),
    ("autoscaling.minReplicas", 2, STAYS),
    ("autoscaling.targetPercent", 50, STAYS),
    ("autoscaling.scaleDownDelaySeconds", 1, STAYS),
]


def leaves(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    if "properties" not in schema:
        yield path
    for name, body in schema.get("properties", {}).items():
        yield from leaves(body, f"{path}.{name}" if path else name)


def changed(spec: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    name, _, rest = path.partition(".")
    return {**spec, name: changed(spec.get(name, {}), rest, value) if rest else value}


def test_each_field_rolls_out_or_stays_or_is_refused_by_name(
    space: Any, operator: Any, node: Node, until: Callable[..., Any]
) -> None:
    """C16: and nothing is ever stuck."""
    crd = yaml.safe_load((ROOT / "manifests" / "crd.yaml").read_text())
    (version,) = crd["spec"]["versions"]
    known = set(leaves(version["schema"]["openAPIV3Schema"]["properties"]["spec"]))
    assert known == {path for path, _, _ in CHANGES if path != "access.apiKeySecret"}

    def settled() -> str:
        """The revision that serves alone, once it does."""
        node.play(State.VALIDATED)
        body = space.get("kvl", "chat")
        up = space.condition("UpToDate")
        same = up.get("observedGeneration") == body["metadata"]["generation"]
        return (
            str(body["status"]["rollout"]["stableRevision"])
            if same and up["status"] == "True"
            else ""
        )

    # A minimum, or another model's tokens could not be compared.
    spec: dict[str, Any] = {
        "model": {"source": "pvc://models/tiny"},
        "resources": {"memory": "2Gi"},
        "capacity": {"minKVTokens": 1000},
    }
    space.apply(**spec)
    revision = until(settled, 60)
    for path, value, expected in CHANGES:
        wanted = changed(spec, path, value)
        done = space.apply(check=False, **wanted)
        if expected not in (ROLLS, STAYS):
            assert done.returncode != 0 and expected in done.stderr, (path, done.stderr)
            continue
        assert done.returncode == 0, (path, done.stderr)
        spec, before, revision = wanted, revision, until(settled, 60)
        assert (revision != before) == (expected == ROLLS), path

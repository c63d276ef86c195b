"""A gated model of the hub in a pod: refused, explained, allowed, downloaded once; the token is
shown nowhere."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hub
import model
import pytest
from network import NODE_ADDRESS
from support import HUB_PORT, pods, wait
from waiting import eventually, limit

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

TOKEN, WRONG = "hf_canary_9c41f7", "hf_canary_refused_2b"
SPEC = {
    "model": {
        "source": f"hf://{hub.REPOSITORY}@{hub.COMMIT}",
        "tokenSecretRef": {"name": "hub", "key": "token"},
        "cache": {"claimName": "cache"},
    },
    "engine": {"maxModelLen": 512, "maxPrefillTokens": 128, "maxRunningRequests": 4},
    "capacity": {"kvTokens": 4096},
    "resources": {"cpu": "100m", "memory": "1536Mi"},
}


@pytest.fixture
def requests(cluster: Any, tmp_path: Path) -> Iterator[Path]:
    """A hub on the node, which writes its requests to the file."""
    log = tmp_path / "requests"
    command = [sys.executable, hub.__file__, NODE_ADDRESS, str(HUB_PORT), str(model.MODEL), TOKEN]
    with log.open("wb") as out:
        process = subprocess.Popen(cluster.network.command(command), stdout=out)
        yield log
        process.terminate()
        process.wait(limit(10))


@pytest.fixture
def cache(space: Any, cluster: Any, tmp_path: Path) -> Path:
    """A claim that pods may write to."""
    folder = tmp_path / "cache"
    folder.mkdir()
    for path in (*reversed(folder.parents[:3]), folder):
        path.chmod(0o755)
    folder.chmod(0o777)
    cluster.claim(space.name, folder, "cache")
    return folder


def set_token(space: Any, key: str, token: str) -> None:
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "hub"},
        "stringData": {key: token},
    }
    space.kubectl("delete", "secret", "hub", "--ignore-not-found")
    space.kubectl("create", "-f", "-", input=json.dumps(secret))


def fetches(requests: Path) -> int:
    return requests.read_text().count("GET /org/tiny/resolve")


@pytest.mark.fault(
    "F29",
    shows="Secret absent, without the key, wrong, then right: ModelAvailable names each, the "
    "pod needs no hand, the token is in no object, event, log or environment",
)
def test_a_gated_model_is_explained_then_fetched_once_and_the_token_is_nowhere(
    space: Any, cluster: Any, requests: Path, cache: Path
) -> None:
    """F29; invariant 9."""
    space.apply("gated", **SPEC)
    missing = wait(space, "gated", "ModelAvailable", reason="SecretMissing")
    assert '"hub"' in missing["message"]
    set_token(space, "other", TOKEN)
    eventually(
        lambda: "token" in space.condition("ModelAvailable", "gated")["message"], 90, on="pod"
    )

    set_token(space, "token", WRONG)
    refused = wait(space, "gated", "ModelAvailable", reason="NotFound")
    assert "spec.model.tokenSecretRef" in refused["message"]
    assert not (cache / hub.COMMIT).exists()

    set_token(space, "token", TOKEN)  # the pod recovers by itself
    wait(space, "gated", "Ready", status="True")
    whole = {p.name: p.stat().st_size for p in model.MODEL.iterdir() if p.suffix == ".safetensors"}
    got = {p.name: p.stat().st_size for p in cache.rglob("*.safetensors")}
    assert got == whole
    before = fetches(requests)
    space.kubectl("scale", "kvl", "gated", "--replicas=2")
    eventually(lambda: space.get("kvl", "gated")["status"].get("readyReplicas") == 2, 240, on="pod")
    assert fetches(requests) == before

    for name, text in everything(space, cluster):
        for token in (TOKEN, WRONG):
            assert token not in text, name
            assert base64.b64encode(token.encode()).decode() not in text, name


def everything(space: Any, cluster: Any) -> Iterator[tuple[str, str]]:
    """Every object but Secrets with its events, every log of every program and pod, and what the
    server's own processes can see."""
    kinds = cluster.kubectl("api-resources", "--verbs=list", "-o", "name").stdout.split()
    kinds.remove("secrets")
    words = ("get", ",".join(kinds), "-A", "-o", "json", "--show-managed-fields")
    objects = cluster.kubectl(*words).stdout
    assert all(f'"kind": "{kind}"' in objects for kind in ("Pod", "Event", "InferenceService"))
    assert '"ModelNotFound"' in objects  # the event of the refusal
    yield "objects", objects
    logs = [p for p in (cluster.state / "log").rglob("*") if p.is_file()]
    assert any("download" in str(p) for p in logs)
    for path in logs:
        yield str(path), path.read_text(errors="replace")
    program = (
        "import glob; print([open(p, 'rb').read() for p in glob.glob('/proc/[0-9]*/environ')])"
    )
    for pod in pods(space):
        name = pod["metadata"]["name"]
        python = ("--", "/opt/kvline/bin/python", "-c", program)
        seen = space.kubectl("exec", name, "-c", "server", *python).stdout
        assert "HOME=" in seen
        yield f"environment of {name}", seen

"""An API key on a real node: the Secret is missing, then created, then requests need it."""

from __future__ import annotations

from typing import Any

import pytest
from support import wait
from test_main_job import RANDOM
from waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ACCESS = {"apiKeySecretRef": {"name": "chat-key", "key": "token"}}
KEY = "e2e-canary-key-7d1f"


def test_who_knows_the_key_is_served(space: Any, cluster: Any) -> None:
    space.apply("guarded", **RANDOM, access=ACCESS)
    condition = wait(space, "guarded", "ModelAvailable", reason="SecretMissing")
    assert "spec.access.apiKeySecretRef" in condition["message"]
    space.kubectl("create", "secret", "generic", "chat-key", f"--from-literal=token={KEY}")
    wait(space, "guarded", "Ready", 400, status="True")

    ip = space.get("service", "guarded")["spec"]["clusterIP"]

    def status(*words: str) -> str:
        command = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", *words]
        done = cluster.network.run([*command, f"http://{ip}:8000/v1/models"], check=False)
        return str(done.stdout)

    eventually(lambda: status("-H", f"Authorization: Bearer {KEY}") == "200", on="pod")
    assert status() == "401"
    assert status("-H", "Authorization: Bearer wrong") == "401"
    for kind in ("pods", "events", "configmaps", "deployments", "kvl", "controllerrevisions"):
        assert KEY not in space.kubectl("get", kind, "-o", "yaml").stdout
    logs = ("logs", "-l", "app.kubernetes.io/managed-by=kvline", "--tail=-1")
    assert KEY not in space.kubectl(*logs).stdout
    space.kubectl("delete", "secret", "chat-key")

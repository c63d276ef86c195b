"""`kubectl kvline size` on a real node: measures in a Job and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import build
import pytest
from playground import manifest
from support import wait
from test_main_job import RANDOM
from waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_a_manifest_is_sized_before_it_is_applied(space: Any, cluster: Any, tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(manifest("plan", **{**RANDOM, "capacity": {}}))
    image = build.image_name("server")
    words = ("--image", image, "--compare", "memory=2Gi", "-o", "json")
    done = space.kvline("size", "-f", str(file), *words)
    report, more = json.loads(done.stdout).values()
    assert report["state"] == "Validated" and report["result"]["kvTokens"] > 1000
    assert more["result"]["memory"]["totalMiB"] == 2048 > report["result"]["memory"]["totalMiB"]
    assert more["result"]["kvTokens"] > report["result"]["kvTokens"]
    assert report["effective"]["maxModelLen"] == 512
    assert "validate" in done.stderr  # the stages
    assert space.get("kvl", "plan") is None
    (job,) = space.list("jobs")
    assert job["spec"]["ttlSecondsAfterFinished"] <= 600
    eventually(lambda: space.list("jobs")[0]["status"].get("succeeded") == 1, on="pod")
    space.kubectl("delete", "job", "--all")
    eventually(
        lambda: not [c for c in space.list("configmaps") if "size" in c["metadata"]["name"]],
        on="garbage collector",
    )

    # What cannot be held is reported in the engine's own words.
    refused = space.kvline(
        "size", "-f", str(file), "--image", image, "--memory", "512Mi", check=False
    )
    assert refused.returncode == 1
    assert "OutOfMemory" in refused.stderr or "MiB" in refused.stderr, refused.stderr
    space.kubectl("delete", "job", "--all")


def test_what_a_service_would_measure_otherwise(space: Any, cluster: Any) -> None:
    space.apply("plan", **RANDOM)
    wait(space, "plan", "Ready", status="True")
    done = space.kvline("size", "plan", "--max-model-len", "256")
    assert "4,096 KV tokens" in done.stdout and "16 full-length sequences of 256" in done.stdout
    assert "█" in done.stdout
    generation = space.get("kvl", "plan")["metadata"]["generation"]
    assert generation == 1  # the serving pods were not touched
    space.kubectl("delete", "job", "--all")

"""`kubectl kvline check` beside a real operator: what it answers is what then happens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playground import manifest
from rolling import Service

pytestmark = pytest.mark.integration


@pytest.fixture
def check(service: Service, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    def answer(name: str = "chat", **spec: Any) -> tuple[int, dict[str, Any]]:
        file = tmp_path / "new.yaml"
        file.write_text(manifest(name, **spec))
        done = service.space.kvline("check", "-f", str(file), "-o", "json", check=False)
        return done.returncode, json.loads(done.stdout)

    return answer


def test_the_answer_is_what_happens_when_it_is_applied(
    service: Service, check: Callable[..., tuple[int, dict[str, Any]]]
) -> None:
    before = service.space.get("kvl", "chat")
    assert before is not None
    code, same = check(replicas=5)
    assert (code, same["result"], same["revision"]) == (0, "Passes", service.stable())
    new = {"replicas": 2, "engine": {"maxModelLen": 512}}
    code, unknown = check(**new)
    assert (code, unknown["result"]) == (4, "MustBeMeasured")
    code, missing = check("other")
    assert code == 4 and "there is no other in namespace" in missing["message"]
    now = service.space.get("kvl", "chat")
    assert now is not None and now["metadata"]["generation"] == before["metadata"]["generation"]

    service.space.apply(**new)
    second = service.candidate()
    assert second == unknown["revision"]
    service.tokens[second] = 1000
    service.until_reason("RevisionRejected")
    code, rejected = check(**new)
    assert (code, rejected["result"], rejected["low"]) == (3, "Rejected", 1000)
    assert rejected["required"] == 3892 and "2892 short" in rejected["message"]

"""What a failed end-to-end test shows."""

from __future__ import annotations

import json
from typing import Any


def describe(space: Any, name: str) -> str:
    pods = space.kubectl("get", "pods", "-o", "wide", check=False).stdout
    status = (space.get("kvl", name) or {}).get("status")
    logs = space.kubectl(
        "logs", "-l", "app.kubernetes.io/managed-by=kvline", "--tail=20", check=False
    ).stdout
    return f"{pods}\n{json.dumps(status, indent=1)}\n{logs}"

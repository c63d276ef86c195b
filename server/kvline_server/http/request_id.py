"""Request ids: always unique; a client's own id becomes a cleaned, shortened prefix."""

from __future__ import annotations

import re
import uuid

LIMIT = 64


def request_id(given: str | None) -> str:
    own = uuid.uuid4().hex
    if not given:
        return f"req-{own}"
    shown = re.sub(r"[^A-Za-z0-9._-]", "", given)[: LIMIT - 14]
    return f"{shown}-{own[:12]}"

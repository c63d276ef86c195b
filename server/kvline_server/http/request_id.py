"""Ids of answers: always unique; a client's own id becomes a cleaned, shortened part."""

from __future__ import annotations

import re
import uuid

LIMIT = 64


def request_id(given: str | None, prefix: str) -> str:
    """`prefix`: of the kind of answer, as OpenAI's ids have it."""
    own = uuid.uuid4().hex
    if not given:
        return prefix + own
    shown = re.sub(r"[^A-Za-z0-9._-]", "", given)[: LIMIT - 13 - len(prefix)]
    return f"{prefix}{shown}-{own[:12]}"

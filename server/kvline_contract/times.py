"""Times as reports, annotations and status fields have them: RFC 3339, UTC, whole seconds."""

from __future__ import annotations

from datetime import UTC, datetime

FORMAT = "%Y-%m-%dT%H:%M:%SZ"


def stamp(at: datetime) -> str:
    return at.strftime(FORMAT)


def now() -> str:
    return stamp(datetime.now(UTC))

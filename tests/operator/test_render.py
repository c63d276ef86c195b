"""Objects rendered from values: what must be the same, and what must not."""

from __future__ import annotations

from kvline_operator.render import Owner, event

OWNER = Owner("ns", "chat", "uid", "chat")
SAID = ("CapacityValidated", "Normal", "4096 KV tokens")


def name(said: tuple[str, str, str], version: str, time: str) -> str:
    return str(event(OWNER, said, version, time)["metadata"]["name"])


def test_an_event_repeated_after_a_crash_has_the_same_name() -> None:
    """F01: the status was not written, so the version is the same, whatever the clock says."""
    first = name(SAID, "7", "2026-11-21T10:00:00Z")
    assert name(SAID, "7", "2026-11-21T10:00:09Z") == first
    assert name(SAID, "8", "2026-11-21T10:00:00Z") != first
    assert name(("Serving", "Normal", "x"), "7", "2026-11-21T10:00:00Z") != first

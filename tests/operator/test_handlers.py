"""kopf computes no diffs and writes nothing into objects, checked with kopf itself."""

from __future__ import annotations

from typing import Any

import kopf

from kvline_operator.run import handlers

OBJECT: Any = {"metadata": {"name": "chat", "labels": {"a": "b"}}, "spec": {"replicas": 1}}


def test_nothing_is_worked_out_of_what_changed_and_nothing_is_kept_in_objects() -> None:
    settings = kopf.OperatorSettings()
    handlers.configure(settings)
    body = kopf.Body(OBJECT)
    storage = settings.persistence.diffbase_storage
    assert storage.build(body=body, extra_fields=None) == {}
    assert storage.fetch(body=body) is None
    assert not settings.posting.enabled
    assert settings.scanning.disabled

"""Which differences are repaired, and which fields belong to others."""

from __future__ import annotations

from typing import Any

import pytest

from kvline_operator.apply.difference import covers

WANTED: dict[str, Any] = {
    "kind": "Deployment",
    "metadata": {"labels": {"a": "b"}, "ownerReferences": [{"uid": "u", "controller": True}]},
    "spec": {
        "replicas": 2,
        "containers": [
            {"name": "c", "args": ["x"], "resources": {"limits": {"memory": "2048Mi", "cpu": "1"}}}
        ],
        "empty": [],
        "off": False,
    },
}


def live(**spec: Any) -> dict[str, Any]:
    container = {
        "name": "c",
        "args": ["x"],
        "imagePullPolicy": "Always",
        "resources": {"limits": {"memory": "2Gi", "cpu": "1000m"}, "requests": {}},
    }
    return {
        "metadata": {
            "labels": {"a": "b", "theirs": "x"},
            "ownerReferences": [{"uid": "v"}, {"uid": "u", "controller": True, "kind": "K"}],
        },
        "spec": {"replicas": 2, "containers": [container], "added": 1, "off": False, **spec},
    }


def test_defaults_and_other_people_s_fields_are_not_differences() -> None:
    assert covers(live(), WANTED)


@pytest.mark.parametrize(
    "change",
    [
        {"replicas": 3},
        {"containers": []},
        {
            "containers": [
                {"name": "c", "args": ["y"], "resources": {"limits": {"memory": "2Gi", "cpu": "1"}}}
            ]
        },
        {
            "containers": [
                {"name": "c", "args": ["x"], "resources": {"limits": {"memory": "3Gi", "cpu": "1"}}}
            ]
        },
        {"off": True},
        {"off": None},  # its default may be true, as that of allowPrivilegeEscalation
        {"empty": [1]},
    ],
)
def test_a_changed_field_of_ours_is(change: dict[str, Any]) -> None:
    assert not covers(live(**change), WANTED)


def test_a_lost_label_or_owner_is() -> None:
    no_label = live()
    no_label["metadata"]["labels"].pop("a")
    no_owner = live()
    no_owner["metadata"]["ownerReferences"] = [{"uid": "v"}]
    assert not covers(no_label, WANTED)
    assert not covers(no_owner, WANTED)

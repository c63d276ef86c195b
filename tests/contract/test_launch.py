"""Launch files that earlier images read: they refuse a key that they do not know."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from kvline_contract.codec import camel, encode
from kvline_contract.launch import (
    CapacityOptions,
    Device,
    EngineOptions,
    LaunchConfig,
    Model,
)
from kvline_operator.plan.render import Owner, launch_config

# What images of 7fc0ac7 accept, the earliest from which an upgrade keeps its promises.
ACCEPTED: dict[Any, set[str]] = {
    LaunchConfig: {"version", "namespace", "service", "revision", "image", "device", "model"}
    | {"tensorParallel", "engine", "capacity", "requireApiKey", "drainSeconds", "requireTls"},
    Model: {"source", "path", "servedName", "loadFormat"},
    EngineOptions: {"maxModelLen", "maxRunningRequests", "maxPrefillTokens", "maxTopLogprobs"}
    | {"kvCacheDtype"},
    CapacityOptions: {"kvTokens", "headroomMiB"},
}


def accepts(launch: dict[str, Any]) -> bool:
    parts = {Model: "model", EngineOptions: "engine", CapacityOptions: "capacity"}
    return set(launch) <= ACCEPTED[LaunchConfig] and all(
        set(launch[name]) <= ACCEPTED[kind] for kind, name in parts.items()
    )


def test_a_spec_without_options_starts_earlier_images() -> None:
    inputs = {"model": {"source": "pvc://models/tiny"}, "resources": {"memory": "2Gi"}}
    data = {"inputs": inputs, "image": "image", "servedName": "chat"}
    made = launch_config(Owner("ns", "chat", "u", "chat"), "aaaaa", data)
    assert accepts(encode(made))
    model = Model("pvc://models/tiny", "/models/tiny", "chat")
    options = EngineOptions(), CapacityOptions()
    assert made == LaunchConfig(1, "ns", "chat", "aaaaa", "image", Device.CPU, 1, model, *options)


@pytest.mark.parametrize("kind", ACCEPTED)
def test_a_field_that_came_later_is_left_out_where_it_has_its_default(kind: Any) -> None:
    found = {field.metadata.get("key") or camel(field.name): field for field in fields(kind)}
    assert set(found) >= ACCEPTED[kind]
    for key in set(found) - ACCEPTED[kind]:
        assert found[key].metadata.get("omit_none") and found[key].default is None, key

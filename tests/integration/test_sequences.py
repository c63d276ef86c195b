"""Services that are changed without end, by whatever the schema allows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import crd
import pytest
import yaml
from errors import ClusterError
from playground import Node, Operator, Space
from waiting import eventually

from kvline_contract.report import State
from kvline_operator.__main__ import PARALLEL_READS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NAMES = [f"chat-{n}" for n in range(5)]
STEPS, PART = 1000, 100
THREADS = PARALLEL_READS + 20  # pools grow to their size and no further
# Of resident memory, for events in work: Python's own objects took 0.1 MiB less after 3,000 changes
# than after 1,000 (tracemalloc, after 20 s without a change), resident memory 6 MiB more.
NOISE = 8
Leaf = tuple[tuple[str, ...], dict[str, Any]]
OWN: list[Leaf] = [  # of which few pods come
    (("replicas",), {"enum": [0, 1, 2]}),
    (("autoscaling",), {"enum": [{"maxReplicas": 1}, {"minReplicas": 1, "maxReplicas": 2}]}),
    (("resources", "memory"), {"enum": ["1Gi", "2Gi", "3000Mi"]}),
]


def leaves(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """Fields of numbers, truth values and names that the schema lists."""
    for name, field in schema.get("properties", {}).items():
        where = (*path, name)
        if where in [own for own, _ in OWN]:
            continue
        if "enum" in field or field.get("type") in ("integer", "boolean"):
            yield where, field
        yield from leaves(field, where)


def value(field: dict[str, Any], dice: random.Random) -> Any:
    if dice.random() < 0.2:
        return None  # the field goes
    if "enum" in field:
        return dice.choice(field["enum"])
    if field["type"] == "boolean":
        return dice.random() < 0.5
    low, high = field["minimum"], field["maximum"]
    return dice.choice([low, high, dice.randint(low, high), min(high, 8 * max(low, 64))])


def patch(leaf: Leaf, dice: random.Random) -> dict[str, Any]:
    path, field = leaf
    made = value(field, dice)
    for name in reversed(path):
        made = {name: made}
    return {"spec": made}


def used(operator: Operator) -> dict[str, int]:
    """The fewest file descriptors of a second: connections come and go, and nothing tells when."""
    found = []
    for _ in range(5):
        found.append(used_now(operator))
        time.sleep(0.2)
    return min(found, key=lambda f: f["descriptors"])


def used_now(operator: Operator) -> dict[str, int]:
    """MiB, threads and file descriptors."""
    assert operator.process is not None
    folder = Path(f"/proc/{operator.process.pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    found = {"MiB": int(status["RssAnon"].split()[0]) >> 10, "threads": int(status["Threads"])}
    return {**found, "descriptors": len(list((folder / "fd").iterdir()))}


def settled(space: Space) -> bool:
    """Whether the operator has acted on the newest spec of each."""
    return all(
        (body.get("status") or {}).get("observedGeneration") == body["metadata"]["generation"]
        for body in space.list("kvl")
    )


def clear(space: Space, fields: list[Leaf]) -> None:
    """The plain spec again, of one replica. A minimum judges it where what serves had a KV cache of
    another dtype, with which the gate compares nothing."""
    gone = {path[0]: None for path, _ in fields if path[0] not in ("model", "resources")}
    of_capacity = {path[1]: None for path, _ in fields if path[0] == "capacity"}
    kept = {
        "resources": {"memory": "2Gi", "gpus": None},
        "model": {"loadFormat": None},
        "capacity": {**of_capacity, "minKVTokens": 1},
    }
    for name in NAMES:
        space.api.merge(space.api.path("kvl", space.name, name), {"spec": {**gone, **kept}})


@pytest.mark.fault(
    "L19", shows="1,000 steps over 5 services, fields and values by the schema: all converge"
)
@pytest.mark.fault(
    "L06",
    shows="1,000 changes as fast as they go (not 24 h): of the last 500, resident +8 MiB at "
    "most, threads bounded, descriptors flat",
)
def test_sequences_of_changes_made_from_the_schema_converge(
    space: Space, operator: Operator, node: Node, until: Callable[..., Any]
) -> None:
    (version,) = yaml.safe_load(crd.FILE.read_text())["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    fields = [*leaves(spec), *OWN]
    dice = random.Random(14)
    for name in NAMES:
        space.apply(name)
    figures = []
    for step in range(STEPS):
        path = space.api.path("kvl", space.name, dice.choice(NAMES))
        try:
            space.api.merge(path, patch(dice.choice(fields), dice))
        except ClusterError as error:
            assert "HTTP 422" in str(error)
        if step % PART == PART - 1:
            eventually(lambda: settled(space), 120)
            compared = step + 1 in (STEPS // 2, STEPS)
            figures.append(used(operator) if compared else used_now(operator))
    clear(space, fields)
    ready = dict.fromkeys(NAMES, "True")

    def serves() -> bool:
        node.play(State.VALIDATED)
        return {n: space.condition("UpToDate", n).get("status") for n in NAMES} == ready

    until(serves, 120)
    half, end = figures[len(figures) // 2 - 1], figures[-1]
    assert end["MiB"] <= half["MiB"] + NOISE, figures
    assert end["threads"] <= THREADS, figures
    # Each thread may keep a connection; beside those, connections of the moment.
    extra, before = (f["descriptors"] - f["threads"] for f in (end, half))
    assert extra <= before + 4, figures

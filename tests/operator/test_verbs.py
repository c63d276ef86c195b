"""What a user asks for by a field: a restart, a new default image, a pause. What was asked of an
earlier operator by an annotation stays done."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvline_operator.api.revision_hash import is_hash
from kvline_operator.api.spec import ServiceSpec, parse
from kvline_operator.errors import SpecError
from kvline_operator.plan.revisions import Revision, known, wanted
from kvline_operator.store import revision_state

ONE, TWO, THREE = (f"registry.example/server@sha256:{c * 64}" for c in "abc")
NOON, LATER = "2026-11-26T12:00:00Z", "2026-11-26T13:00:00Z"
BIGGER: dict[str, Any] = {"engine": {"maxModelLen": 4096}}
LATEST: dict[str, Any] = {"upgradePolicy": "Latest"}
EARLIER = json.loads((Path(__file__).parent / "earlier" / "restarted.json").read_text())


def spec(**more: Any) -> ServiceSpec:
    base = {"model": {"source": "pvc://models/tiny"}, "resources": {"memory": "2Gi"}}
    meta = {"name": "chat", "namespace": "ns", "uid": "u", "generation": 3}
    return parse({"metadata": meta, "spec": {**base, **more}})


class Service:
    """The revisions of a service, of which the one that was asked for last is the stable one."""

    def __init__(self, default: str = ONE) -> None:
        self.default = default
        self.existing: list[Revision] = []
        self.stable = ""

    def ask(self, accept: bool = True, **fields: Any) -> Revision:
        found = wanted(spec(**fields), self.existing, self.default, self.stable)
        if found not in self.existing:
            self.existing.append(found)
        self.stable = found.name if accept else self.stable
        return found


def test_a_new_restarted_at_makes_a_revision_with_the_same_image() -> None:
    service = Service()
    first = service.ask()
    service.default = TWO
    second = service.ask(restartedAt=NOON)
    third = service.ask(restartedAt=LATER)
    assert len({first.name, second.name, third.name}) == 3
    assert {first.image, second.image, third.image} == {ONE}


def test_removing_restarted_at_restarts_nothing() -> None:
    """Also where the revision of before the restart is still known, and after a change."""
    service = Service()
    service.ask()
    restarted = service.ask(restartedAt=NOON)
    assert service.ask() == restarted
    bigger = service.ask(restartedAt=NOON, **BIGGER)
    assert service.ask(**BIGGER) == bigger
    assert service.ask(restartedAt=NOON, **BIGGER) == bigger, "the same value asks for nothing"


def test_a_restart_tries_a_rejected_revision_again() -> None:
    service = Service()
    service.ask()
    rejected = service.ask(accept=False, **BIGGER)
    assert service.ask(accept=False, **BIGGER) == rejected
    again = service.ask(accept=False, restartedAt=NOON, **BIGGER)
    assert again.name != rejected.name
    assert service.ask(accept=False, **BIGGER) == again, "the try goes on without the field"


def test_pinned_keeps_the_image_of_the_stable_revision() -> None:
    """Also for another spec, and for one of before, which had an older image."""
    service = Service()
    first = service.ask()
    service.default = TWO
    assert service.ask() == first
    assert service.ask(**BIGGER).image == ONE
    upgraded = service.ask(**LATEST, **BIGGER)
    assert upgraded.image == TWO
    service.default = THREE
    assert service.ask().image == TWO
    assert service.ask(restartedAt=NOON).image == TWO


def test_latest_follows_the_default_image_and_removing_it_keeps_the_image() -> None:
    service = Service()
    first = service.ask()
    assert service.ask(**LATEST) == first
    service.default = TWO
    second = service.ask(**LATEST)
    assert (second.image, second.name != first.name) == (TWO, True)
    service.default = THREE
    assert service.ask() == second
    assert service.ask(upgradePolicy="Pinned") == second
    assert service.ask(**LATEST).image == THREE


def test_latest_that_was_rejected_stays_so_until_the_next_default_image() -> None:
    service = Service()
    first = service.ask()
    service.default = TWO
    rejected = service.ask(accept=False, **LATEST)
    assert service.ask(accept=False, **LATEST) == rejected
    assert service.ask(accept=False) == first, "without it the stable revision is wanted"
    service.default = THREE
    assert service.ask(accept=False, **LATEST).image == THREE


def test_another_kind_of_device_takes_the_default_image_of_its_kind() -> None:
    service = Service()
    service.ask()
    service.default = TWO
    with_gpu = {"memory": "4Gi", "gpus": 1}
    assert service.ask(resources=with_gpu).image == TWO
    service.default = THREE
    assert service.ask(resources={**with_gpu, "gpus": 2}).image == TWO


def test_a_rollout_that_an_earlier_operator_began_goes_on() -> None:
    """It gave each new revision its default image."""
    service = Service()
    first = replace(service.ask(), images=None)
    service.existing = [first]
    candidate = Revision("ccccc", TWO, spec(**BIGGER).inputs_json, 2)
    service.existing.append(candidate)
    assert service.ask(accept=False, **BIGGER) == candidate
    assert service.ask() == first


@pytest.mark.parametrize("case", EARLIER, ids=["restart", "upgrade", "both"])
@pytest.mark.parametrize("annotated", [True, False])
def test_what_an_annotation_asked_of_an_earlier_operator_stays_done(
    case: dict[str, Any], annotated: bool
) -> None:
    """The operator's upgrade restarts no pod, and neither does the removal of the annotation."""
    body = json.loads(json.dumps(case["body"]))
    if not annotated:
        del body["metadata"]["annotations"]
    states = {
        item["metadata"]["labels"]["kvline.dev/revision"]: revision_state.read(item)
        for item in case["stored"]
    }
    stable = revision_state.stable(states)
    assert stable == case["stored"][-1]["metadata"]["labels"]["kvline.dev/revision"]
    for name, item in zip(states, case["stored"], strict=True):
        assert is_hash(name, item["data"]["inputs"], item["data"]["image"]), "as it was"
    stored = known(case["stored"])
    assert wanted(parse(body), stored, THREE, stable).name == stable
    assert parse(body).policy == case["policy"]
    asked = case["body"]["metadata"]["annotations"].get("kvline.dev/restart")
    if asked:  # as the documentation says: the annotation's value becomes the field's
        body["spec"]["restartedAt"] = asked
        assert wanted(parse(body), stored, THREE, stable).name == stable
    body["spec"]["restartedAt"] = NOON
    again = wanted(parse(body), stored, THREE, stable)
    assert again.name not in states and again.image == case["stored"][-1]["data"]["image"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"upgradePolicy": "Weekly"}, "spec.upgradePolicy must be Pinned or Latest, got 'Weekly'"),
        ({"rollout": {"strategy": "Canary"}}, "spec.rollout.strategy must be Surge or Replace or"),
        ({"rollout": {"onFailure": "Retry"}}, "spec.rollout.onFailure must be Rollback or Hold"),
        ({"capacity": {"reuse": "Once"}}, "spec.capacity.reuse must be Auto or Never"),
    ],
)
def test_a_value_of_a_newer_definition_is_refused_by_its_field(
    given: dict[str, Any], why: str
) -> None:
    with pytest.raises(SpecError, match=why):
        spec(**given)


def test_a_pause_and_a_promotion_are_no_policy() -> None:
    """An expired candidate is tried again under another policy; a pause is none."""
    for given in ({}, {"strategy": "Recreate", "minCapacityPercent": 90}):
        plain = spec(rollout=given) if given else spec()
        for act in ({"paused": True}, {"paused": False}, {"promote": "bbbbb"}):
            assert spec(rollout={**given, **act}).policy == plain.policy
            assert spec(rollout={**given, **act}).inputs == plain.inputs
    assert spec(rollout={"paused": True}).rollout.paused
    assert spec(rollout={"promote": "bbbbb"}).rollout.promote == "bbbbb"
    assert spec(rollout={"strategy": "Recreate"}).policy != spec().policy

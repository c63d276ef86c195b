"""What `kubectl kvline` writes into a spec, and what it refuses to."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from services import ready_pod

from kvline_contract.launch import Images
from kvline_contract.memory import Memory, MemoryV1, Part
from kvline_contract.names import CLI_FIELD_MANAGER
from kvline_kubectl import act
from kvline_kubectl.act import Patch
from kvline_kubectl.cluster import Problem
from kvline_operator.api.spec import parse
from kvline_operator.plan.revisions import wanted
from kvline_operator.report.status_cache import RevisionEntry
from kvline_operator.store.capacity_status import CapacityStatus
from kvline_operator.store.revision_state import RevisionState

NOW = "2026-11-26T12:00:00Z"
ONE, TWO = (f"registry.example/server@sha256:{c * 64}" for c in "ab")
BASE = {"model": {"source": "pvc://models/tiny"}, "resources": {"memory": "2Gi"}}
HELD = {"revision": "bbbbb", "result": "Held", "message": "b-1 has no node"}


def body(status: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    meta = {"name": "chat", "namespace": "ns", "uid": "u", "generation": 3}
    return {"metadata": meta, "spec": {**BASE, **spec}, "status": {"rollout": status or {}}}


def after(given: dict[str, Any], patch: Patch) -> dict[str, Any]:
    """The spec as the API server would have it."""
    (only,) = patch
    assert (only["op"], only["path"]) == ("add", "/spec")
    return dict(copy.deepcopy(only["value"]))


def entry(
    name: str, number: int, image: str = ONE, accepted: int = 0, **more: Any
) -> RevisionEntry:
    return RevisionEntry(
        name, number, image, "", {**BASE, **more}, RevisionState(accepted=accepted)
    )


def test_no_verb_is_an_annotation_and_no_other_field_changes() -> None:
    rolled = {"strategy": "Recreate"}
    given = body({"imageOutdated": True}, rollout=rolled, replicas=2)
    plain = given["spec"]
    assert after(given, act.pause(given)) == {**plain, "rollout": {**rolled, "paused": True}}
    assert after(given, act.restart(given, NOW)) == {**plain, "restartedAt": NOW}
    assert after(given, act.upgrade(given)) == {**plain, "upgradePolicy": "Latest"}
    paused = body(rollout={**rolled, "paused": True}, replicas=2)
    assert after(paused, act.resume(paused)) == plain
    alone = body(rollout={"paused": True})
    assert after(alone, act.resume(alone)) == BASE, "an empty spec.rollout goes too"


def test_flux_leaves_what_the_plugin_writes() -> None:
    """It takes out the fields of managers whose name begins with kubectl."""
    assert not CLI_FIELD_MANAGER.startswith("kubectl")


def test_what_changes_nothing_is_refused() -> None:
    for write, given, why in (
        (act.pause, body(rollout={"paused": True}), "paused is true already"),
        (act.resume, body(rollout={"paused": False}), "paused is not true"),
        (act.upgrade, body(image=ONE), "has spec.image"),
        (act.upgrade, body(upgradePolicy="Latest"), "is Latest already"),
    ):
        with pytest.raises(Problem, match=why):
            write(given)


def test_a_service_may_follow_the_default_image_before_there_is_a_newer_one() -> None:
    """spec.upgradePolicy is a policy: for a current service, and before a first revision."""
    for given in (body({"imageOutdated": False}), {**body(), "status": {}}):
        assert after(given, act.upgrade(given)) == {**BASE, "upgradePolicy": "Latest"}


def test_promote_names_the_revision_and_refuses_one_that_was_never_measured() -> None:
    history = (entry("bbbbb", 2), entry("aaaaa", 1, accepted=1))
    given = body({"candidateRevision": "bbbbb", "gate": {**HELD, "measured": 1000}})
    named, patch = act.promote(given, history, None)
    assert (named, after(given, patch)) == ("bbbbb", {**BASE, "rollout": {"promote": "bbbbb"}})
    unmeasured = body({"candidateRevision": "bbbbb", "gate": HELD})
    with pytest.raises(Problem, match=r"no replica of revision bbbbb .* measured: b-1 has no node"):
        act.promote(unmeasured, history, None)
    with pytest.raises(Problem, match="no revision zzzzz; revisions: bbbbb, aaaaa"):
        act.promote(given, history, "zzzzz")
    asked = body(given["status"]["rollout"], rollout={"promote": "bbbbb"})
    with pytest.raises(Problem, match="is bbbbb already; to promote it again, remove the field"):
        act.promote(asked, history, None)


def test_a_refusal_of_the_operator_is_the_command_s() -> None:
    refused = {"type": "UpToDate", "status": "False", "reason": "PromotionRefused", "message": "no"}
    assert act.refused({"status": {"conditions": [refused]}}) == "no"
    assert act.refused({"status": {"conditions": [{**refused, "reason": "RollingOut"}]}}) == ""


def test_rollback_takes_away_what_would_lead_back_again() -> None:
    history = (
        entry("bbbbb", 2, TWO, accepted=2, engine={"maxModelLen": 512}),
        entry("aaaaa", 1, accepted=1),
    )
    given = body(
        {"stableRevision": "bbbbb"},
        engine={"maxModelLen": 512},
        upgradePolicy="Latest",
        rollout={"promote": "bbbbb", "strategy": "Recreate"},
        replicas=3,
    )
    name, patch = act.rollback(given, history, None)
    assert (name, after(given, patch)) == (
        "aaaaa",
        {**BASE, "replicas": 3, "rollout": {"strategy": "Recreate"}, "image": ONE},
    )


def test_rollback_of_a_candidate_names_no_image() -> None:
    """The stable revision's image stays by itself."""
    history = (entry("bbbbb", 2, TWO), entry("aaaaa", 1, accepted=1))
    given = body({"stableRevision": "aaaaa", "candidateRevision": "bbbbb"}, upgradePolicy="Latest")
    assert after(given, act.rollback(given, history, None)[1]) == BASE


@pytest.mark.parametrize(
    ("target", "stable", "named"),
    [
        (None, Images.REQUIRED, ["text"]),
        (Images.IF_SERVED, None, ["text", "image"]),
        (Images.IF_SERVED, Images.REQUIRED, None),
        (None, None, None),
    ],
)
def test_rollback_names_modalities_where_without_them_the_stable_revision_s_would_stay(
    target: Images | None, stable: Images | None, named: list[str] | None
) -> None:
    smaller: dict[str, Any] = {"engine": {"maxModelLen": 512}}
    history = (
        replace(entry("bbbbb", 2, accepted=2, **smaller), images=stable),
        replace(entry("aaaaa", 1, accepted=1), images=target),
    )
    given = body({"stableRevision": "bbbbb"}, **smaller)
    name, patch = act.rollback(given, history, None)
    wanted = {**BASE, **({"engine": {"modalities": named}} if named else {})}
    assert (name, after(given, patch)) == ("aaaaa", wanted)


def test_rollback_asks_for_no_encoder_that_the_revision_s_model_did_not_have() -> None:
    """It was served as text, which the stable revision is too."""
    text: dict[str, Any] = {"engine": {"modalities": ["text"], "maxModelLen": 512}}
    now = entry("bbbbb", 2, accepted=2, **text)
    capacity = CapacityStatus.of([ready_pod().report])
    past = replace(
        entry("aaaaa", 1, accepted=1),
        images=Images.IF_SERVED,
        state=RevisionState(accepted=1, capacity=capacity),
    )
    given = body({"stableRevision": "bbbbb"}, **text)
    assert after(given, act.rollback(given, (now, past), None)[1]) == BASE


def test_rollback_to_images_that_were_served_is_the_revision_of_then() -> None:
    """Also from one that was to serve images where it could, and served text."""
    served = CapacityStatus.of([ready_pod().report])
    assert served is not None
    total = served.memory.total_mib + 100
    parts = (*served.memory.upgraded().parts, Part("tower", 100))
    sees = replace(served, memory=MemoryV1.of(Memory(total, parts)))
    smaller: dict[str, Any] = {"engine": {"maxModelLen": 512}}
    now, past = (
        replace(each, images=Images.IF_SERVED, state=replace(each.state, capacity=capacity))
        for each, capacity in (
            (entry("bbbbb", 2, accepted=2, **smaller), served),
            (entry("aaaaa", 1, accepted=1), sees),
        )
    )
    given = body({"stableRevision": "bbbbb"}, **smaller)
    found = after(given, act.rollback(given, (now, past), None)[1])
    assert found == {**BASE, "engine": {"modalities": ["text", "image"]}}
    revisions = [now.revision, past.revision]
    assert wanted(parse({**given, "spec": found}), revisions, ONE, "bbbbb").name == "aaaaa"


def test_a_restart_is_nothing_to_go_back_from() -> None:
    smaller: dict[str, Any] = {"engine": {"maxModelLen": 512}}
    history = (
        entry("ccccc", 3, accepted=3, restartedAt=NOW, **smaller),
        entry("bbbbb", 2, accepted=2, **smaller),
        entry("aaaaa", 1, accepted=1),
    )
    given = body({"stableRevision": "ccccc"}, restartedAt=NOW, **smaller)
    name, patch = act.rollback(given, history, None)
    assert (name, after(given, patch)) == ("aaaaa", BASE)
    with pytest.raises(Problem, match="no earlier accepted revision"):
        act.rollback(given, history[:2], None)
    settled = body({"stableRevision": "ccccc"}, **smaller)
    with pytest.raises(Problem, match="that of revision bbbbb already"):
        act.rollback(settled, history, "bbbbb")

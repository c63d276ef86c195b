"""`kubectl kvline` with a real API server and operator: output and effect of its commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playground import manifest
from rolling import Service, up_to_date

from kvline_contract.names import CLI_FIELD_MANAGER
from kvline_kubectl import act
from kvline_kubectl.cluster import Problem, connect
from kvline_operator.report.status_cache import RevisionEntry
from kvline_operator.store.revision_state import RevisionState

pytestmark = pytest.mark.integration

DIGEST, NEXT = (f"localhost/kvline-server@sha256:{c * 64}" for c in "bc")


@pytest.fixture
def say(space: Any) -> Callable[..., Any]:
    run: Callable[..., Any] = space.kvline
    return run


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"engine": {"maxModelLn": 5}}, 'unknown field "spec.engine.maxModelLn"'),
    ({"drainSeconds": 4000}, "spec.drainSeconds: Invalid value: 4000: "),
]


@pytest.mark.parametrize(("spec", "line"), WRONG)
@pytest.mark.parametrize("exists", [False, True])
def test_a_field_that_is_wrong_in_a_file_is_one_line(
    space: Any, tmp_path: Path, spec: dict[str, Any], line: str, exists: bool
) -> None:
    """Where kubectl apply prints the object that it was to change first."""
    if exists:
        space.apply()
    file = tmp_path / "chat.json"
    file.write_text(manifest(**spec))
    done = space.kvline("check", "-f", str(file), check=False)
    assert done.returncode == 3 and done.stderr == ""
    result, shown = done.stdout.splitlines()
    assert result == "Rejected" and shown.startswith(f"{file}: {line}") and len(shown) < 250
    file.write_text(manifest())
    assert "Invalid" not in space.kvline("check", "-f", str(file), check=False).stderr


def test_a_rejected_spec_is_explained_and_rolled_back(
    service: Service, say: Callable[..., Any]
) -> None:
    first = service.stable()
    service.space.apply(replicas=2, engine={"maxModelLen": 512})
    second = service.candidate()
    service.tokens[second] = 1000
    service.until_reason("RevisionRejected")

    listed = say("status").stdout
    assert "chat" in listed and "2/2" in listed and "4,096" in listed and "8,192" in listed
    one = say("status", "chat").stdout
    assert "weights" in one and "█" in one and f"gate of revision {second}: Rejected" in one
    assert "UpToDate" in one and "CapacityValidated" not in one

    explained = say("explain", "chat").stdout
    assert explained.startswith("chat serves.")
    assert explained.count("RevisionRejected") == 2  # condition and event
    assert "UpToDate: RevisionRejected" in explained and "2892 short" in explained
    assert "do:   change the spec, or promote" in explained

    plain = json.loads(say("explain", "chat", "-o", "json").stdout)
    assert {"conditions", "capacity", "events"} <= set(plain) and plain["capacity"]["kvTokens"]

    past = say("history", "chat").stdout.splitlines()
    newest = next(line for line in past if second in line)
    assert newest.count("Rejected") == 2 and "1,000" in newest and "3,892" in newest
    assert "engine.maxModelLen: absent -> 512" in newest
    assert "Accepted" in next(line for line in past if first in line)
    plain = json.loads(say("history", "chat", "-o", "json").stdout)
    assert [p["revision"] for p in plain] == [second, first]
    assert plain[0]["measured"] == 1000 and plain[0]["inputs"]["engine"] == {"maxModelLen": 512}

    assert f"revision {first}" in say("rollback", "chat").stdout
    service.until_reason("UpToDate")
    assert "engine" not in service.space.get("kvl", "chat")["spec"]
    assert service.space.get("kvl", "chat")["spec"]["replicas"] == 2
    again = say("rollback", "chat", first, check=False)
    assert again.returncode == 1 and f"that of revision {first} already" in again.stderr


def test_promote_takes_what_was_rejected(service: Service, say: Callable[..., Any]) -> None:
    nothing = say("promote", "chat", check=False)
    assert nothing.returncode == 1 and "nothing to promote" in nothing.stderr
    service.space.apply(replicas=2, engine={"maxModelLen": 512})
    second = service.candidate()
    service.tokens[second] = 1000
    service.until_reason("RevisionRejected")
    assert f"revision {second}" in say("promote", "chat").stdout
    service.until(lambda s: up_to_date(s).get("status") == "True")
    assert service.stable() == second
    # Back to the revision before, though both pass the gate now.
    say("rollback", "chat")
    service.until(lambda s: s["rollout"]["stableRevision"] != second)


def test_upgrade_takes_the_new_default_image_through_the_gate(
    service: Service, operator: Any, say: Callable[..., Any]
) -> None:
    first = service.stable()
    _restart(operator, DIGEST)
    service.until(lambda s: s["rollout"]["imageOutdated"])
    assert service.stable() == first and len(service.pods_of(first)) == 2  # F41: no pod moved

    say("upgrade", "chat")
    second = service.candidate()
    (pod,) = service.until_pods(second, 1)
    assert pod["spec"]["containers"][0]["image"] == DIGEST
    service.tokens[second] = 4096
    service.until(lambda s: s["rollout"]["stableRevision"] == second)
    service.until_reason("UpToDate")
    assert not service.poll()["rollout"]["imageOutdated"]

    _restart(operator, NEXT)  # it follows without a word
    third = service.candidate()
    service.tokens[third] = 4096
    service.until(lambda s: s["rollout"]["stableRevision"] == third)
    # And back: the spec then names the image of before, and follows no more.
    say("rollback", "chat")
    service.until(lambda s: s["rollout"]["stableRevision"] == second)
    spec = service.space.get("kvl", "chat")["spec"]
    assert spec["image"] == DIGEST and "upgradePolicy" not in spec


def _restart(operator: Any, image: str) -> None:
    operator.stop()
    operator.words = ["--default-image", image]
    operator.start()


def test_what_cannot_be_done_is_reported_in_a_line(space: Any, say: Callable[..., Any]) -> None:
    for words, text in (
        (["explain", "nobody"], "no InferenceService nobody in namespace"),
        (["size"], "exactly one of NAME and -f FILE is required"),
        (["size", "-f", "/nowhere.yaml"], "No such file"),
        (["status", "--context", "moon"], "no usable kubeconfig"),
    ):
        done = say(*words, check=False)
        assert done.returncode == 1
        assert text in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert "no InferenceService" in say("status").stderr
    space.apply("lonely")  # no operator runs
    assert "is the operator running?" in say("explain", "lonely").stdout
    unknown = say("rollback", "lonely", "zzzzz", check=False)
    assert "no revision zzzzz; revisions: none" in unknown.stderr


def test_a_change_in_between_is_not_undone(space: Any) -> None:
    """The spec that was read is the patch's precondition; the status, which the operator writes all
    through a rollout, is not. Text that JSON can escape changes nothing."""
    history = (RevisionEntry("aaaaa", 1, "", "", {}, RevisionState(accepted=1)),)
    escaped = {"podMetadata": {"annotations": {"team": "f\u00fcr <a> & \u2013"}}}
    space.apply(**escaped)
    mine = connect(None, str(space.cluster.kubeconfig), space.name)
    read = mine.service("chat")
    patch = act.promote(read, history, "aaaaa")[1]
    space.apply(replicas=2, **escaped)
    with pytest.raises(Problem, match="has changed meanwhile"):
        mine.patch(read, patch)
    assert space.get("kvl", "chat")["spec"]["replicas"] == 2

    read = mine.service("chat")
    status = '{"status": {"observedGeneration": 2}}'
    space.kubectl("patch", "kvl", "chat", "--subresource=status", "--type=merge", "-p", status)
    version = space.get("kvl", "chat")["metadata"]["resourceVersion"]
    assert version != read["metadata"]["resourceVersion"]
    patch = act.promote(read, history, "aaaaa")[1]
    mine.patch(read, patch)
    after = space.kubectl("get", "kvl", "chat", "-o", "json", "--show-managed-fields")
    assert json.loads(after.stdout)["spec"]["rollout"] == {"promote": "aaaaa"}
    written = [m["manager"] for m in json.loads(after.stdout)["metadata"]["managedFields"]]
    assert written.count(CLI_FIELD_MANAGER) == 1
    with pytest.raises(Problem, match="has changed meanwhile"):
        mine.patch(read, patch)

"""Changes by others in our objects: found by field manager, not confused with defaults."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kvline_contract.names import FIELD_MANAGER
from kvline_operator.apply.drift import (
    LIMIT,
    MOST,
    WINDOW,
    Corrections,
    Foreign,
    foreign,
    removal,
    without,
)
from kvline_operator.apply.ensure import End, ensure
from kvline_operator.kube import Kube

WANTED: dict[str, Any] = {
    "kind": "Deployment",
    "metadata": {"name": "chat-aaaaa"},
    "spec": {
        "replicas": 1,
        "template": {
            "metadata": {"labels": {"a": "b"}},
            "spec": {"containers": [{"name": "server", "env": [{"name": "HOME", "value": "/x"}]}]},
        },
    },
}
OURS = {
    "manager": FIELD_MANAGER,
    "operation": "Apply",
    "fieldsV1": {"f:spec": {"f:replicas": {}}},
}


def live(manager: str, fields: dict[str, Any], **entry: str) -> dict[str, Any]:
    body = copy.deepcopy(WANTED)
    pod = body["spec"]["template"]
    pod["metadata"]["annotations"] = {"kubectl.kubernetes.io/restartedAt": "now"}
    pod["spec"]["dnsPolicy"] = "ClusterFirst"  # a default, without a field manager
    (server,) = pod["spec"]["containers"]
    server["env"] = [{"name": "X", "value": "1"}, *server["env"], {"name": "Y", "value": "2"}]
    pod["spec"]["containers"].insert(0, {"name": "spy", "image": "spy"})
    body["spec"]["minReadySeconds"] = 5
    theirs = {"manager": manager, "operation": "Update", "fieldsV1": {"f:spec": fields}, **entry}
    body["metadata"] |= {"uid": "u", "resourceVersion": "7", "managedFields": [OURS, theirs]}
    return body


def owned(body: dict[str, Any]) -> dict[str, Any]:
    owner = {"name": "chat", "uid": "u", "controller": True}
    meta = {**body["metadata"], "namespace": "ns", "ownerReferences": [owner]}
    return {**body, "metadata": meta}


class Writes(Kube):
    """What would be written, and an API server that answers with `answer`."""

    def __init__(self, answer: dict[str, Any] | None = None) -> None:
        self.sent: list[Any] = []
        self.answer = answer or {}

    def apply(self, *words: Any, **how: Any) -> dict[str, Any]:
        self.sent.append(words)
        return self.answer


FIELDS = {
    "f:minReadySeconds": {},
    "f:replicas": {},
    "f:template": {
        "f:metadata": {"f:annotations": {".": {}, "f:kubectl.kubernetes.io/restartedAt": {}}},
        "f:spec": {
            "f:containers": {
                'k:{"name":"spy"}': {".": {}, "f:image": {}, "f:name": {}},
                'k:{"name":"server"}': {
                    "f:env": {
                        'k:{"name":"X"}': {".": {}, "f:name": {}, "f:value": {}},
                        'k:{"name":"Y"}': {".": {}, "f:name": {}, "f:value": {}},
                        'k:{"name":"gone"}': {".": {}},
                    },
                    "f:image": {},
                },
            }
        },
    },
}


def test_what_only_others_set_in_a_pod_template_is_foreign() -> None:
    """F22."""
    body = live("meddler", FIELDS)
    found = foreign(body, WANTED)
    assert {(f.path, f.manager) for f in found} == {
        ("spec.template.metadata.annotations", "meddler"),
        ("spec.template.spec.containers[server].env[X]", "meddler"),
        ("spec.template.spec.containers[server].env[Y]", "meddler"),
        ("spec.template.spec.containers[spy]", "meddler"),
    }
    cleaned = without(body, found)
    assert cleaned["spec"]["template"]["spec"].pop("dnsPolicy") == "ClusterFirst"
    assert cleaned["spec"].pop("minReadySeconds") == 5  # restarts no pod, so it stays
    assert cleaned["spec"] == WANTED["spec"]


def test_the_patch_takes_later_items_first_and_only_of_the_version_that_was_read() -> None:
    steps = [
        op["path"] for op in removal(live("m", FIELDS), foreign(live("m", FIELDS), WANTED), WANTED)
    ]
    env = "/spec/template/spec/containers/1/env"
    assert steps[0] == "/metadata/resourceVersion"
    assert steps.index(f"{env}/2") < steps.index(f"{env}/0")
    assert steps.index(f"{env}/0") < steps.index("/spec/template/spec/containers/0")


def test_a_list_that_would_be_empty_is_replaced_beside_an_item_that_shifts_it() -> None:
    """A sidecar, which a strategic patch puts first, and another name of the only variable."""
    body = copy.deepcopy(WANTED)
    (server,) = body["spec"]["template"]["spec"]["containers"]
    server["env"] = [{"name": "OTHER", "value": "/x"}]
    body["spec"]["template"]["spec"]["containers"].insert(0, {"name": "spy", "image": "spy"})
    env: dict[str, Any] = {'k:{"name":"OTHER"}': {".": {}, "f:name": {}, "f:value": {}}}
    items = {'k:{"name":"spy"}': {".": {}}, 'k:{"name":"server"}': {"f:env": env}}
    fields = {"f:spec": {"f:template": {"f:spec": {"f:containers": items}}}}
    theirs = {"manager": "m", "operation": "Update", "fieldsV1": fields}
    body["metadata"] |= {"uid": "u", "resourceVersion": "7", "managedFields": [OURS, theirs]}
    found = foreign(body, WANTED)
    _, replaced, removed = removal(body, found, WANTED)
    containers = "/spec/template/spec/containers"
    wanted = WANTED["spec"]["template"]["spec"]["containers"][0]["env"]
    assert replaced == {"op": "replace", "path": f"{containers}/1/env", "value": wanted}
    assert removed == {"op": "remove", "path": f"{containers}/0"}


def test_a_pointer_escapes_what_has_a_meaning_in_it() -> None:
    one = Foreign(("spec", "a/b~c"), "", "")
    assert removal(live("m", {}), (one,), WANTED)[1]["path"] == "/spec/a~1b~0c"


def test_our_own_fields_the_status_and_the_scale_are_not_foreign() -> None:
    assert foreign(live(FIELD_MANAGER, FIELDS, operation="Apply"), WANTED) == ()
    assert foreign(live("m", FIELDS, subresource="status"), WANTED) == ()


def test_what_the_api_server_puts_into_our_own_writes_is_left() -> None:
    """A default that is back after somebody's value was taken away, or a webhook's label: nothing
    is written for it, and no list of ours is unequal for ever."""
    kube = Writes()
    body = owned(live(FIELD_MANAGER, FIELDS))
    assert all(item.admitted for item in foreign(body, WANTED))
    assert ensure(kube, owned(WANTED), body) == ()
    assert kube.sent == []


@pytest.mark.parametrize(("kind", "found"), [("PodDisruptionBudget", 1), ("Service", 0)])
def test_all_of_a_disruption_budget_is_ours(kind: str, found: int) -> None:
    """maxUnavailable beside our minAvailable is refused, and nothing else would be written."""
    wanted = {"kind": kind, "metadata": {}, "spec": {"minAvailable": 1}}
    fields: dict[str, Any] = {"f:spec": {"f:maxUnavailable": {}}}
    entry = {"manager": "kubectl-edit", "operation": "Update", "fieldsV1": fields}
    body = {"metadata": {"managedFields": [entry]}, "spec": {"maxUnavailable": 1}}
    assert [f.path for f in foreign(body, wanted)] == ["spec.maxUnavailable"] * found


def test_what_two_have_set_is_still_a_stranger_s() -> None:
    body = live("meddler", FIELDS)
    (theirs,) = body["metadata"]["managedFields"][1:]
    body["metadata"]["managedFields"].insert(0, {**theirs, "manager": FIELD_MANAGER})
    assert {item.manager for item in foreign(body, WANTED)} == {"meddler"}


def test_a_correction_is_made_so_often_and_after_an_hour_again() -> None:
    now = [0.0]
    corrections = Corrections(lambda: now[0])
    for _ in range(LIMIT):
        assert not corrections.exhausted("u", WANTED, "a")
        corrections.add("u", WANTED, ["a"])
    assert corrections.exhausted("u", WANTED, "a")
    assert not corrections.exhausted("other", WANTED, "a")
    assert not corrections.exhausted("u", WANTED, "b"), "another change is corrected all the same"
    assert not corrections.exhausted("u", {**WANTED, "spec": {}}, "a"), "so is one of another wish"
    now[0] += WINDOW + 1
    assert not corrections.exhausted("u", WANTED, "a")


def test_one_who_sets_another_field_each_time_is_tolerated_in_the_end() -> None:
    corrections = Corrections()
    for index in range(MOST):
        assert not corrections.exhausted("u", WANTED, str(index))
        corrections.add("u", WANTED, [str(index)])
    assert corrections.exhausted("u", WANTED, "another")


def test_an_edit_of_many_fields_is_corrected_once() -> None:
    corrections = Corrections()
    fields = [str(index) for index in range(2 * MOST)]
    corrections.add("u", WANTED, fields)
    assert not any(corrections.exhausted("u", WANTED, field) for field in fields)


def test_what_goes_to_and_fro_by_our_own_wish_is_no_dispute() -> None:
    corrections = Corrections()
    for _ in range(3 * LIMIT):
        for wanted in (WANTED, {**WANTED, "spec": {"replicas": 2}}):
            assert not corrections.exhausted("u", wanted, "a")
            corrections.add("u", wanted, ["a"])


@pytest.mark.fault("F75", shows="beside a tolerated change another field is set back and reported")
def test_beside_a_tolerated_change_others_are_set_back_and_reported() -> None:
    """One manager that sets a field each time lets no other change anything else."""
    corrections, kube = Corrections(), Writes(with_image())
    kube.answer["metadata"] |= {"uid": "u", "resourceVersion": "8"}
    for _ in range(LIMIT):
        ensure(kube, with_image(), changed_image("kubectl-set"), corrections=corrections)
    both = changed_image("kubectl-set")
    both["spec"]["replicas"] = 9
    (ours,) = (e for e in both["metadata"]["managedFields"] if e["manager"] == FIELD_MANAGER)
    both["metadata"]["managedFields"].remove(ours)
    both["metadata"]["managedFields"].append({**ours, "manager": "kubectl-patch"})
    sent = len(kube.sent)
    kept, set_back = ensure(kube, with_image(), both, corrections=corrections)
    assert kept.end is End.TOLERATED and "image (set by kubectl-set)" in kept.text
    assert set_back.end is End.REMOVED
    assert set_back.text == "Deployment chat-aaaaa: spec.replicas (set by kubectl-patch)"
    assert len(kube.sent) == sent + 1


def test_who_scales_by_the_subresource_is_named() -> None:
    body = owned(copy.deepcopy(WANTED))
    body["spec"]["replicas"] = 9
    fields: dict[str, Any] = {"f:spec": {"f:replicas": {}}}
    theirs = {"manager": "kubectl", "operation": "Update", "subresource": "scale"}
    body["metadata"] |= {"uid": "u", "resourceVersion": "7"}
    body["metadata"]["managedFields"] = [{**theirs, "fieldsV1": fields}]
    kube = Writes(owned(WANTED))
    kube.answer["metadata"] |= {"uid": "u", "resourceVersion": "8"}
    (reported,) = ensure(kube, owned({**WANTED, "spec": {**WANTED["spec"], "replicas": 1}}), body)
    assert reported.end is End.REMOVED and "spec.replicas (set by kubectl)" in reported.text


def changed_image(manager: str = "") -> dict[str, Any]:
    """A Deployment whose image is another's, by this field manager or, without one, admission."""
    body = copy.deepcopy(WANTED)
    (server,) = body["spec"]["template"]["spec"]["containers"]
    server |= {"image": "mirror/server", "imagePullPolicy": "Always"}
    image: dict[str, Any] = {"f:containers": {'k:{"name":"server"}': {"f:image": {}}}}
    fields = {"f:spec": {"f:template": {"f:spec": image}}}
    theirs = {"manager": manager, "operation": "Update", "fieldsV1": fields}
    entries = [OURS, theirs] if manager else [OURS]
    status = {"manager": "kube-controller-manager", "operation": "Update", "subresource": "status"}
    entries.append({**status, "fieldsV1": {"f:status": {"f:replicas": {}}}})
    body["metadata"] |= {"uid": "u", "resourceVersion": "7", "managedFields": entries}
    return owned(body)


def with_image(image: str = "registry/server") -> dict[str, Any]:
    body = copy.deepcopy(WANTED)
    body["spec"]["template"]["spec"]["containers"][0]["image"] = image
    return owned(body)


def test_what_admission_makes_of_a_write_stays_and_is_written_once() -> None:
    live, corrections = changed_image(), Corrections()
    kube = Writes(live)
    (first,) = ensure(kube, with_image(), None, absent=True, corrections=corrections)
    assert first.end is End.ADMITTED
    assert 'spec.template.spec.containers[0].image is "mirror/server"' in first.text
    for _ in range(3):
        assert ensure(kube, with_image(), live, corrections=corrections) == ()
    assert len(kube.sent) == 1
    again = ensure(kube, with_image("registry/next"), live, corrections=corrections)
    assert again == () and len(kube.sent) == 2, "another wish is written, which is no news"


def test_what_another_makes_of_what_admission_made_is_corrected() -> None:
    corrections = Corrections()
    ensure(Writes(changed_image()), with_image(), None, absent=True, corrections=corrections)
    later = changed_image("meddler")
    later["spec"]["template"]["spec"]["containers"][0]["image"] = "evil"
    kube = Writes(with_image())
    kube.answer["metadata"] |= {"uid": "u", "resourceVersion": "8"}
    (reported,) = ensure(kube, with_image(), later, corrections=corrections)
    assert reported.end is End.REMOVED and "image (set by meddler)" in reported.text
    assert len(kube.sent) == 1


@pytest.mark.parametrize(
    ("manager", "named", "by_others"),
    [
        ("kubectl-edit", "set by kubectl-edit", True),
        ("", "set by an admission webhook or policy", False),
    ],
)
def test_who_sets_a_field_of_ours_each_time_is_named_rightly(
    manager: str, named: str, by_others: bool
) -> None:
    """And not the controller that writes the status."""
    corrections, kube = Corrections(), Writes(with_image())
    kube.answer["metadata"] |= {"uid": "u", "resourceVersion": "8"}
    for _ in range(LIMIT):
        reported = ensure(kube, with_image(), changed_image(manager), corrections=corrections)
        assert [(each.end, named in each.text) for each in reported] == [
            (End.REMOVED, True)
        ] * by_others
    (last,) = ensure(kube, with_image(), changed_image(manager), corrections=corrections)
    assert last.end is End.TOLERATED and named in last.text


@pytest.mark.parametrize(
    ("kind", "wanted", "live", "fields", "path"),
    [
        ("Service", {"selector": {"a": "b"}}, {"selector": {"a": "b", "c": "d"}},
         {"f:selector": {}}, "spec.selector.c"),
        ("Service", {"selector": {"a": "b"}}, {"publishNotReadyAddresses": True},
         {"f:publishNotReadyAddresses": {}}, "spec.publishNotReadyAddresses"),
        ("NetworkPolicy", {"podSelector": {"matchLabels": {"a": "b"}}},
         {"podSelector": {"matchLabels": {"a": "b", "c": "d"}}}, {"f:podSelector": {}},
         "spec.podSelector.matchLabels.c"),
    ],
)  # fmt: skip
def test_what_takes_pods_from_an_object_that_selects_them_is_foreign(
    kind: str, wanted: Any, live: Any, fields: Any, path: str
) -> None:
    entry = {"manager": "kubectl-patch", "operation": "Update", "fieldsV1": {"f:spec": fields}}
    body = {"metadata": {"managedFields": [entry]}, "spec": {**wanted, **live}}
    found = foreign(body, {"kind": kind, "metadata": {}, "spec": wanted})
    assert [f.path for f in found] == [path]
    assert without(body, found)["spec"] == wanted


APPLIED = {
    "f:replicas": {},
    "f:template": {
        "f:metadata": {"f:labels": {"f:a": {}}},
        "f:spec": {
            "f:containers": {
                'k:{"name":"server"}': {
                    ".": {},
                    "f:name": {},
                    "f:image": {},
                    "f:env": {'k:{"name":"HOME"}': {".": {}, "f:name": {}, "f:value": {}}},
                }
            }
        },
    },
}


def admitted(change: Any) -> dict[str, Any]:
    """As admission made it of our apply: a Deployment with a change that nobody has."""
    body = with_image()
    change(body["spec"])
    entry = {**OURS, "fieldsV1": {"f:spec": copy.deepcopy(APPLIED)}}
    body["metadata"] |= {"uid": "u", "resourceVersion": "7", "managedFields": [entry]}
    return body


def server(spec: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = spec["template"]["spec"]["containers"][0]
    return found


CHANGES: dict[str, Any] = {
    "image": lambda spec: server(spec).update(image="mirror/server"),
    "variable": lambda spec: server(spec)["env"].append({"name": "PROXY", "value": "x"}),
    "sidecar": lambda spec: spec["template"]["spec"]["containers"].append({"name": "mesh"}),
}


@pytest.mark.parametrize("how", CHANGES)
def test_what_admission_made_of_a_template_restarts_no_pod_after_a_restart(how: str) -> None:
    """Of the operator, which remembers nothing, and with a webhook that is gone since."""
    kube, live = Writes(with_image()), admitted(CHANGES[how])
    assert ensure(kube, with_image(), live) == ()
    assert not kube.sent
    more = with_image()
    more["spec"]["replicas"] = 2
    kube.answer["metadata"] |= {"uid": "u", "resourceVersion": "8"}
    ensure(kube, more, live)
    ((written,),) = kube.sent
    assert written["spec"] == {**live["spec"], "replicas": 2}, "nor does another wish"


@pytest.mark.parametrize("how", ["image", "item taken away", "replicas"])
def test_what_another_changed_in_a_template_is_corrected_after_a_restart(how: str) -> None:
    """Their change has taken the field from our last apply."""
    body = admitted(CHANGES.get(how, lambda spec: None))
    fields = body["metadata"]["managedFields"][0]["fieldsV1"]["f:spec"]
    ours = fields["f:template"]["f:spec"]["f:containers"]['k:{"name":"server"}']
    if how == "item taken away":
        server(body["spec"])["env"].clear()
        del ours["f:env"]
    elif how == "replicas":  # a wish that changes: nothing tells whose the other value is
        body["spec"]["replicas"] = 7
    else:
        del ours["f:image"]
    kube = Writes(with_image())
    kube.answer["metadata"] |= {"uid": "u", "resourceVersion": "8"}
    assert ensure(kube, with_image(), body) == ()
    assert len(kube.sent) == 1

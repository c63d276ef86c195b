"""The Job that downloads the model, or pulls the image and checks the model: its pod, when it is
created, and how it is reported."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from kvline_contract.times import stamp
from kvline_operator.api.spec import ServiceSpec, parse
from kvline_operator.observe.children import Observed
from kvline_operator.observe.pods import view
from kvline_operator.observe.reports import Reading
from kvline_operator.plan import jobs, prepare
from kvline_operator.plan.podspec import pod_template
from kvline_operator.plan.render import controller_revision
from kvline_operator.plan.revisions import Revision
from kvline_operator.settings import Settings

HUB = "hf://org/name@" + "0" * 40
MODEL = {
    "source": HUB,
    "cache": {"claimName": "cache"},
    "tokenSecretRef": {"name": "hub", "key": "token"},
}
SCHEDULING = {
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "runtimeClassName": "nvidia",
    "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}},
}
RESOURCES = {"memory": "16Gi", "gpus": 1}
SETTINGS = Settings("image", pull_secrets=("registry",))
Object = dict[str, Any]
NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)


def made(strategy: str = "Surge", **more: Any) -> ServiceSpec:
    spec = {
        "model": {"source": "pvc://models/tiny"},
        "resources": RESOURCES,
        "scheduling": SCHEDULING,
        "rollout": {"strategy": strategy},
        **more,
    }
    metadata = {"name": "chat", "namespace": "ns", "uid": "u"}
    return parse({"metadata": metadata, "spec": spec})


def stored(spec: ServiceSpec, name: str = "bbbbb") -> Object:
    return controller_revision(spec, Revision(name, "image", spec.inputs_json, 2), SETTINGS)


def secrets(template: Object) -> list[Object]:
    pod = template["spec"]
    containers = [*pod["containers"], *pod.get("initContainers", [])]
    env = [e for c in containers for e in c.get("env", [])]
    return [e["valueFrom"]["secretKeyRef"] for e in env if "secretKeyRef" in e.get("valueFrom", {})]


def test_with_a_cache_the_job_alone_downloads_and_sees_the_token() -> None:
    spec = made(model=MODEL)
    revision = stored(spec)
    assert secrets(revision["data"]["podTemplate"]) == []
    assert "initContainers" not in revision["data"]["podTemplate"]["spec"]
    job = jobs.job(spec, revision)
    assert secrets(job["spec"]["template"]) == [{"name": "hub", "key": "token"}]
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["args"][0] == "download"
    assert {v["name"] for v in pod["volumes"]} == {"launch", "models", "state"}
    assert job["metadata"]["name"] == "chat-bbbbb-prepare"
    assert job["metadata"]["ownerReferences"][0]["uid"] == "u"


def test_without_a_cache_each_pod_downloads_for_itself() -> None:
    spec = made(model={"source": HUB, "tokenSecretRef": MODEL["tokenSecretRef"]})
    revision = stored(spec)
    assert not jobs.downloads(revision)
    assert len(secrets(revision["data"]["podTemplate"])) == 1


def test_a_pod_alone_downloads_for_itself() -> None:
    """With `kubectl kvline size` no operator creates a Job for the pod."""
    spec = made(model=MODEL)
    revision = Revision("size", "image", spec.inputs_json, 0)
    assert len(secrets(pod_template("chat", spec, revision, SETTINGS, alone=True))) == 1


@pytest.mark.parametrize("model", [MODEL, {"source": "pvc://models/tiny"}], ids=["load", "pull"])
def test_its_pod_runs_where_a_replica_would_and_does_not_serve(model: Object) -> None:
    """The Job's pod is restricted like a replica's, without GPU or its runtime class, and not in
    the Service."""
    spec = made(model=model)
    template = jobs.job(spec, stored(spec), ("n1",))["spec"]["template"]
    labels, pod = template["metadata"]["labels"], template["spec"]
    assert "kvline.dev/service" not in labels and labels["kvline.dev/prepares"] == "chat"
    assert pod["nodeSelector"] == {"disk": "fast"}
    # It asks for no GPU, so no admission plug-in lets it onto the nodes that are tainted for them.
    assert pod["tolerations"][1:] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert "runtimeClassName" not in pod and list(pod["affinity"]) == ["nodeAffinity"]
    (near,) = pod["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert near["preference"]["matchFields"][0]["values"] == ["n1"]
    (container,) = pod["containers"]
    assert container["image"] == "image"
    assert "nvidia.com/gpu" not in container["resources"].get("limits", {})
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert jobs.policy(spec, job_of(spec), SETTINGS)["spec"]["podSelector"]["matchLabels"] == {
        "kvline.dev/prepares": "chat"
    }


def test_the_taint_of_another_gpu_resource_is_tolerated_and_none_on_the_cpu() -> None:
    for gpu, keys in (({"gpus": 1, "gpuResource": "amd.com/gpu"}, ["amd.com/gpu"]), ({}, [])):
        spec = made(model=MODEL, resources={"memory": "16Gi", **gpu}, scheduling={})
        pod = jobs.job(spec, stored(spec))["spec"]["template"]["spec"]
        assert [t["key"] for t in pod.get("tolerations", [])] == keys


def test_a_job_claims_no_device() -> None:
    """With a device class nothing is added to the tolerations either: no admission plug-in adds
    one to the revision's own pods."""
    spec = made(resources={"memory": "16Gi", "gpus": 1, "gpuDeviceClass": "gpu.nvidia.com"})
    revision = stored(spec)
    assert "resourceClaims" in revision["data"]["podTemplate"]["spec"]
    pod = jobs.job(spec, revision)["spec"]["template"]["spec"]
    assert "resourceClaims" not in pod and "claims" not in pod["containers"][0]["resources"]
    assert pod["tolerations"] == revision["data"]["podTemplate"]["spec"]["tolerations"]


def deployment(revision: str, replicas: int) -> Object:
    labels = {"kvline.dev/revision": revision}
    return {"metadata": {"labels": labels}, "spec": {"replicas": replicas}}


@pytest.mark.parametrize("strategy", ["Recreate", "Replace"])
def test_a_model_in_a_claim_is_checked_as_the_server_would_find_it(strategy: str) -> None:
    """The Job sees the claim as the server does: at the same path, read-only."""
    spec = made(strategy, model={"source": "pvc://m/x"})
    got = found(spec)
    assert got is not None
    pod = got.job["spec"]["template"]["spec"]
    (container,), volumes = pod["containers"], pod["volumes"]
    assert container["args"] == ["check", "--config=/etc/kvline/launch/launch.json"]
    mounts = container["volumeMounts"]
    of_server = stored(spec)["data"]["podTemplate"]["spec"]
    assert {m["name"]: m["readOnly"] for m in mounts} == {"launch": True, "models": True}
    assert all(m in of_server["containers"][0]["volumeMounts"] for m in mounts)
    assert volumes == [v for v in of_server["volumes"] if v["name"] in ("launch", "models")]
    assert volumes[1]["persistentVolumeClaim"] == {"claimName": "m", "readOnly": True}


@pytest.mark.parametrize("strategy", ["Recreate", "Replace"])
def test_a_model_of_the_hub_without_a_cache_is_checked_with_the_token(strategy: str) -> None:
    """Each pod downloads it for itself, when the replicas that it replaces are gone already."""
    spec = made(strategy, model={"source": HUB, "tokenSecretRef": MODEL["tokenSecretRef"]})
    got = found(spec)
    assert got is not None
    template = got.job["spec"]["template"]
    (container,) = template["spec"]["containers"]
    (loads,) = stored(spec)["data"]["podTemplate"]["spec"]["initContainers"]
    assert container["args"] == ["check", "--config=/etc/kvline/launch/launch.json"]
    assert secrets(template) == [{"name": "hub", "key": "token"}]
    assert container["env"] == loads["env"] and "initContainers" not in template["spec"]
    # argparse's error of an image without the command is in its log.
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert jobs.policy(spec, got.job, SETTINGS)["spec"]["egress"]


def job_of(spec: ServiceSpec, conditions: tuple[str, ...] = (), **metadata: Any) -> Object:
    job = jobs.job(spec, stored(spec))
    status = {"conditions": [{"type": c, "status": "True"} for c in conditions]}
    return {**job, "metadata": {**job["metadata"], **metadata}, "status": status}


def pod_of(state: Object, name: str = "download", conditions: tuple[Object, ...] = ()) -> Object:
    containers = [{"name": name, "state": state, "restartCount": 0}]
    return {
        "metadata": {"name": "p", "uid": "p", "labels": {"kvline.dev/revision": "bbbbb"}},
        "status": {
            "containerStatuses": containers,
            "initContainerStatuses": containers,
            "conditions": list(conditions),
        },
    }


def ended(code: int, message: str = "why") -> Object:
    return {"terminated": {"exitCode": code, "reason": "Error", "message": message}}


def test_a_check_that_was_killed_for_memory_names_its_limit() -> None:
    """Which no field of the spec sets."""
    killed = pod_of({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, "server")
    limits = {"limits": {"memory": "512Mi"}}
    killed["spec"] = {"containers": [{"name": "server", "resources": limits}]}
    spec = made("Recreate", model={"source": "pvc://m/x"})
    got = found(spec, live=(job_of(spec),), pods=(killed,))
    assert got is not None and reported(got) == ("ModelAvailable", "CheckFailed")
    assert got.message.endswith("was killed at its memory limit of 512Mi, which the operator sets")


def reported(got: prepare.Preparation) -> tuple[str, str]:
    """The condition that reports it, and its reason."""
    return (got.trouble.condition, got.trouble.reason) if got.trouble is not None else ("", "")


def found(
    spec: ServiceSpec,
    stable: str = "aaaaa",
    live: tuple[Object, ...] = (),
    pods: tuple[Object, ...] = (),
    replicas: int = 0,
    lost: bool = False,
    before: ServiceSpec | None = None,  # what serves; else the same spec
) -> prepare.Preparation | None:
    views = tuple(view(pod, Reading(None), stamp(NOW)) for pod in pods)
    serving = (view(pod_of(ended(30), "server"), Reading(None)),) if lost else ()
    made = [deployment("aaaaa", 2), deployment("bbbbb", replicas)]
    observed = Observed([], made, [], serving, (), live, views)
    revisions = {"aaaaa": stored(before or spec), "bbbbb": stored(spec)}
    return prepare.of(spec, observed, "bbbbb", stable, revisions, NOW)


@pytest.mark.parametrize(
    ("strategy", "model", "stable", "wanted"),
    [
        ("Surge", {"source": "pvc://m/x"}, "aaaaa", False),  # no replica is removed for it
        ("Replace", {"source": "pvc://m/x"}, "aaaaa", True),
        ("Recreate", {"source": "pvc://m/x"}, "aaaaa", True),
        ("Recreate", {"source": "pvc://m/x"}, "", False),  # no replica serves that could be removed
        ("Recreate", {"source": "pvc://m/x"}, "bbbbb", False),  # its own replicas are brought back
        ("Surge", MODEL, "aaaaa", True),
        ("Surge", MODEL, "", True),
        ("Surge", MODEL, "bbbbb", False),
        ("Surge", {"source": HUB}, "", False),
    ],
)
def test_who_has_a_job(strategy: str, model: Object, stable: str, wanted: bool) -> None:
    spec = made(strategy, model=model)
    assert (found(spec, stable) is not None) == wanted
    assert found(spec, stable, replicas=1) is None  # it has pods already


def test_a_cache_that_was_emptied_is_filled_again() -> None:
    """A Job for pods that find no model, also of the stable revision."""
    spec = made(model=MODEL)
    assert found(spec, "bbbbb", replicas=1, lost=True) is not None
    assert found(made(), "bbbbb", replicas=1, lost=True) is None


HOLDS = {"reason": "CreateContainerConfigError", "message": 'secret "hub" not found'}
NO_IMAGE = {"reason": "ImagePullBackOff", "message": "no such image"}
NO_NODE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/1 nodes",
}


@pytest.mark.parametrize(
    ("model", "pods", "conditions", "expected"),
    [
        (MODEL, (), (), ("ModelAvailable", "Downloading", "downloads hf://")),
        (MODEL, (pod_of({"running": {}}),), (), ("ModelAvailable", "Downloading", "downloads")),
        (MODEL, (pod_of({"waiting": HOLDS}),), (), ("ModelAvailable", "SecretMissing", '"hub"')),
        (MODEL, (pod_of(ended(30)),), (), ("ModelAvailable", "NotFound", "why")),
        (MODEL, (pod_of(ended(33)),), (), ("ModelAvailable", "DownloadFailed", "why")),
        (MODEL, (pod_of(ended(137)),), (), ("ModelAvailable", "DownloadFailed", "code 137")),
        (MODEL, (), ("Failed",), ("ModelAvailable", "DownloadFailed", "created again")),
        # The last failure stays while the next Job runs, so conditions do not flap.
        (
            MODEL,
            (pod_of(ended(30)), pod_of({"running": {}})),
            (),
            ("ModelAvailable", "NotFound", "why"),
        ),
        (None, (pod_of({"waiting": NO_IMAGE}, "server"),), (), ("Progressing", "ImagePullFailed")),
        (None, (pod_of({}, "server", (NO_NODE,)),), (), ("Progressing", "Unschedulable", "0/1")),
        (None, (pod_of(ended(1), "server"),), (), ("ModelAvailable", "CheckFailed", "code 1")),
        (None, (pod_of(ended(30), "server"),), (), ("ModelAvailable", "NotFound", "why")),
        (None, (pod_of(ended(31), "server"),), (), ("ModelAvailable", "Invalid", "why")),
        (None, (pod_of(ended(2), "server"),), (), ("ModelAvailable", "CheckFailed", "code 2")),
        (None, (), ("Failed",), ("ModelAvailable", "CheckFailed", "created again")),
        (None, (), (), ("", "", "pulls the image and checks pvc://m/x")),
    ],
)
def test_what_delays_it_is_reported(
    model: Object | None, pods: tuple[Object, ...], conditions: tuple[str, ...], expected: Any
) -> None:
    spec = made("Recreate", model=model or {"source": "pvc://m/x"})
    got = found(spec, live=(job_of(spec, conditions),), pods=pods)
    assert got is not None and not got.done
    condition, reason, *text = expected
    assert reported(got) == (condition, reason)
    assert all(part in got.message for part in text)
    assert got.blocked == (reason not in ("", "Downloading"))


OLD_IMAGE = "kvline-server: argument command: invalid choice: 'check' (choose from 'serve', 'size')"
IN_USE = "1 node has pod using PersistentVolumeClaim with the same name and ReadWriteOncePod access"
ONE_POD = {**NO_NODE, "message": f"0/1 nodes are available: {IN_USE}."}


@pytest.mark.parametrize(
    ("pod", "done"),
    [
        (pod_of(ended(2, OLD_IMAGE), "server"), True),
        (pod_of(ended(2, "python: can't open file 'check'"), "server"), False),
        (pod_of({}, "server", (ONE_POD,)), True),
        (pod_of(ended(30), "server", (ONE_POD,)), False),
    ],
    ids=["image without the command", "another program", "claim of one pod", "checked before"],
)
def test_what_cannot_be_checked_is_not_held(pod: Object, done: bool) -> None:
    """An image of before the command, and a claim that serving replicas keep for themselves."""
    spec = made("Recreate", model={"source": "pvc://m/x"})
    got = found(spec, live=(job_of(spec),), pods=(pod,))
    assert got is not None and got.done == done


@pytest.mark.parametrize(
    ("since", "serving", "done"),
    [
        ("11:59:00", "pvc://m/y", False),
        ("11:57:00", "pvc://m/y", True),
        ("11:57:00", "pvc://other/x", False),
        ("11:57:00", HUB, False),
    ],
    ids=["a minute", "three", "another claim", "no claim"],
)
def test_a_volume_that_is_not_mounted_beside_the_serving_pods_is_left_to_the_new_ones(
    since: str, serving: str, done: bool
) -> None:
    """A ReadWriteOnce volume that is attached to another node: the Job's pod never starts. A claim
    that no serving pod has is waited for, and time without a node does not count."""
    state = {"type": "PodReadyToStartContainers", "status": "False"}
    state["lastTransitionTime"] = f"2026-01-01T{since}Z"
    waits = pod_of({"waiting": {"reason": "ContainerCreating"}}, "server", (state,))
    waits["metadata"]["creationTimestamp"] = "2026-01-01T11:00:00Z"
    waits["spec"] = {"nodeName": "n2"}
    spec = made("Recreate", model={"source": "pvc://m/x"})
    before = made("Recreate", model={"source": serving})
    got = found(spec, live=(job_of(spec),), pods=(waits,), before=before)
    assert got is not None and got.done == done
    if not done and since == "11:57:00":
        assert (got.blocked, reported(got)[1]) == (True, "PodNotSetUp")
        assert "not set up on n2" in got.message
    # An image that takes long to pull is waited for.
    waits["status"]["conditions"] = []
    got = found(spec, live=(job_of(spec),), pods=(waits,))
    assert got is not None and not got.done


@pytest.mark.parametrize("by_pod", [True, False])
def test_it_is_done_when_its_pod_or_its_status_says_so(by_pod: bool) -> None:
    spec = made(model=MODEL)
    pods = (pod_of(ended(0)),) if by_pod else ()
    got = found(spec, live=(job_of(spec, () if by_pod else ("Complete",)),), pods=pods)
    assert got is not None and got.done


@pytest.mark.parametrize(("created", "refused"), [("11:59:30", False), ("11:58:30", True)])
def test_a_job_whose_pod_is_not_made_does_not_download_for_ever(
    created: str, refused: bool
) -> None:
    """A quota or a priority class that is not there: only the Job's events tell."""
    spec = made(model=MODEL)
    job = job_of(spec, creationTimestamp=f"2026-01-01T{created}Z")
    got = found(spec, live=(job,))
    assert got is not None and got.blocked == refused
    assert reported(got)[1] == ("PodsRefused" if refused else "Downloading")
    got = found(spec, live=(job,), pods=(pod_of({"running": {}}),))
    assert got is not None and reported(got)[1] == "Downloading"


def test_one_that_is_being_deleted_is_waited_for() -> None:
    spec = made(model=MODEL)
    got = found(spec, live=(job_of(spec, ("Failed",), deletionTimestamp="t"),))
    assert got is not None and got.exists and not got.done


def test_only_running_jobs_are_deleted() -> None:
    """Finished Jobs are kept for a while and deleted by Kubernetes."""
    spec = made(model=MODEL)
    views = (view(pod_of(ended(0)), Reading(None)),)

    def left(job: Object, pods: tuple[Any, ...] = ()) -> int:
        return len(prepare.unfinished(Observed([], [], [], (), (), (job,), pods)))

    assert left(job_of(spec)) == 1
    assert left(job_of(spec, ("Complete",))) == left(job_of(spec, ("Failed",))) == 0
    assert left(job_of(spec), views) == left(job_of(spec, (), deletionTimestamp="t")) == 0

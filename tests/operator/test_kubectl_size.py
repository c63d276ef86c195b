"""The Job of `kubectl kvline size` and what it owns."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from services import ready_pod

from kvline_contract.launch import Images, LaunchConfig
from kvline_contract.names import LABEL_SERVICE, LAUNCH_FILE
from kvline_contract.report import SizingReport, State
from kvline_kubectl import show
from kvline_kubectl.__main__ import parser
from kvline_kubectl.check import Answer, Result
from kvline_kubectl.cluster import Cluster, Problem
from kvline_kubectl.size import _image, _images, command, from_file, largest
from kvline_kubectl.size_job import Question, objects, operator_settings
from kvline_operator.api.spec import parse
from kvline_operator.errors import SpecError
from kvline_operator.plan import revisions
from kvline_operator.plan.render import controller_revision
from kvline_operator.report.display import reported
from kvline_operator.report.status_cache import RevisionEntry
from kvline_operator.settings import Settings
from kvline_operator.store.capacity_status import CapacityStatus
from kvline_operator.store.revision_state import RevisionState

GOLDEN = Path(__file__).parents[1] / "contract" / "golden"
HUB = f"hf://org/tiny@{'a' * 40}"
Object = dict[str, Any]


def service(spec: Object | None = None, **resources: Any) -> Object:
    given = {
        "model": {"source": "pvc://models/tiny"},
        "resources": {"memory": "2Gi", **resources},
        **(spec or {}),
    }
    return {"metadata": {"name": "chat", "namespace": "ns", "uid": "u"}, "spec": given}


def made(body: Object, compare: str = "", stored: Object | None = None) -> tuple[Object, list[Any]]:
    settings = operator_settings("image", stored)
    room = largest(body, compare)
    return objects(Question(body, "image", settings, compare, room))


def pod_of(job: Object) -> Object:
    return dict(job["spec"]["template"]["spec"])


def stored(body: Object, settings: Settings) -> Object:
    """The ControllerRevision of a service, as an operator with these settings writes it."""
    spec = parse(body)
    return controller_revision(spec, revisions.wanted(spec, [], "image"), settings)


def test_a_gpu_of_a_device_class_is_claimed_by_a_template_of_the_job_s_own() -> None:
    """That of a revision may not exist, or be deleted meanwhile."""
    job, (config, template) = made(service(gpus=1, gpuDeviceClass="gpu.nvidia.com"))
    name = job["metadata"]["name"]
    (claim,) = pod_of(job)["resourceClaims"]
    assert claim["resourceClaimTemplateName"] == template["metadata"]["name"] == name
    (asked,) = template["spec"]["spec"]["devices"]["requests"]
    assert asked["exactly"]["deviceClassName"] == "gpu.nvidia.com"
    assert config["metadata"] == template["metadata"] and config["kind"] == "ConfigMap"


def test_without_a_device_class_the_job_owns_its_launch_file_alone() -> None:
    job, owned = made(service(gpus=1))
    assert [item["kind"] for item in owned] == ["ConfigMap"]
    assert "resourceClaims" not in pod_of(job)


def test_the_pod_has_what_the_operator_and_the_service_give_pods() -> None:
    """A cluster may start no pod without them: mesh and cost labels, a private registry, a mirror
    of the hub, a runtime class."""
    body = service({"model": {"source": HUB}, "podMetadata": {"labels": {"team": "a"}}}, gpus=1)
    settings = Settings(
        "image",
        default_cuda_image="image",
        hub_endpoint="https://hub.example",
        pull_secrets=("registry",),
        runtime_class="nvidia",
        priority_class="low",
    )
    job, _ = made(body, stored=stored(body, settings))
    template, pod = job["spec"]["template"], pod_of(job)
    assert template["metadata"]["labels"] == {"team": "a"}  # and no Service finds it
    assert LABEL_SERVICE not in template["metadata"]["labels"]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert (pod["runtimeClassName"], pod["priorityClassName"]) == ("nvidia", "low")
    (download,) = pod["initContainers"]
    assert {"name": "HF_ENDPOINT", "value": "https://hub.example"} in download["env"]
    cached = service({"model": {"source": HUB, "cache": {"claimName": "models"}}}, gpus=1)
    job, _ = made(cached, stored=stored(cached, settings))
    assert pod_of(job)["initContainers"][0]["env"] == download["env"]


def test_what_another_service_s_own_spec_gives_its_pods_is_not_taken() -> None:
    theirs = {"runtimeClassName": "kata", "priorityClassName": "high"}
    other = service({"scheduling": theirs, "serviceAccountName": "theirs"})
    job, _ = made(service(gpus=1), stored=stored(other, Settings("image", pull_secrets=("r",))))
    assert pod_of(job)["imagePullSecrets"] == [{"name": "r"}]
    assert pod_of(job)["serviceAccountName"] == "default"
    assert not theirs.keys() & pod_of(job).keys()
    other = service({"imagePullSecrets": [{"name": "theirs"}]})
    job, _ = made(service(), stored=stored(other, Settings("image")))
    assert "imagePullSecrets" not in pod_of(job)
    mine = {"imagePullSecrets": [{"name": "mine"}], "serviceAccountName": "reader"}
    job, _ = made(service(mine), stored=stored(other, Settings("image")))
    assert {key: pod_of(job)[key] for key in mine} == mine


def test_without_an_image_it_is_that_of_the_service_s_own_revision() -> None:
    own = stored(service(), Settings("image"))
    assert _image(service(), own) == "image"
    other = {**service(), "metadata": {**service()["metadata"], "name": "other"}}
    for body, found in ((other, own), (service(), None)):
        with pytest.raises(Problem, match="--image is required"):
            _image(body, found)


def test_images_are_measured_as_the_operator_would_have_them_served() -> None:
    """Those of the stable revision where the spec does not say, and of a new service its own."""

    def launched(body: Object, *history: RevisionEntry) -> Images | None:
        found = _images(body, history)
        _, (config,) = objects(Question(body, "image", Settings("image"), images=found))
        return LaunchConfig.parse(config["data"][LAUNCH_FILE]).engine.images

    inputs = parse(service()).inputs
    text = RevisionEntry("aaaaa", 1, "image", "", inputs, RevisionState(accepted=1))
    sees = replace(text, name="bbbbb", number=2, images=Images.REQUIRED, state=RevisionState())
    assert launched(service()) is launched(service(), sees) is Images.IF_SERVED
    assert launched(service(), sees, text) is None
    capacity = CapacityStatus.of([ready_pod().report])
    state = replace(text.state, capacity=capacity)
    assert launched(service(), replace(text, images=Images.IF_SERVED, state=state)) is None
    assert launched(service({"image": "registry.example/own@sha256:" + "a" * 64})) is None, (
        "it may be of before images"
    )
    both = service({"engine": {"modalities": ["text", "image"], "maxImagePatches": 64}})
    assert launched(both, text) is Images.REQUIRED
    with pytest.raises(SpecError, match="maxImagePatches bounds images"):
        launched(service({"engine": {"maxImagePatches": 64}}), text)


def test_a_comparison_has_room_for_each_choice_and_measures_the_spec_in_its_own() -> None:
    job, (config,) = made(service(), "memory=4Gi, kvCacheDtype=fp8,memory=1Gi")
    (server,) = pod_of(job)["containers"]
    assert server["resources"]["limits"]["memory"] == "4Gi"
    assert server["args"][-2:] == [
        "--compare=memory=4Gi, kvCacheDtype=fp8,memory=1Gi",
        "--memory=2Gi",
    ]
    assert "tensorParallel" in config["data"][LAUNCH_FILE]
    alone, _ = made(service())
    assert not [w for w in pod_of(alone)["containers"][0]["args"] if "compare" in w]
    longest = job["spec"]["activeDeadlineSeconds"]
    assert longest == 4 * alone["spec"]["activeDeadlineSeconds"]

    job, (config,) = made(service(gpus=1), "gpus=2")
    (server,) = pod_of(job)["containers"]
    assert server["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert '"tensorParallel":1' in config["data"][LAUNCH_FILE]
    assert not [w for w in server["args"] if w.startswith("--memory")]  # the host's, not the GPU's


def test_the_memory_of_each_rank_has_its_title() -> None:
    report = SizingReport.parse((GOLDEN / "report-v2-ranks.json").read_bytes())
    assert report.result is not None
    shown = reported(report)
    assert [title for title, _ in shown] == [
        "GPU 0 (rank 0 of 2)",
        "GPU 1 (rank 1 of 2): the least memory left",
    ]
    assert tuple(memory for _, memory in shown) == report.result.ranks
    alone = replace(report, result=replace(report.result, ranks=report.result.ranks[:1]))
    assert reported(alone) == (("", report.result.ranks[0]),)


def test_a_comparison_is_a_line_for_each_choice() -> None:
    report = SizingReport.parse((GOLDEN / "report-v2-ranks.json").read_bytes())
    assert report.result is not None
    twice = replace(report, result=replace(report.result, kv_tokens=2 * report.result.kv_tokens))
    console = Console(width=100)
    with console.capture() as printed:
        none = replace(report, result=None, state=State.FAILED)
        console.print(show.comparison({"as given": report, "gpus=2": twice, "gpus=4": none}))
    lines = printed.get().splitlines()
    tokens = report.result.kv_tokens
    assert lines[1].split()[:4] == ["as", "given", f"{tokens:,}", "1.00"]
    assert lines[2].split()[:3] == ["gpus=2", f"{2 * tokens:,}", "2.00"]
    assert lines[4].startswith("gpus=4: ended in state")


def test_a_manifest_may_come_from_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "kind: ConfigMap\n---\nkind: InferenceService\nmetadata: {name: chat}\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    nowhere: Any = None
    made = from_file(Path("-"), Cluster(nowhere, "default"), None)
    assert made["metadata"]["name"] == "chat"


def test_a_manifest_s_own_namespace_is_that_of_its_job(tmp_path: Path) -> None:
    file = tmp_path / "chat.yaml"
    file.write_text("kind: InferenceService\nmetadata: {name: chat, namespace: team}\n")
    nowhere: Any = None
    cluster = Cluster(nowhere, "default")
    assert from_file(file, cluster, None)["metadata"]["namespace"] == "team"
    with pytest.raises(Problem, match="has namespace team, -n has other"):
        from_file(file, cluster, "other")
    file.write_text("kind: InferenceService\nmetadata: {name: chat}\n")
    assert from_file(file, cluster, None)["metadata"]["namespace"] == "default"


@pytest.mark.parametrize(
    ("given", "has_image", "expected"),
    [
        ("check -f chat.yaml", True, "-f chat.yaml"),
        ("check -f chat.yaml", False, "-f chat.yaml --image IMAGE"),
        ("-n chats check -f -", True, "-f FILE -n chats"),
        (
            "check -f - -n chats --context dev",
            False,
            "-f FILE -n chats --context dev --image IMAGE",
        ),
    ],
)
def test_what_must_be_measured_names_the_command_that_does(
    given: str, has_image: bool, expected: str
) -> None:
    """With the flags of the check, and an image where neither the spec nor a revision has one."""
    made = command(parser().parse_args(given.split()), has_image)
    assert made == f"kubectl kvline size {expected}"
    parser().parse_args(made.split()[2:])
    console = Console(width=200)
    with console.capture() as printed:
        console.print(show.answer(Answer(Result.UNKNOWN, "why"), made))
    assert f"{made} measures it" in printed.get()

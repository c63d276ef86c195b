"""Rendered objects: what must stay the same and what must not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvline_contract.launch import (
    VERSION,
    GateFile,
    Images,
    KVCacheDtype,
    LaunchConfig,
    Method,
    StateDtype,
    ToolCallParser,
)
from kvline_contract.names import base_name
from kvline_operator.api.revision_hash import is_hash
from kvline_operator.api.spec import ServiceSpec, parse
from kvline_operator.observe.restricted import is_data
from kvline_operator.plan.acceptance import comparison_group
from kvline_operator.plan.podspec import pod_template
from kvline_operator.plan.render import (
    Owner,
    controller_revision,
    disruption_budget,
    event,
    launch_config,
    launch_text,
    network_policy,
    revision_objects,
)
from kvline_operator.plan.revisions import Revision, known, wanted
from kvline_operator.plan.rollout import RolloutPlan
from kvline_operator.settings import Settings
from kvline_operator.store.verdict import GateResult, Verdict
from kvline_server.options.timeouts import Timeouts

ROOT = Path(__file__).parents[2]
OWNER = Owner("ns", "chat", "uid", "chat")
EVENT = ("CapacityValidated", "Normal", "4096 KV tokens")


def name(what: tuple[str, str, str], version: str, time: str) -> str:
    return str(event(OWNER, what, version, time)["metadata"]["name"])


def test_an_event_repeated_after_a_crash_has_the_same_name() -> None:
    """F01: after a crash before the status was written, the event has the same name, because its
    resourceVersion is the same."""
    first = name(EVENT, "7", "2026-11-21T10:00:00Z")
    assert name(EVENT, "7", "2026-11-21T10:00:09Z") == first
    assert name(EVENT, "8", "2026-11-21T10:00:00Z") != first
    assert name(("Serving", "Normal", "x"), "7", "2026-11-21T10:00:00Z") != first


def spec(source: str = "pvc://models/tiny", /, **more: Any) -> ServiceSpec:
    return parse(
        {
            "metadata": {"name": "chat", "namespace": "ns", "uid": "u"},
            "spec": {"model": {"source": source}, "resources": {"memory": "2Gi"}, **more},
        }
    )


def let_in(settings: Settings, port: int) -> list[str]:
    """Names of the namespaces that may connect; empty for the service's own."""
    rules = network_policy(OWNER, settings, [])["spec"]["ingress"]
    (rule,) = [rule for rule in rules if rule["ports"][0]["port"] == port]
    labels = [s.get("namespaceSelector", {}).get("matchLabels", {}) for s in rule["from"]]
    return [label.get("kubernetes.io/metadata.name", "") for label in labels]


def test_who_may_reach_which_port() -> None:
    """Port 8001 is for the operator's namespace and `metricsNamespaces`, port 8000 for clients."""
    settings = Settings(
        "image",
        own_namespace="ours",
        metrics_namespaces=("monitoring",),
        client_namespaces=("apps",),
    )
    assert let_in(settings, 8001) == ["ours", "monitoring"]
    assert let_in(settings, 8000) == ["", "apps"]


@pytest.mark.parametrize(
    ("hub", "traces", "ports"),
    [
        ([], "", []),
        ([443], "", [443]),
        ([], "http://collector:4318", [4318]),
        ([443, 3128], "http://collector", [443, 3128, 80]),
    ],
)
def test_a_pod_may_reach_what_it_needs_and_nothing_else(
    hub: list[int], traces: str, ports: list[int]
) -> None:
    settings = Settings("image", traces_endpoint=traces)
    egress = network_policy(OWNER, settings, hub)["spec"]["egress"]
    assert [p["port"] for rule in egress for p in rule["ports"] if p["port"] != 53] == ports
    assert bool(egress) == bool(ports)


def test_settings_for_pods_are_in_the_pods() -> None:
    settings = Settings(
        "image",
        traces_endpoint="http://collector:4318",
        runtime_class="nvidia",
        priority_class="serving",
        pull_secrets=("registry",),
    )
    gpu = spec(resources={"memory": "2Gi", "gpus": 1})
    plain, wanted, on_cpu = (
        pod_template("chat", of, Revision("aaaaa", "image", "{}", 1), s)["spec"]
        for of, s in ((gpu, Settings("image")), (gpu, settings), (spec(), settings))
    )
    assert on_cpu["priorityClassName"] == "serving" and "runtimeClassName" not in on_cpu
    assert wanted["runtimeClassName"] == "nvidia" and wanted["priorityClassName"] == "serving"
    assert wanted["imagePullSecrets"] == [{"name": "registry"}]
    where = {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4318"}
    assert where in wanted["containers"][0]["env"]
    assert not {"runtimeClassName", "priorityClassName", "imagePullSecrets"} & set(plain)


def test_a_launch_file_is_what_was_stored_then_what_is_live_then_rendered() -> None:
    """The ConfigMap is immutable, so another rendering would be refused."""
    revision = Revision("aaaaa", "image", spec().inputs_json, 1)
    stored = controller_revision(spec(), revision, Settings("image"))
    live = {"data": {"launch.json": '{"live":1}'}}
    kept = stored["data"]["launch"]
    assert LaunchConfig.parse(kept).revision == "aaaaa"
    assert launch_text(spec(), stored, live) == kept
    before = {**stored, "data": {k: v for k, v in stored["data"].items() if k != "launch"}}
    assert launch_text(spec(), before, live) == '{"live":1}'
    assert launch_text(spec(), before, None) == kept


EARLIER = json.loads((Path(__file__).parent / "earlier" / "revisions.json").read_text())


@pytest.mark.parametrize("case", EARLIER, ids=["cpu", "gpu"])
def test_a_revision_that_an_earlier_operator_stored_is_left_as_it_is(case: dict[str, Any]) -> None:
    """A new operator changes neither name nor pods of a stored revision."""
    made, stored = parse(case["body"]), case["stored"]
    found = wanted(made, known([stored]), "registry.example/new@sha256:" + "c" * 64)
    assert found.name == stored["metadata"]["labels"]["kvline.dev/revision"]
    gate = GateFile(VERSION, True)
    objects = {o["kind"]: o for o in revision_objects(made, stored, 1, gate, "{}")}
    assert objects["Deployment"]["spec"]["template"] == stored["data"]["podTemplate"]


@pytest.mark.parametrize("case", EARLIER, ids=["cpu", "gpu"])
def test_a_revision_that_an_earlier_operator_stored_may_be_adopted(case: dict[str, Any]) -> None:
    """Its name is a hash of inputs in the names of that operator."""
    stored, base = case["stored"], base_name(case["body"]["metadata"]["name"])
    data, name = stored["data"], stored["metadata"]["labels"]["kvline.dev/revision"]
    assert is_hash(name, data["inputs"], data["image"])
    assert is_data(data, base, name)


@pytest.mark.fault(
    "L14",
    shows="the grace period is the preStop hook's 15 s at most, spec.drainSeconds (120 where none "
    "is given) and 15 s to end, in the pod template; the drain itself is timed by F49's tests",
)
@pytest.mark.parametrize(("seconds", "grace"), [(None, 150), (1, 31), (3600, 3630)])
def test_a_pod_has_as_long_as_its_drain_takes(seconds: int | None, grace: int) -> None:
    """An absent field stays absent in the launch file: older images refuse unknown keys."""
    given: dict[str, Any] = {"drainSeconds": seconds} if seconds else {}
    made = spec(**given)
    revision = Revision("aaaaa", "image", made.inputs_json, 1)
    stored = controller_revision(made, revision, Settings("image"))
    pod = stored["data"]["podTemplate"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == grace
    hook = pod["containers"][0]["lifecycle"]["preStop"]["httpGet"]
    assert (hook["path"], hook["port"]) == ("/prestop", "internal")
    launch = launch_config(OWNER, "aaaaa", stored["data"])
    assert launch.drain_seconds == seconds
    assert ("drainSeconds" in launch.dumps()) == (seconds is not None)


@pytest.mark.parametrize(
    ("image", "named", "asks"),
    [("image", False, True), ("image-of-before", False, False), ("of-spec", True, True)],
)
def test_an_image_of_an_earlier_operator_is_not_asked_how_long_to_wait(
    image: str, named: bool, asks: bool
) -> None:
    """It may lack the route: its pod would end while requests are still sent to it."""
    made = spec()
    revision = Revision("aaaaa", image, made.inputs_json, 1, named)
    stored = controller_revision(made, revision, Settings("image"))
    (container,) = stored["data"]["podTemplate"]["spec"]["containers"]
    hook = container["lifecycle"]["preStop"]
    assert list(hook) == (["httpGet"] if asks else ["sleep"])


@pytest.mark.parametrize(
    ("replicas", "result", "least"),
    [
        ({"a": 2}, None, 1),
        ({"a": 2, "b": 1}, GateResult.HELD, 1),  # b is held at its gate, or has no node
        ({"a": 1, "b": 2}, GateResult.PASSED, 1),
        ({"a": 1, "b": 1}, GateResult.HELD, 0),  # one fewer serves than wanted
        ({"a": 0, "b": 2}, GateResult.HELD, 0),
        ({}, None, 0),
    ],
)
def test_a_drain_may_take_one_replica_of_those_that_serve(
    replicas: dict[str, int], result: GateResult | None, least: int
) -> None:
    verdict = Verdict(result, "why") if result else None
    plan = RolloutPlan(replicas, "a", "b" if verdict else "", verdict)
    budget = disruption_budget(spec(replicas=2), plan)["spec"]
    assert budget["minAvailable"] == least
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


OWN = {"matchLabels": {"kvline.dev/service": "chat", "kvline.dev/revision": "aaaaa"}}
OTHERS = {"matchLabels": {"app": "other"}}
PLACED = {
    "podMetadata": {
        "labels": {"team": "search"},
        "annotations": {"sidecar.istio.io/inject": "false"},
    },
    "resources": {
        "memory": "16Gi",
        "gpus": 1,
        "gpuResource": "nvidia.com/mig-3g.71gb",
        "ephemeralStorage": "50Gi",
        "sharedMemory": "1Gi",
    },
    "scheduling": {
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "priorityClassName": "urgent",
        "runtimeClassName": "gvisor",
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"},
            {
                "maxSkew": 1,
                "topologyKey": "zone",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": OTHERS,
            },
        ],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h200"]}]}
                    ]
                }
            },
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "host"}],
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "weight": 1,
                        "podAffinityTerm": {"topologyKey": "zone", "labelSelector": OTHERS},
                    }
                ],
            },
        },
    },
}


def test_what_a_spec_says_of_placement_is_in_the_pods() -> None:
    settings = Settings("image", runtime_class="nvidia", priority_class="serving")
    template = pod_template("chat", spec(**PLACED), Revision("aaaaa", "i", "{}", 1), settings)
    labels, pod = template["metadata"]["labels"], template["spec"]
    assert labels == {**OWN["matchLabels"], "app.kubernetes.io/managed-by": "kvline"} | {
        "team": "search"
    }
    assert template["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}
    assert (pod["priorityClassName"], pod["runtimeClassName"]) == ("urgent", "gvisor")
    assert (pod["nodeSelector"], len(pod["tolerations"])) == ({"disk": "fast"}, 1)
    assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    (server,) = pod["containers"]
    assert server["resources"] == {
        "requests": {"memory": "16Gi", "ephemeral-storage": "50Gi", "nvidia.com/mig-3g.71gb": "1"},
        "limits": {"memory": "16Gi", "nvidia.com/mig-3g.71gb": "1"},
    }
    (shm,) = (v["emptyDir"] for v in pod["volumes"] if v["name"] == "shm")
    assert shm["sizeLimit"] == "1Gi"


def test_the_cache_s_dtype_is_a_field_of_the_launch_file_and_of_what_is_compared() -> None:
    """Absent it is auto: for the gate, not for the name of a revision, which an upgrade of the
    operator must not change."""
    specs = [spec(engine=engine) for engine in ({}, *({"kvCacheDtype": k} for k in KVCacheDtype))]
    revisions = [wanted(each, [], "image") for each in specs]
    assert len({revision.name for revision in revisions}) == 3
    found = []
    for each, revision in zip(specs, revisions, strict=True):
        data = controller_revision(each, revision, Settings("image"))["data"]
        found.append(LaunchConfig.parse(data["launch"]).engine.kv_cache_dtype)
        assert ("kvCacheDtype" in data["launch"]) == bool(each.inputs.get("engine"))
    assert found == [None, KVCacheDtype.AUTO, KVCacheDtype.FP8]
    absent, auto, fp8 = (comparison_group(each.inputs) for each in specs)
    assert absent == auto != fp8


def test_the_states_dtype_is_a_field_of_the_launch_file_and_of_what_is_compared() -> None:
    """Absent it is float32 for the gate, and no key of a file that earlier images read."""
    specs = [spec(engine=engine) for engine in ({}, *({"stateDtype": k} for k in StateDtype))]
    found = []
    for each in specs:
        launch = controller_revision(each, wanted(each, [], "image"), Settings("image"))["data"][
            "launch"
        ]
        found.append(LaunchConfig.parse(launch).engine.state_dtype)
        assert ("stateDtype" in launch) == bool(each.inputs.get("engine"))
    assert found == [None, StateDtype.FLOAT32, StateDtype.BFLOAT16]
    absent, default, small = (comparison_group(each.inputs) for each in specs)
    assert absent == default != small


def test_speculation_is_in_the_launch_file_where_it_is_asked_for() -> None:
    """Earlier images read launch files of services without it."""
    found = []
    asked = {"method": "NGram"}, {"method": "NGram", "maxDraftTokens": 2}
    for engine in ({}, *({"speculation": each} for each in asked)):
        each = spec(engine=engine)
        revision = wanted(each, [], "image")
        launch = controller_revision(each, revision, Settings("image"))["data"]["launch"]
        assert ("speculation" in launch) == bool(engine)
        made = LaunchConfig.parse(launch).engine.speculation
        found.append(made and (made.method, made.draft_tokens))
    assert found == [None, (Method.NGRAM, 7), (Method.NGRAM, 2)]


def test_a_default_of_output_tokens_is_in_the_launch_file_where_it_is_asked_for() -> None:
    for engine in ({}, {"defaultMaxTokens": 512}):
        each = spec(engine=engine)
        revision = wanted(each, [], "image")
        launch = controller_revision(each, revision, Settings("image"))["data"]["launch"]
        assert ("defaultMaxTokens" in launch) == bool(engine)
        asked = LaunchConfig.parse(launch).engine.default_max_tokens
        assert asked == engine.get("defaultMaxTokens")


def test_prefix_snapshots_are_in_the_launch_file_where_the_spec_names_them() -> None:
    """0 keeps none, and is not the server's default."""
    for engine in ({}, {"prefixSnapshots": 0}, {"prefixSnapshots": 64}):
        each = spec(engine=engine)
        revision = wanted(each, [], "image")
        launch = controller_revision(each, revision, Settings("image"))["data"]["launch"]
        assert ("prefixSnapshots" in launch) == bool(engine)
        asked = LaunchConfig.parse(launch).engine.prefix_snapshots
        assert asked == engine.get("prefixSnapshots")


def test_images_are_in_the_launch_file_where_the_revision_serves_them() -> None:
    """Whatever it is, budgets are compared: what the encoder took is named."""
    kinds: list[tuple[Images | None, dict[str, Any]]] = [
        (None, {}),
        (None, {"modalities": ["text"]}),
        (Images.IF_SERVED, {"maxImagesPerRequest": 4}),
        (Images.REQUIRED, {"modalities": ["text", "image"], "maxImagePatches": 1024}),
    ]
    for images, engine in kinds:
        each = spec(engine=engine)
        revision = Revision("aaaaa", "image", each.inputs_json, 1, images=images)
        data = controller_revision(each, revision, Settings("image"))["data"]
        assert data.get("images") == images and "modalities" not in data["launch"]
        made = LaunchConfig.parse(data["launch"]).engine
        assert (made.images, made.max_images_per_request, made.max_image_patches) == (
            images,
            engine.get("maxImagesPerRequest"),
            engine.get("maxImagePatches"),
        )
        assert comparison_group(each.inputs) == comparison_group(spec().inputs)


def test_a_parser_of_tool_calls_is_in_the_launch_file_where_it_is_named() -> None:
    """Another one makes a revision, whose budget is compared with that of before."""
    found, groups = [], []
    for engine in ({}, {"toolCallParser": "QwenXML"}):
        each = spec(engine=engine)
        groups.append(comparison_group(each.inputs))
        revision = wanted(each, [], "image")
        launch = controller_revision(each, revision, Settings("image"))["data"]["launch"]
        assert ("toolCallParser" in launch) == bool(engine)
        found.append(LaunchConfig.parse(launch).engine.tool_call_parser)
    assert found == [None, ToolCallParser.QWEN_XML]
    assert groups[0] == groups[1]


def test_a_term_without_a_selector_means_the_pods_of_its_revision() -> None:
    """For Kubernetes a term without a selector matches no pod."""
    revision = Revision("aaaaa", "i", "{}", 1)
    pod = pod_template("chat", spec(**PLACED), revision, Settings("image"))["spec"]
    selectors = [c["labelSelector"] for c in pod["topologySpreadConstraints"]]
    assert selectors == [OWN, OTHERS]
    against = pod["affinity"]["podAntiAffinity"]
    (required,) = against["requiredDuringSchedulingIgnoredDuringExecution"]
    (preferred,) = against["preferredDuringSchedulingIgnoredDuringExecution"]
    assert required["labelSelector"] == OWN
    assert preferred["podAffinityTerm"]["labelSelector"] == OTHERS


def test_nobody_may_set_the_operators_own_labels() -> None:
    """The schema refuses these labels; the parser does too, for specs of an older schema."""
    forged = {"podMetadata": {"labels": {"kvline.dev/service": "other"}}}
    revision = Revision("aaaaa", "i", "{}", 1)
    template = pod_template("chat", spec(**forged), revision, Settings("image"))
    assert template["metadata"]["labels"]["kvline.dev/service"] == "chat"


def test_probes_wait_longer_than_the_server_which_ends_what_hangs_itself() -> None:
    """The kubelet's end has no reason; a start and a busy node had 30 s."""
    made, limits = spec(), Timeouts()
    revision = Revision("aaaaa", "image", made.inputs_json, 1)
    (server,) = pod_template("chat", made, revision, Settings("image"))["spec"]["containers"]
    assert patience(server["startupProbe"]) >= 3600 + limits.stage
    # Servers of earlier images end hangs by it alone, which are then noticed within three minutes.
    assert 2 * limits.liveness <= patience(server["livenessProbe"]) <= 180 - limits.liveness


def test_the_operator_s_own_pod_may_start_slowly() -> None:
    """On a busy node it was ended before its port was open, again and again."""
    (operator,) = (
        container
        for item in yaml.safe_load_all((ROOT / "manifests" / "install.yaml").read_text())
        if item and item["kind"] == "Deployment"
        for container in item["spec"]["template"]["spec"]["containers"]
    )
    assert patience(operator["startupProbe"]) >= 600
    assert 60 < patience(operator["livenessProbe"]) < 180, "F09: repaired within 3 minutes"
    assert all(operator[name]["timeoutSeconds"] >= 5 for name in operator if "Probe" in name)


def patience(probe: Any) -> int:
    return int(probe["periodSeconds"] * probe["failureThreshold"])

"""The charts, rendered and installed by the real Helm: what they refuse, what they write, and that
a Role in one namespace is enough for an operator that watches only that namespace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from playground import ROOT, Operator, serve

pytestmark = pytest.mark.integration

DIGEST = "registry.example/kvline@sha256:" + "a" * 64
IMAGES = ("--set", f"image.operator={DIGEST}", "--set", f"image.server={DIGEST}")


@pytest.fixture(scope="module")
def helm() -> Any:
    import helm

    helm.ensure(print)
    return helm


def objects(text: str) -> list[dict[str, Any]]:
    return [d for d in yaml.safe_load_all(text) if d]


def test_the_plain_manifests_are_the_charts(helm: Any) -> None:
    assert (ROOT / "manifests" / "install.yaml").read_text() == helm.install_manifest()
    (crd,) = objects(helm.template("kvline-crds"))
    assert crd == yaml.safe_load((ROOT / "manifests" / "crd.yaml").read_text())
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "'/image/operator': minLength"),
        (("--set", "image.operator=kvline:latest", "--set", f"image.server={DIGEST}"), "sha256"),
        ((*IMAGES, "--set", "image.cuda=kvline:latest"), "image.cuda must be name@sha256"),
        ((*IMAGES, "--set", "replcas=2"), "additional properties 'replcas' not allowed"),
        ((*IMAGES, "--set", "replicas=0"), "replicas': minimum"),
        ((*IMAGES, "--set", "resources.limits.gpu=1"), "additional properties 'gpu' not allowed"),
        ((*IMAGES, "--set", "namespaces={Team}"), "does not match pattern"),
        ((*IMAGES, "--set", "hubEndpoint=ftp://hub"), "does not match pattern"),
        ((*IMAGES, "--set", "intervals.pollSeconds=0"), "minimum"),
        ((*IMAGES, "--set", "image.allowTags=yes please"), "want boolean"),
    ],
)
def test_a_wrong_value_is_refused_by_name(helm: Any, words: tuple[str, ...], message: str) -> None:
    from errors import ClusterError

    with pytest.raises(ClusterError) as refused:
        helm.template("kvline", *words)
    assert message in str(refused.value)


def test_the_page_is_off_and_each_port_is_for_somebody(helm: Any) -> None:
    """The page has no login and shows the services of all tenants."""
    made = objects(helm.template("kvline", *IMAGES))
    assert not [d for d in made if d["kind"] == "Service"]
    deployment = next(d for d in made if d["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "--page-port=0" in container["args"]
    assert [p["name"] for p in container["ports"]] == ["probe"]
    policy = next(d for d in made if d["kind"] == "NetworkPolicy")
    assert policy["spec"]["ingress"] and all(r.get("from") for r in policy["spec"]["ingress"])


def test_every_value_reaches_what_it_is_about(helm: Any, tmp_path: Path) -> None:
    values = {
        "image": {"operator": DIGEST, "server": DIGEST, "cuda": DIGEST, "pullSecrets": ["reg"]},
        "namespaces": ["team", "research"],
        "hubEndpoint": "https://hub.example:8443",
        "metricsNamespaces": ["monitoring"],
        "clientNamespaces": ["apps"],
        "tracesEndpoint": "http://collector.monitoring:4318",
        "serverPods": {
            "runtimeClassName": "nvidia",
            "priorityClassName": "serving",
            "imagePullSecrets": ["reg"],
        },
        "page": {"enabled": True, "namespaces": ["desk"]},
        "replicas": 2,
        "aggregateRoles": False,
        "prometheusRule": {"enabled": True},
        "intervals": {"resyncSeconds": 60, "pollSeconds": 4, "loadSeconds": 5},
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "infra", "operator": "Exists"}],
        "priorityClassName": "platform",
    }
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    made = objects(helm.template("kvline", "--values", str(file)))
    kinds = [(d["kind"], d["metadata"].get("namespace")) for d in made]
    assert ("Role", "team") in kinds and ("RoleBinding", "research") in kinds
    assert not [kind for kind, _ in kinds if kind in ("ClusterRole", "Namespace")]
    rule = next(d for d in made if d["kind"] == "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((ROOT / "monitoring" / "alerts.yaml").read_text())
    deployment = next(d for d in made if d["kind"] == "Deployment")["spec"]
    assert deployment["replicas"] == 2
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    for word in (
        "--namespace=team",
        "--namespace=research",
        "--hub-endpoint=https://hub.example:8443",
        "--metrics-namespace=monitoring",
        "--client-namespace=apps",
        "--traces-endpoint=http://collector.monitoring:4318",
        "--runtime-class=nvidia",
        "--priority-class=serving",
        "--pull-secret=reg",
        "--resync-seconds=60",
        "--load-seconds=5",
    ):
        assert word in container["args"]
    assert {"name": "KVLINE_DEFAULT_CUDA_IMAGE", "value": DIGEST} in container["env"]
    assert pod["nodeSelector"] == {"kubernetes.io/os": "linux"}
    assert pod["tolerations"] == [{"key": "infra", "operator": "Exists"}]
    assert pod["priorityClassName"] == "platform" and pod["imagePullSecrets"] == [{"name": "reg"}]
    # Its own flags are read by the operator itself.
    from kvline_operator.settings import parse

    options = parse([*container["args"], "--default-image", DIGEST])
    assert options.namespaces == ("team", "research") and options.page_port == 8082
    policy = next(d for d in made if d["kind"] == "NetworkPolicy")["spec"]["ingress"]
    let_in = {
        rule["ports"][0]["port"]: [
            s["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
            for s in rule["from"]
            if "namespaceSelector" in s
        ]
        for rule in policy
    }
    assert let_in == {"probe": ["monitoring"], "page": ["desk"]}
    assert options.pull_secrets == ("reg",) and options.traces_port == 4318


@pytest.fixture
def release(helm: Any, space: Any) -> Iterator[Callable[..., str]]:
    """Helm with the cluster, and a release that watches only the test's namespace."""
    where = ("--kubeconfig", str(space.cluster.kubeconfig), "--namespace", space.name)

    def run(*words: str) -> str:
        return str(helm.helm(*words, *where))

    yield run


def test_a_role_in_one_namespace_is_enough(
    space: Any, node: Any, release: Callable[..., str], tmp_path: Path
) -> None:
    cluster = space.cluster
    words = ("--set", f"namespaces={{{space.name}}}", "--set", "aggregateRoles=false", *IMAGES)
    release("install", "kvline", "charts/kvline", *words)
    account = cluster.kubeconfig_of(space.name, "kvline-operator")
    operator = Operator(space, tmp_path / "operator.log", kubeconfig=account)
    operator.extra = {"KVLINE_NAMESPACE": space.name}
    operator.start()
    try:
        serve(space, node)
        elsewhere = ("auth", "can-i", "list", "pods", "-n", "default")
        me = f"--as=system:serviceaccount:{space.name}:kvline-operator"
        assert cluster.kubectl(*elsewhere, me, check=False).stdout.strip() == "no"
    finally:
        operator.stop()
    log = operator.log.read_text()
    assert "Traceback" not in log and "HTTP 403" not in log and "orbidden" not in log

    # An upgrade changes its options; an uninstall leaves services and their pods.
    release("upgrade", "kvline", "charts/kvline", *words, "--set", "intervals.pollSeconds=3")
    deployment = space.get("deployment", "kvline-operator")
    assert "--poll-seconds=3" in deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    serving = {p["metadata"]["uid"] for p in node.pods()}
    assert "kvline" in json.loads(release("list", "-o", "json"))[0]["name"]
    release("uninstall", "kvline", "--wait")
    assert space.get("deployment", "kvline-operator") is None
    assert space.get("kvl", "chat")["status"]["capacity"]["kvTokens"] == 4096
    left = {p["metadata"]["uid"] for p in node.pods()}
    assert left & serving == left and left


def test_helm_finds_nothing_to_complain_about(helm: Any) -> None:
    for chart, words in (("kvline-crds", ()), ("kvline", IMAGES)):
        assert "0 chart(s) failed" in helm.helm("lint", f"charts/{chart}", "--strict", *words)

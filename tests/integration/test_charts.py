"""The charts, rendered and installed by the real Helm: what they refuse, what they write, and that
a Role in one namespace is enough for an operator that watches only that namespace."""

from __future__ import annotations

import json
import subprocess
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
    crd, *roles = objects(helm.template("kvline-crds"))
    assert {role["kind"] for role in roles} == {"ClusterRole"}
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
        ((*IMAGES, "--set", "hubEndpoint=https://hub/a?b"), "does not match pattern"),
        ((*IMAGES, "--set", "hubNoProxy={10.0.0.0/8}"), "does not match pattern"),
        ((*IMAGES, "--set", "logLevel=loud"), "logLevel"),
        ((*IMAGES, "--set", "resources.limits.cpu=two"), "does not match pattern"),
        ((*IMAGES, "--set", "aggregateRoles=false"), "'aggregateRoles' not allowed"),
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
        "hubEndpoint": "https://hub.example:8443/api/hf",
        "hubProxy": "http://proxy.example:3128",
        "hubNoProxy": ["mirror.example", ".internal"],
        "hubCA": "company-ca",
        "meshNamespaces": ["istio-system"],
        "metricsNamespaces": ["monitoring"],
        "clientNamespaces": ["apps"],
        "tracesEndpoint": "http://collector.monitoring:4318",
        "serverPods": {
            "platformUser": True,
            "runtimeClassName": "nvidia",
            "priorityClassName": "serving",
            "imagePullSecrets": ["reg"],
        },
        "page": {"enabled": True, "namespaces": ["desk"]},
        "replicas": 2,
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "logLevel": "debug",
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
    service, monitor = (of(made, kind, "kvline-metrics") for kind in ("Service", "ServiceMonitor"))
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    assert [p["name"] for p in service["spec"]["ports"]] == [
        p["port"] for p in monitor["spec"]["endpoints"]
    ]
    pods = of(made, "PodMonitor")
    assert pods["spec"]["namespaceSelector"] == {"matchNames": ["team", "research"]}
    for item in (monitor, pods, of(made, "PrometheusRule")):
        assert item["metadata"]["labels"] == {"release": "prometheus"}
    rule = next(d for d in made if d["kind"] == "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((ROOT / "monitoring" / "alerts.yaml").read_text())
    deployment = next(d for d in made if d["kind"] == "Deployment")["spec"]
    assert deployment["replicas"] == 2
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    for word in (
        "--namespace=team",
        "--namespace=research",
        "--hub-endpoint=https://hub.example:8443/api/hf",
        "--hub-proxy=http://proxy.example:3128",
        "--hub-no-proxy=mirror.example",
        "--hub-no-proxy=.internal",
        "--hub-ca=company-ca",
        "--mesh-namespace=istio-system",
        "--platform-user",
        "--log-level=debug",
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


def of(made: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    """The object of a kind, of several that of the name."""
    found = [d for d in made if d["kind"] == kind]
    return next(d for d in found if len(found) == 1 or d["metadata"]["name"] == name)


def test_values_are_taken_as_helm_s_users_write_them(helm: Any, tmp_path: Path) -> None:
    values = {
        "global": {
            "imageRegistry": "mirror.example/proxy",
            "imagePullSecrets": [{"name": "all"}, "plain"],
            "storageClass": "of-a-parent-chart",
        },
        "image": {
            "operator": DIGEST,
            "server": DIGEST.replace("registry.example/", "team/"),
            "cuda": DIGEST,
            "pullSecrets": [{"name": "own"}, "plain"],
        },
        "serverPods": {"imagePullSecrets": [{"name": "theirs"}]},
        "resources": {"requests": {"cpu": 0.5, "memory": "1.5Gi"}, "limits": {"cpu": 2}},
        "nodeSelector": {"infra": True},
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}},
        "podAnnotations": {"sidecar.istio.io/inject": False, "checksum/x": "abc"},
        "podLabels": {"team": "infra", "tier": 1},
        "podSecurityContext": {"runAsUser": None, "runAsGroup": None},
        "page": {"enabled": True},
    }
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    deployment = of(objects(helm.template("kvline", "--values", str(file))), "Deployment")
    made = deployment["spec"]["template"]
    pod, (container,) = made["spec"], made["spec"]["containers"]
    digest = DIGEST.rpartition("/")[2]
    assert container["image"] == f"mirror.example/proxy/{digest}"
    env = {item["name"]: item.get("value") for item in container["env"]}
    assert env["KVLINE_DEFAULT_IMAGE"] == f"mirror.example/proxy/team/{digest}"
    assert env["KVLINE_DEFAULT_CUDA_IMAGE"] == f"mirror.example/proxy/{digest}"
    assert "KVLINE_POD_IP" in env
    assert pod["imagePullSecrets"] == [{"name": name} for name in ("all", "plain", "own")]
    secrets = [a.partition("=")[2] for a in container["args"] if a.startswith("--pull-secret=")]
    assert secrets == ["all", "plain", "theirs"]
    assert container["resources"]["requests"]["cpu"] == 0.5
    assert container["resources"]["limits"] == {
        "cpu": 2,
        "memory": "512Mi",
        "ephemeral-storage": "256Mi",
    }
    assert pod["nodeSelector"] == {"infra": "true"} and pod["affinity"] == values["affinity"]
    assert made["metadata"]["annotations"] == {
        "sidecar.istio.io/inject": "false",
        "checksum/x": "abc",
    }
    own = {"app.kubernetes.io/name": "kvline-operator"}
    assert made["metadata"]["labels"] == {"team": "infra", "tier": "1", **own}
    assert deployment["spec"]["selector"]["matchLabels"] == own
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


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
    words = ("--set", f"namespaces={{{space.name}}}", *IMAGES)
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
    """It warned of links in a chart with every command."""
    for chart, words in (("kvline-crds", ()), ("kvline", IMAGES)):
        command = [helm.HELM, "lint", ROOT / "charts" / chart, "--strict", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        assert "0 chart(s) failed" in done.stdout and done.stderr == ""

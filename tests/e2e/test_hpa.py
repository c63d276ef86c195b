"""The recipe for an HPA: Prometheus, prometheus-adapter and a HorizontalPodAutoscaler, with the
files of monitoring/. Run by `make recipes`: both programs take minutes to build."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from playground import ROOT
from support import describe, pods, wait
from test_main_job import RANDOM
from traffic import streaming
from waiting import NotInTime, eventually, limit

pytestmark = [pytest.mark.recipe, pytest.mark.timeout(900)]

PROMETHEUS, ADAPTER = 19090, 16443  # ports on the node
APIS = "/apis/custom.metrics.k8s.io/v1beta1"


@pytest.fixture
def metrics_api(cluster: Any, tmp_path: Path) -> Iterator[None]:
    """Prometheus and its adapter beside the node's programs, the adapter behind the API server."""
    import binaries

    for name, words in (
        ("prometheus", prometheus(cluster, tmp_path)),
        ("prometheus-adapter", adapter(cluster, tmp_path)),
    ):
        program = str(binaries.ensure(name, print))
        cluster.programs.start(name, cluster.network.command([program, *words]))
    cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(api_service()))
    ready = ("--for=condition=Available", f"--timeout={limit(90):.0f}s")
    cluster.kubectl("wait", *ready, "apiservice/v1beta1.custom.metrics.k8s.io")
    yield
    cluster.kubectl("delete", "-f", "-", input=yaml.safe_dump_all(api_service()))
    cluster.programs.stop(["prometheus", "prometheus-adapter"], signal.SIGKILL)


def prometheus(cluster: Any, folder: Path) -> list[str]:
    """The scrape job of monitoring/, with a shorter interval, and with a kubeconfig because
    Prometheus is not in a pod here."""
    (job,) = yaml.safe_load((ROOT / "monitoring" / "scrape.yaml").read_text())
    job["scrape_interval"] = "1s"
    job["kubernetes_sd_configs"][0]["kubeconfig_file"] = str(cluster.kubeconfig)
    file = folder / "prometheus.json"
    file.write_text(json.dumps({"scrape_configs": [job]}))
    return [
        f"--config.file={file}",
        f"--storage.tsdb.path={folder}/tsdb",
        f"--web.listen-address=127.0.0.1:{PROMETHEUS}",
    ]


def adapter(cluster: Any, folder: Path) -> list[str]:
    """The adapter with the rules of monitoring/; the API server authenticates and authorizes its
    clients."""
    asks = ("lister", "authentication", "authorization")
    return [
        *(f"--{what}-kubeconfig={cluster.kubeconfig}" for what in asks),
        f"--prometheus-url=http://127.0.0.1:{PROMETHEUS}",
        f"--config={ROOT}/monitoring/recipes/prometheus-adapter.yaml",
        "--metrics-relist-interval=2s",
        f"--secure-port={ADAPTER}",
        f"--cert-dir={folder}/adapter",
    ]


def api_service() -> list[dict[str, Any]]:
    """A Service without a selector, because the adapter runs on the node itself."""
    from network import NODE_ADDRESS

    where = {"name": "prometheus-adapter", "namespace": "default"}
    port = {"name": "https", "port": 443}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": where,
            "spec": {"ports": [{**port, "targetPort": ADAPTER}]},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**where, "labels": {"kubernetes.io/service-name": where["name"]}},
            "addressType": "IPv4",
            "ports": [{"name": "https", "port": ADAPTER, "protocol": "TCP"}],
            "endpoints": [{"addresses": [NODE_ADDRESS], "conditions": {"ready": True}}],
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": "v1beta1.custom.metrics.k8s.io"},
            "spec": {
                "group": "custom.metrics.k8s.io",
                "version": "v1beta1",
                "service": where,
                "insecureSkipTLSVerify": True,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
            },
        },
    ]


def recipe() -> str:
    """The HPA of the recipe, for a small service and without stabilisation."""
    text = (ROOT / "monitoring" / "recipes" / "hpa.yaml").read_text()
    body = yaml.safe_load(text.replace("smollm2", "busy"))
    body["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] = 5
    body["spec"]["maxReplicas"] = 2
    body["spec"]["metrics"][1]["pods"]["target"]["averageValue"] = "2"
    return yaml.safe_dump(body)


def ready_replicas(space: Any) -> int:
    return int(space.get("kvl", "busy")["status"].get("readyReplicas", 0))


def test_an_hpa_follows_the_load_through_the_scale_subresource(
    space: Any, cluster: Any, metrics_api: None, tmp_path: Path
) -> None:
    space.apply("busy", **{**RANDOM, "engine": {"maxModelLen": 512, "maxRunningRequests": 4}})
    wait(space, "busy", "UpToDate", status="True")
    space.kubectl("apply", "-f", "-", input=recipe())
    ip = space.get("service", "busy")["spec"]["clusterIP"]
    with streaming(cluster.network, ip, "busy", tmp_path, 6) as streams:
        try:
            eventually(lambda: ready_replicas(space) == 2, 240, on="pod")
        except NotInTime as error:
            described = space.kubectl("describe", "hpa", "busy").stdout
            raise NotInTime(f"{error}\n{described}\n{describe(space, 'busy')}") from None
    assert streams.failures == []
    assert space.get("kvl", "busy")["spec"]["replicas"] == 2
    names = json.loads(cluster.kubectl("get", "--raw", APIS).stdout)["resources"]
    assert {"pods/kvline_kv_cache_usage_ratio", "pods/kvline_requests_in_flight"} <= {
        name["name"] for name in names
    }
    eventually(lambda: len(pods(space)) == 1, 120, on="pod")
    wait(space, "busy", "UpToDate", status="True")

"""What the administrator sets for the pods of services, and what they may reach."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvline_contract.names import revision_of
from kvline_kubectl.size_job import operator_settings
from kvline_operator.api.spec import parse
from kvline_operator.observe.restricted import is_data
from kvline_operator.plan.jobs import job, policy
from kvline_operator.plan.phase import Policy
from kvline_operator.plan.render import Owner, controller_revision, network_policy
from kvline_operator.plan.revisions import Revision
from kvline_operator.plan.rollout import RolloutPlan
from kvline_operator.plan.rollout_state import RolloutState
from kvline_operator.settings import Settings

HUB = "hf://org/name@0123456789abcdef0123456789abcdef01234567"
CLOSED = Settings("image", hub_proxy="http://proxy.example:3128", hub_ca="company-ca")
DNS = {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}


def revision(settings: Settings, **model: Any) -> tuple[Any, dict[str, Any]]:
    meta = {"name": "chat", "namespace": "ns", "uid": "u", "generation": 1}
    spec = parse({"metadata": meta, "spec": {"model": model, "resources": {"memory": "2Gi"}}})
    made = Revision("aaaaa", "image", spec.inputs_json, 1)
    return spec, controller_revision(spec, made, settings)


def has_way_out(container: dict[str, Any], pod: dict[str, Any]) -> None:
    env = {item["name"]: item.get("value") for item in container["env"]}
    assert env["HTTPS_PROXY"] == env["HTTP_PROXY"] == "http://proxy.example:3128"
    assert env["SSL_CERT_FILE"] == env["REQUESTS_CA_BUNDLE"]
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == "hub-ca"]
    assert env["SSL_CERT_FILE"].startswith(mount["mountPath"])
    (volume,) = [v for v in pod["volumes"] if v["name"] == "hub-ca"]
    assert volume["configMap"]["name"] == "company-ca"


def test_a_download_goes_through_the_proxy_and_trusts_its_authority() -> None:
    """Of each pod, and of the Job for a cache that services share."""
    _, stored = revision(CLOSED, source=HUB)
    pod = stored["data"]["podTemplate"]["spec"]
    has_way_out(pod["initContainers"][0], pod)
    assert is_data(stored["data"], "chat", revision_of(stored))
    spec, stored = revision(CLOSED, source=HUB, cache={"claimName": "models"})
    pod = job(spec, stored)["spec"]["template"]["spec"]
    has_way_out(pod["containers"][0], pod)


def test_a_model_in_a_claim_has_neither() -> None:
    _, stored = revision(CLOSED, source="pvc://models/tiny")
    assert "hub-ca" not in str(stored) and "proxy.example" not in str(stored)


def test_the_policy_opens_the_proxy_s_port_and_the_mesh() -> None:
    spec, stored = revision(CLOSED, source=HUB, cache={"claimName": "models"})
    port = {"ports": [{"protocol": "TCP", "port": 3128}]}
    assert policy(spec, job(spec, stored), CLOSED)["spec"]["egress"] == [DNS, port]
    mesh = Settings("image", mesh_namespaces=("istio-system",))
    label = {"matchLabels": {"kubernetes.io/metadata.name": "istio-system"}}
    made = network_policy(Owner.of(spec), mesh, [])["spec"]["egress"]
    assert made == [DNS, {"to": [{"namespaceSelector": label}]}]
    assert network_policy(Owner.of(spec), Settings("image"), [])["spec"]["egress"] == []


def test_a_proxy_that_is_set_later_leaves_older_pods_their_way_out() -> None:
    """Their stored container downloads without it, also where it is rescheduled."""
    spec, old = revision(Settings("image"), source=HUB)
    new = revision(CLOSED, source=HUB)[1]
    stored = {"aaaaa": old, "bbbbb": new}

    def ports(**replicas: int) -> list[int]:
        plan = RolloutPlan(replicas, "aaaaa")
        return RolloutState(stored, {}, Policy(), plan, {}, None, None).hub_ports

    assert ports(aaaaa=1) == [443]
    assert ports(aaaaa=1, bbbbb=1) == [443, 3128]
    assert ports(bbbbb=1) == [3128]
    (_, way) = policy(spec, job(spec, old), CLOSED)["spec"]["egress"]
    assert [p["port"] for p in way["ports"]] == [443]


def test_hosts_without_a_proxy_are_reached_by_the_hub_s_port() -> None:
    """As the download may be led from the hub to one of them."""
    direct = replace(CLOSED, hub_no_proxy=("mirror.example", ".internal"))
    spec, stored = revision(direct, source=HUB)
    (download,) = stored["data"]["podTemplate"]["spec"]["initContainers"]
    assert {"name": "NO_PROXY", "value": "mirror.example,.internal"} in download["env"]
    assert is_data(stored["data"], "chat", revision_of(stored))
    (_, *ways) = policy(spec, job(spec, stored), direct)["spec"]["egress"]
    assert [p["port"] for way in ways for p in way["ports"]] == [443, 3128]
    _, alone = revision(replace(direct, hub_proxy=""), source=HUB)
    assert "NO_PROXY" not in str(alone)


def test_the_platform_may_choose_user_and_groups() -> None:
    chosen = {"runAsUser", "runAsGroup", "fsGroup"}
    for settings, there in (
        (Settings("image"), chosen),
        (Settings("i", platform_user=True), set()),
    ):
        _, stored = revision(settings, source="pvc://models/tiny")
        context = stored["data"]["podTemplate"]["spec"]["securityContext"]
        assert context["runAsNonRoot"] is True and context.keys() & chosen == there


def test_a_size_job_has_the_settings_of_the_service_s_newest_revision() -> None:
    settings = replace(
        CLOSED,
        hub_endpoint="https://hub.example",
        hub_no_proxy=("mirror.example", ".internal"),
        platform_user=True,
    )
    for given in (settings, Settings("image")):
        _, stored = revision(given, source=HUB, cache={"claimName": "models"})
        assert operator_settings("image", stored) == given
    assert operator_settings("image", None) == Settings("image")

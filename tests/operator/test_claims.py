"""Whose a namespace is, asked seldom and never remembered for long."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes import client

from kvline_operator.errors import Forbidden
from kvline_operator.kube import Kube, api_client
from kvline_operator.observe.claims import FRESH, GONE, HANDOVER, Claim, Claims
from kvline_operator.report.metrics import Metrics
from kvline_operator.report.status_cache import StatusCache
from kvline_operator.run.workqueue import WorkQueue

Object = dict[str, Any]
OPERATOR = "kvline-operator"


def account(namespace: str, name: str = OPERATOR) -> Object:
    return {"kind": "ServiceAccount", "name": name, "namespace": namespace}


def binding(*subjects: Object, role: str = OPERATOR) -> Object:
    return {"roleRef": {"kind": "Role", "name": role}, "subjects": list(subjects)}


class Cluster(Kube):
    """What it answers to reads by name, of RoleBindings and of Leases."""

    def __init__(self, found: Object | None = None) -> None:
        super().__init__(api_client(client.Configuration()))
        self.binding = found
        self.renewals: int | None = 0  # of the other release's Lease; None: there is none
        self.may_read_leases = True
        self.reads = 0
        self.now = 0.0
        self.paused: list[float] = []
        self.claims = Claims(self, "ours", lambda: self.now, self._pause)

    def _pause(self, seconds: float) -> None:
        self.paused.append(seconds)
        self.now += seconds

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        assert name == OPERATOR
        if kind == "Lease":
            assert namespace == "theirs"
            if not self.may_read_leases:
                raise Forbidden("GET Lease theirs/kvline-operator: HTTP 403")
            renewals = self.renewals
            return None if renewals is None else {"metadata": {"resourceVersion": f"{renewals}"}}
        assert (kind, namespace) == ("RoleBinding", "team")
        self.reads += 1
        return self.binding

    def later(self, seconds: float = FRESH) -> str:
        """Whom the namespace is left to, after so long."""
        self.now += seconds
        return self.claims.other("team")


def test_a_namespace_is_another_s_while_a_role_binding_binds_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = Cluster()
    assert cluster.claims.other("team") == ""
    cluster.binding = binding(account("theirs"))
    assert cluster.claims.other("team") == "" and cluster.reads == 1
    assert [cluster.later(), *(cluster.claims.other("team") for _ in "12")] == ["theirs"] * 3
    assert cluster.reads == 2
    assert cluster.later() == "theirs"
    assert caplog.text.count("belongs to the operator in theirs (by its RoleBinding): left") == 1
    cluster.binding = None
    assert cluster.later() == ""


def test_what_is_ours_by_name_is_begun_once_others_have_seen_it() -> None:
    """Another may go by what it read FRESH seconds ago: both would correct each other's objects."""
    cluster = Cluster(binding(account("ours")))
    assert cluster.claims.other("team") == "" and cluster.paused == [HANDOVER]
    assert HANDOVER > FRESH
    assert cluster.later() == "" and cluster.paused == [HANDOVER]
    whole = Cluster(None)  # of the whole cluster
    assert whole.claims.other("team") == "" and not whole.paused


@pytest.mark.parametrize(
    "found",
    [
        None,
        {},
        binding(),
        binding(account("ours")),
        binding(account("theirs"), account("ours")),
        binding(account("theirs", "default")),
        binding({"kind": "User", "name": OPERATOR}),
        binding(account("theirs"), role="view"),
    ],
)
def test_what_binds_no_other_operator_to_its_role_keeps_nobody_out(found: Object | None) -> None:
    assert Cluster(found).claims.other("team") == ""


def test_a_release_without_a_live_lease_has_no_namespace(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(binding(account("theirs")))
    cluster.renewals = None
    assert cluster.claims.other("team") == ""
    assert "does not renew its Lease: it is reconciled here" in caplog.text
    assert cluster.claims.known() == {"team": Claim("theirs", lives=False)}

    cluster.renewals = 1  # it starts
    assert cluster.later() == "theirs"
    for _ in range(10):
        cluster.renewals += 1
        assert cluster.later(GONE / 2) == "theirs"
    assert cluster.later(GONE / 2) == "theirs"  # while it is upgraded
    assert cluster.later(GONE / 2) == ""
    cluster.renewals += 1
    assert cluster.later() == "theirs"


def test_where_leases_of_others_cannot_be_read_the_role_binding_counts() -> None:
    cluster = Cluster(binding(account("theirs")))
    cluster.may_read_leases = False
    assert cluster.claims.other("team") == "theirs"


def test_metrics_show_who_has_which_namespace_and_whom_nobody_hears_of() -> None:
    cluster = Cluster(binding(account("theirs")))
    metrics = Metrics(StatusCache(), cluster, WorkQueue(), claims=cluster.claims)
    name = 'kvline_namespace_claim_active{namespace="team",release="theirs"}'
    assert name not in metrics.text().decode()
    cluster.claims.other("team")
    assert f"{name} 1.0" in metrics.text().decode()
    cluster.renewals = None
    cluster.later()
    assert f"{name} 0.0" in metrics.text().decode()

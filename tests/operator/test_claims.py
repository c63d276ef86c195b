"""Whose a namespace is, asked seldom and never remembered for long."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes import client

from kvline_operator.kube import Kube, api_client
from kvline_operator.observe.claims import FRESH, Claims


class Cluster(Kube):
    def __init__(self) -> None:
        super().__init__(api_client(client.Configuration()))
        self.claim: dict[str, Any] | None = None
        self.reads = 0

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        self.reads += 1
        return self.claim


def test_a_namespace_is_another_s_while_its_claim_says_so(caplog: pytest.LogCaptureFixture) -> None:
    cluster, now = Cluster(), [0.0]
    claims = Claims(cluster, "ours", lambda: now[0])
    assert claims.other("team") == ""
    cluster.claim = {"data": {"namespace": "theirs"}}
    assert claims.other("team") == "" and cluster.reads == 1
    now[0] += FRESH
    assert [claims.other("team") for _ in range(3)] == ["theirs"] * 3 and cluster.reads == 2
    now[0] += FRESH
    assert claims.other("team") == "theirs"
    assert caplog.text.count("belongs to the operator in theirs") == 1
    cluster.claim = None
    now[0] += FRESH
    assert claims.other("team") == ""


@pytest.mark.parametrize("claim", [{"data": {"namespace": "ours"}}, {"data": None}, {}, None])
def test_a_claim_of_our_own_or_an_empty_one_keeps_nobody_out(claim: dict[str, Any] | None) -> None:
    cluster = Cluster()
    cluster.claim = claim
    assert Claims(cluster, "ours").other("team") == ""

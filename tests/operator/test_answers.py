"""Who refuses a call is read from the API server's Status, and never from the name of an object."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvline_operator.answers import Answer, Refusal, of_message

PODS = 'pods "chat-aaaaa-" is forbidden: '
RIGHTS = (
    'deployments.apps "quota" is forbidden: User "system:serviceaccount:kvline:kvline" cannot '
    'patch resource "deployments" in API group "apps" in the namespace "quota"'
)
# As Kubernetes 1.33 to 1.35 write them.
MESSAGES = [
    (403, RIGHTS, Refusal.RIGHTS),
    (403, "", Refusal.RIGHTS),
    (
        403,
        f"{PODS}exceeded quota: small, requested: cpu=2, used: cpu=0, limited: cpu=1",
        Refusal.QUOTA,
    ),
    (403, f"{PODS}failed quota: small: must specify limits.cpu for: server", Refusal.QUOTA),
    (403, f"{PODS}status unknown for quota: small, resources: pods", Refusal.QUOTA),
    (403, f"{PODS}insufficient quota to match these scopes: [{{PriorityClass}}]", Refusal.QUOTA),
    (
        403,
        'pods "quota-aaaaa-" is forbidden: maximum memory usage per Container is 1Gi, but limit is '
        "2Gi",
        Refusal.LIMIT_RANGE,
    ),
    (
        403,
        f"{PODS}[minimum cpu usage per Container is 1.  No request is specified, memory max "
        "limit to request ratio per Pod is 1, but provided ratio is 2.000000]",
        Refusal.LIMIT_RANGE,
    ),
    (
        422,
        'Pod "chat-aaaaa-x" is invalid: spec.containers[0].resources.requests: Invalid value: '
        '"100m": must be less than or equal to cpu limit of 50m',
        Refusal.LIMIT_RANGE,
    ),
    (
        403,
        f'{PODS}violates PodSecurity "restricted:latest": runAsNonRoot != true',
        Refusal.POD_SECURITY,
    ),
    (403, f"{PODS}no PriorityClass with name exceeded quota: was found", Refusal.ADMISSION),
    (403, 'admission webhook "policy.example" denied the request: no quota', Refusal.ADMISSION),
    (500, 'admission webhook "policy.example" denied the request: it broke', Refusal.ADMISSION),
    (
        422,
        "deployments.apps \"chat\" is forbidden: ValidatingAdmissionPolicy 'labels' with binding "
        "'all' denied request: a label is missing",
        Refusal.ADMISSION,
    ),
    (
        500,
        'Internal error occurred: failed calling webhook "policy.example": failed to call webhook: '
        'Post "https://policy.ns.svc:443/?timeout=10s": no endpoints available',
        Refusal.WEBHOOK,
    ),
    (500, 'Internal error occurred: admission webhook "x" denied the request', Refusal.NONE),
    (
        422,
        'Service "quota" is invalid: spec.ports: Required value: exceeded quota: none',
        Refusal.SCHEMA,
    ),
    (400, "Pod in version v1 cannot be handled as a Pod", Refusal.SCHEMA),
    (413, "Request entity too large: limit is 3145728", Refusal.SCHEMA),
    (503, "apiserver not ready", Refusal.NONE),
    (409, 'Operation cannot be fulfilled on resourcequotas "small"', Refusal.NONE),
    (404, 'namespaces "forbidden: x" not found', Refusal.NONE),
]


@pytest.mark.parametrize(("code", "message", "refusal"), MESSAGES)
def test_who_refuses_a_call(code: int, message: str, refusal: Refusal) -> None:
    assert Answer.parse(code, json.dumps({"message": message})).refusal is refusal


def test_a_field_counts_before_the_message() -> None:
    cause = {"reason": "NamespaceTerminating", "field": "metadata.namespace", "message": "ends"}
    body: dict[str, Any] = {"reason": "Forbidden", "message": RIGHTS}
    body["details"] = {"kind": "configmaps", "name": "chat", "causes": [cause]}
    answer = Answer.parse(403, json.dumps(body))
    assert answer.refusal is Refusal.NAMESPACE
    assert (answer.kind, answer.name, answer.causes[0].message) == ("configmaps", "chat", "ends")


@pytest.mark.parametrize("raw", ["", "<html>502</html>", "[]", "null", '{"details": []}', '"x"'])
def test_an_answer_that_is_no_status_has_its_code(raw: str) -> None:
    assert Answer.parse(502, raw) == Answer(502)


def test_an_event_s_message_alone_tells_too() -> None:
    assert of_message(f"{PODS}exceeded quota: small, requested: pods=1") is Refusal.QUOTA
    assert of_message("the node is gone: exceeded quota: small") is None

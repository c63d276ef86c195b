"""The only importer of the kubernetes client: plain dicts in and out, a time limit on every call.

One ApiClient for the process. Errors carry verb, kind, name and status, never a body or header.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from kvline_contract.names import (
    API_VERSION,
    CRD_TITLE,
    FIELD_MANAGER,
    GROUP,
    KIND,
    PLURAL,
)
from kvline_operator.errors import (
    ApiUnavailable,
    Conflict,
    Forbidden,
    Invalid,
    Missing,
    OperatorError,
)

Object = dict[str, Any]
Query = Sequence[tuple[str, str]]
JSON = "application/json"
METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
PAGE = 250  # objects of a list
TIMEOUT = (5, 30)  # connect, read; seconds
LEASE_TIMEOUT = (3, 6)  # an answer that is later is no renewal
NO_VERSION = "1"  # etcd's before anything is written: no object ever has it

# kind -> (path prefix, plural)
KINDS = {
    "ServiceAccount": ("/api/v1", "serviceaccounts"),
    "Service": ("/api/v1", "services"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "Pod": ("/api/v1", "pods"),
    "Event": ("/api/v1", "events"),
    "Deployment": ("/apis/apps/v1", "deployments"),
    "ReplicaSet": ("/apis/apps/v1", "replicasets"),
    "ControllerRevision": ("/apis/apps/v1", "controllerrevisions"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
    "Job": ("/apis/batch/v1", "jobs"),
    KIND: (f"/apis/{GROUP}/{API_VERSION}", PLURAL),
}


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    path: str
    what: str  # as errors name it
    query: Query = ()
    body: Any = None
    content: str = JSON
    accept: str = JSON


class Kube:
    """A thin REST client over the official one's transport and credentials."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api
        self.writes = 0  # for the test that nothing changed means zero
        self.may_write: Callable[[], bool] = lambda: True  # whether this is the operator that acts
        self.timed: Callable[[float], None] = lambda seconds: None  # hears how long each call took

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        return self._call("GET", kind, namespace, name, missing_is_none=True)

    def select(self, kind: str, namespace: str, selector: str = "") -> list[Object]:
        query = [("labelSelector", selector)] if selector else []
        found = self._call("GET", kind, namespace, None, query=query)
        return list((found or {}).get("items", []))

    def services(self, namespaces: tuple[str, ...]) -> list[Object]:
        """Every InferenceService of these namespaces, or of the cluster."""
        pages = (json.loads(self.read(path)) for path in _paths(KIND, namespaces))
        return [item for page in pages for item in page["items"]]

    def metadata(
        self, kind: str, namespaces: tuple[str, ...], selector: str = ""
    ) -> Iterator[Object]:
        """The metadata alone of a kind's objects in these namespaces, or in the cluster; in pages,
        so that thousands are never in memory at once."""
        for path in _paths(kind, namespaces):
            following = ""
            while True:
                query = [("limit", str(PAGE)), ("labelSelector", selector), ("continue", following)]
                page = json.loads(self.read(path, [q for q in query if q[1]], METADATA))
                yield from (item["metadata"] for item in page["items"] or ())
                following = page["metadata"].get("continue") or ""
                if not following:
                    break

    def apply(
        self, body: Object, anew: bool = False, over: Object | None = None, exact: bool = False
    ) -> None:
        """Server-side apply; takes back fields that somebody else has changed. Raises Conflict with
        `anew` where there is an object of that name, whosever it is; with `over` where that object
        has been replaced by another; with `exact` where it has changed since it was read."""
        query = [("fieldManager", FIELD_MANAGER), ("force", "true")]
        meta = dict(body["metadata"])
        if over is not None:
            kept = ("uid", "resourceVersion") if exact else ("uid",)
            meta |= {key: over["metadata"][key] for key in kept}
        if anew:
            meta["resourceVersion"] = NO_VERSION
        body = {**body, "metadata": meta}
        self._count_write()
        content = "application/apply-patch+yaml"
        where = (body["kind"], meta["namespace"], meta["name"])
        self._call("PATCH", *where, body=body, query=query, content=content)

    def replace_status(self, namespace: str, name: str, status: Object, version: str) -> None:
        """The whole status in one write, refused if the object changed since it was read."""
        patch = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": version},
            {"op": "add", "path": "/status", "value": status},
        ]
        self._count_write()
        self._call(
            "PATCH",
            KIND,
            namespace,
            f"{name}/status",
            body=patch,
            query=[("fieldManager", FIELD_MANAGER)],
            content="application/json-patch+json",
        )

    def amend(self, kind: str, namespace: str, name: str, patch: list[Object]) -> None:
        """A JSON patch of an object of ours, as the operator."""
        self._count_write()
        query = [("fieldManager", FIELD_MANAGER)]
        content = "application/json-patch+json"
        self._call("PATCH", kind, namespace, name, body=patch, query=query, content=content)

    def patch(self, kind: str, namespace: str, name: str, patch: list[Object]) -> None:
        """A JSON patch; raises Invalid where one of its tests does not hold."""
        content = "application/json-patch+json"
        self._call("PATCH", kind, namespace, name, body=patch, content=content)

    def log(self, namespace: str, pod: str, container: str) -> str:
        """What a container has printed so far."""
        path = f"{KINDS['Pod'][0]}/namespaces/{namespace}/pods/{pod}/log"
        return self.read(path, [("container", container)]).decode()

    def read(self, path: str, query: Query = (), accept: str = JSON) -> bytes:
        """The body of any GET, as it came."""
        return self._raw(Call("GET", path, path, query, accept=accept))

    def record(self, body: Object) -> bool:
        """Makes a Lease, or replaces the version of it that `body` names; False where another was
        faster. No write like the others: it says whose those are."""
        meta = body["metadata"]
        known = "resourceVersion" in meta
        name = meta["name"] if known else None
        try:
            self._call("PUT" if known else "POST", "Lease", meta["namespace"], name, body=body)
        except Conflict:
            return False
        return True

    def create(self, body: Object) -> bool:
        """False when an object of that name exists already."""
        self._count_write()
        try:
            self._call("POST", body["kind"], body["metadata"]["namespace"], None, body=body)
        except Conflict:
            return False
        return True

    def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Deletes exactly that object, in the background; gone already is fine."""
        self._count_write()
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        self._call("DELETE", kind, namespace, name, body=body, missing_is_none=True)

    def _count_write(self) -> None:
        if not self.may_write():
            raise ApiUnavailable("not written: this operator has not renewed its lease")
        self.writes += 1

    def served_versions(self) -> list[str]:
        """Versions of our group that the API server serves; empty when the CRD is absent."""
        found = self._send(Call("GET", f"/apis/{GROUP}", "APIGroup"), missing_is_none=True)
        return [v["version"] for v in (found or {}).get("versions", [])]

    def crd_schema(self) -> int | None:
        """The number in the schema's title, as the API server publishes it, which needs no right on
        CustomResourceDefinitions; None where it has none or is not published (yet)."""
        path = f"/openapi/v3/apis/{GROUP}/{API_VERSION}"
        found = self._send(Call("GET", path, "OpenAPI"), missing_is_none=True) or {}
        bodies = (found.get("components") or {}).get("schemas") or {}
        for name, body in bodies.items():
            number = str(body.get("title", "")).removeprefix(CRD_TITLE)
            if name.endswith(f".{KIND}") and number.isdigit():
                return int(number)
        return None

    def _call(
        self,
        method: str,
        kind: str,
        namespace: str,
        name: str | None,
        *,
        body: Any = None,
        query: Query = (),
        content: str = JSON,
        missing_is_none: bool = False,
    ) -> Object | None:
        (path,) = _paths(kind, (namespace,))
        path += f"/{name}" if name else ""
        what = f"{kind} {namespace}/{name or '*'}"
        return self._send(Call(method, path, what, query, body, content), missing_is_none)

    def _send(self, call: Call, missing_is_none: bool = False) -> Object | None:
        try:
            raw = self._raw(call)
        except Missing:
            if missing_is_none:
                return None
            raise
        return dict(json.loads(raw)) if raw else {}

    def _raw(self, call: Call) -> bytes:
        """The body of a success; raises for all else."""
        after, began = 0.0, time.monotonic()
        try:
            response = self._api.call_api(
                *self._api.param_serialize(
                    method=call.method,
                    resource_path=call.path,
                    query_params=list(call.query),
                    header_params={"Accept": call.accept, "Content-Type": call.content},
                    body=call.body,
                    auth_settings=["BearerToken"],
                ),
                _request_timeout=LEASE_TIMEOUT if "/leases" in call.path else TIMEOUT,
            )
            raw: bytes = response.read()  # type: ignore[no-untyped-call]
            status = response.status
        except ApiException as error:
            status, raw = error.status or 0, (error.body or "").encode()
            after = _seconds((error.headers or {}).get("Retry-After"))
        except HTTPError as error:
            raise ApiUnavailable(f"{call.method} {call.what}: {type(error).__name__}") from None
        finally:
            self.timed(time.monotonic() - began)
        if 200 <= status < 300:
            return raw
        raise _error(call, status, raw, after)


def _paths(kind: str, namespaces: tuple[str, ...]) -> list[str]:
    """Of a kind's collections: in each namespace, or in the whole cluster where none is named."""
    prefix, plural = KINDS[kind]
    return [f"{prefix}/namespaces/{n}/{plural}" for n in namespaces] or [f"{prefix}/{plural}"]


def _error(call: Call, status: int, raw: Any, after: float) -> OperatorError:
    """The API server's own message is kept for 403 and 422: it names the quota or the field."""
    try:
        message = str(json.loads(raw).get("message", ""))[:512]
    except (ValueError, AttributeError):
        message = ""
    text = f"{call.method} {call.what}: HTTP {status}"
    if status == 404:
        return Missing(text)
    if status == 409:
        return Conflict(text)
    if status == 403 and "quota" not in message:
        return Forbidden(f"{text}: {message}")
    if status in (403, 422, 400):
        return Invalid(f"{text}: {message}")
    return ApiUnavailable(text, after)


def _seconds(retry_after: str | None) -> float:
    """A Retry-After of seconds, a minute at most; a date is nothing an API server sends."""
    text = retry_after or ""
    return min(float(text), 60.0) if text.isdigit() else 0.0


def connect() -> Kube:
    """In the cluster with the pod's own token (re-read as it rotates), else the kubeconfig."""
    try:
        config.load_incluster_config()  # type: ignore[no-untyped-call]
    except config.ConfigException:
        config.load_kube_config()  # type: ignore[no-untyped-call]
    return Kube(api_client(client.Configuration.get_default_copy()))


def api_client(settings: client.Configuration) -> client.ApiClient:
    """Many connections, and no retries that we do not see."""
    settings.connection_pool_maxsize = 32
    settings.retries = False
    return client.ApiClient(settings)

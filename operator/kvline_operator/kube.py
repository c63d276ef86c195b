"""The only importer of the kubernetes client: plain dicts in and out, a timeout on every call.

One ApiClient for the process. Errors have verb, kind, name and the API server's Status.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.incluster_config import SERVICE_TOKEN_FILENAME
from urllib3.exceptions import HTTPError

from kvline_contract.names import (
    API_VERSION,
    AUTOSCALER,
    CRD_TITLE,
    EARLIER_GROUP,
    FIELD_MANAGER,
    GROUP,
    KIND,
    PLURAL,
)
from kvline_operator.answers import Answer, Refusal
from kvline_operator.errors import (
    ApiError,
    ApiUnavailable,
    Conflict,
    Denied,
    Forbidden,
    Invalid,
    Missing,
)

Object = dict[str, Any]
Query = Sequence[tuple[str, str]]
JSON = "application/json"
METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
PAGE = 250  # objects in a page of a list
MESSAGE = 1024  # characters of the API server's message, in ours
TIMEOUT = (5, 30)  # connect, read; seconds
LEASE_TIMEOUT = (3, 6)  # below the lease's own deadline
EARLIER_KIND = f"{KIND}.{EARLIER_GROUP}"  # the same kind in its earlier group
NO_VERSION = "1"  # a resourceVersion that no object has: with it, apply only creates

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
    "RoleBinding": ("/apis/rbac.authorization.k8s.io/v1", "rolebindings"),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
    "Job": ("/apis/batch/v1", "jobs"),
    "ResourceClaimTemplate": ("/apis/resource.k8s.io/v1", "resourceclaimtemplates"),
    KIND: (f"/apis/{GROUP}/{API_VERSION}", PLURAL),
    EARLIER_KIND: (f"/apis/{EARLIER_GROUP}/{API_VERSION}", PLURAL),
}


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    path: str
    what: str  # for error messages
    query: Query = ()
    body: Any = None
    content: str = JSON
    accept: str = JSON


class Kube:
    """A thin REST client on the transport and credentials of the official one."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api
        self.writes = 0  # since the start
        # Whether this process may write: whether it holds the Lease.
        self.may_write: Callable[[], bool] = lambda: True
        # Called with the duration of each call.
        self.on_call: Callable[[float], None] = lambda seconds: None

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        return self._call("GET", kind, namespace, name, missing_is_none=True)

    def select(self, kind: str, namespace: str, selector: str = "") -> list[Object]:
        query = [("labelSelector", selector)] if selector else []
        found = self._call("GET", kind, namespace, None, query=query)
        return list((found or {}).get("items", []))

    def services(self, namespaces: tuple[str, ...]) -> list[Object]:
        """All InferenceServices of these namespaces; of the cluster where none is given."""
        pages = (json.loads(self.read(path)) for path in _paths(KIND, namespaces))
        return [item for page in pages for item in page["items"]]

    def metadata(
        self, kind: str, namespaces: tuple[str, ...], selector: str = ""
    ) -> Iterator[Object]:
        """The metadata of a kind's objects in these namespaces, or in the cluster; page by page, so
        that thousands are never in memory at once."""
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
    ) -> Object:
        """Server-side apply with force; returns the object as it is then. Raises Conflict: with
        `anew` where an object of that name exists; with `over` where that object was replaced by
        another; with `exact` also where it has changed since it was read."""
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
        return self._call("PATCH", *where, body=body, query=query, content=content) or {}

    def replace_status(self, namespace: str, name: str, status: Object, version: str) -> None:
        """Replaces the status; raises Conflict where the object has changed since it was read."""
        patch = [
            {"op": "replace", "path": "/metadata/resourceVersion", "value": version},
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

    def scale(self, namespace: str, name: str, replicas: int, version: str) -> str:
        """Sets a service's spec.replicas as an autoscaler does, and returns its resourceVersion;
        raises Conflict where the service has changed since it was read."""
        self._count_write()
        body = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
        where = (KIND, namespace, f"{name}/scale")
        query, content = [("fieldManager", AUTOSCALER)], "application/merge-patch+json"
        made = self._call("PATCH", *where, body=body, query=query, content=content) or {}
        return str(made["metadata"]["resourceVersion"])

    def json_patch(self, kind: str, namespace: str, name: str, patch: list[Object]) -> Object:
        """A JSON patch with the operator's field manager; returns the object."""
        self._count_write()
        query = [("fieldManager", FIELD_MANAGER)]
        content = "application/json-patch+json"
        where = (kind, namespace, name)
        return self._call("PATCH", *where, body=patch, query=query, content=content) or {}

    def patch(
        self, kind: str, namespace: str, name: str, patch: list[Object], manager: str
    ) -> Object:
        """The object after a JSON patch by a field manager; raises Invalid where one of its tests
        does not hold."""
        query = [("fieldManager", manager)]
        content = "application/json-patch+json"
        where = (kind, namespace, name)
        return self._call("PATCH", *where, body=patch, query=query, content=content) or {}

    def log(self, namespace: str, pod: str, container: str) -> str:
        """A container's log so far."""
        path = f"{KINDS['Pod'][0]}/namespaces/{namespace}/pods/{pod}/log"
        return self.read(path, [("container", container)]).decode()

    def read(self, path: str, query: Query = (), accept: str = JSON) -> bytes:
        """The raw body of a GET."""
        return self._raw(Call("GET", path, path, query, accept=accept))

    def put_lease(self, body: Object) -> bool:
        """Creates a Lease, or replaces the version of it in `body`; False where another client was
        faster. Not counted as a write, and allowed without holding the lease."""
        meta = body["metadata"]
        known = "resourceVersion" in meta
        name = meta["name"] if known else None
        try:
            self._call("PUT" if known else "POST", "Lease", meta["namespace"], name, body=body)
        except Conflict:
            return False
        return True

    def create(self, body: Object) -> bool:
        """Creates an object; False where one of that name exists already."""
        self._count_write()
        try:
            where = (body["kind"], body["metadata"]["namespace"], None)
            self._call("POST", *where, body=body, query=[("fieldManager", FIELD_MANAGER)])
        except Conflict as error:  # or of a quota's figures, which change meanwhile
            if not error.answer.exists:
                raise
            return False
        return True

    def validate(self, body: Object) -> None:
        """Creates it in a dry run. Raises Invalid where the schema refuses it or has not all of its
        fields. Whether the name is free is asked last, and does not matter."""
        where = body["kind"], body["metadata"]["namespace"]
        query = [("dryRun", "All"), ("fieldValidation", "Strict")]
        with suppress(Conflict):
            self._call("POST", *where, None, body=body, query=query)

    def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Deletes the object with this UID, in the background; no error where it is gone."""
        self._count_write()
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        self._call("DELETE", kind, namespace, name, body=body, missing_is_none=True)

    def _count_write(self) -> None:
        if not self.may_write():
            raise ApiUnavailable("not written: this operator could not renew its lease")
        self.writes += 1

    def served_versions(self) -> list[str]:
        """Served versions of our API group; empty where the CRD is not installed."""
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
        """The body of a 2xx answer; raises for all others."""
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
            if not error.status:  # a certificate that is not the API server's, for one
                reason = str(error.reason)[:512]
                raise ApiUnavailable(f"{call.method} {call.what}: {reason}") from None
            status, raw = error.status, (error.body or "").encode()
            after = _seconds((error.headers or {}).get("Retry-After"))
        except HTTPError as error:
            raise ApiUnavailable(f"{call.method} {call.what}: {type(error).__name__}") from None
        finally:
            self.on_call(time.monotonic() - began)
        if 200 <= status < 300:
            return raw
        raise _error(call, status, raw, after)


def _paths(kind: str, namespaces: tuple[str, ...]) -> list[str]:
    """Paths of a kind's collections: of each namespace, or of the cluster where none is given."""
    prefix, plural = KINDS[kind]
    return [f"{prefix}/namespaces/{n}/{plural}" for n in namespaces] or [f"{prefix}/{plural}"]


def _error(call: Call, status: int, raw: bytes, after: float) -> ApiError:
    answer = Answer.parse(status, raw)
    message = answer.message[:MESSAGE]
    text = f"{call.method} {call.what}: HTTP {status}" + (f": {message}" if message else "")
    return _class_of(answer)(text, after, answer)


def _class_of(answer: Answer) -> type[ApiError]:
    """A webhook may refuse with any code: who refuses counts before it."""
    refusal = answer.refusal
    if refusal is Refusal.NONE:
        return {404: Missing, 409: Conflict}.get(answer.code, ApiUnavailable)
    if refusal is Refusal.WEBHOOK:
        return ApiUnavailable
    return {Refusal.RIGHTS: Forbidden, Refusal.SCHEMA: Invalid}.get(refusal, Denied)


def _seconds(retry_after: str | None) -> float:
    """A Retry-After in seconds, at most 60; API servers send no dates."""
    text = retry_after or ""
    return min(float(text), 60.0) if text.isdigit() else 0.0


def connect() -> Kube:
    """With the pod's service account token in a cluster, else the kubeconfig."""
    try:
        config.load_incluster_config()  # type: ignore[no-untyped-call]
        settings = client.Configuration.get_default_copy()
        settings.refresh_api_key_hook = _read_token  # type: ignore[assignment]
    except config.ConfigException:
        config.load_kube_config()  # type: ignore[no-untyped-call]
        settings = client.Configuration.get_default_copy()
    return Kube(api_client(settings))


def _read_token(settings: client.Configuration) -> None:
    """At each call: the client would read it once a minute by the wall clock, which may be set
    back."""
    settings.api_key["BearerToken"] = f"bearer {Path(SERVICE_TOKEN_FILENAME).read_text()}"


def api_client(settings: client.Configuration) -> client.ApiClient:
    """A larger connection pool, and no hidden retries."""
    settings.connection_pool_maxsize = 32
    settings.retries = False
    return client.ApiClient(settings)

"""The only importer of the kubernetes client: plain dicts in and out, a time limit on every call.

One ApiClient for the process. Errors carry verb, kind, name and status, never a body or header.
"""

from __future__ import annotations

import json
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from kvline_contract.names import API_VERSION, FIELD_MANAGER, GROUP, KIND, PLURAL
from kvline_operator.errors import (
    ApiUnavailable,
    Conflict,
    Forbidden,
    Invalid,
    OperatorError,
)

Object = dict[str, Any]
TIMEOUT = (5, 30)  # connect, read; seconds

# kind -> (path prefix, plural)
KINDS = {
    "ServiceAccount": ("/api/v1", "serviceaccounts"),
    "Service": ("/api/v1", "services"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "Pod": ("/api/v1", "pods"),
    "Event": ("/api/v1", "events"),
    "Deployment": ("/apis/apps/v1", "deployments"),
    "ControllerRevision": ("/apis/apps/v1", "controllerrevisions"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "Job": ("/apis/batch/v1", "jobs"),  # of the command line's, never the operator's
    KIND: (f"/apis/{GROUP}/{API_VERSION}", PLURAL),
}


class Kube:
    """A thin REST client over the official one's transport and credentials."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api
        self.writes = 0  # for the test that nothing changed means zero

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        return self._call("GET", kind, namespace, name, missing_is_none=True)

    def select(self, kind: str, namespace: str, selector: str = "") -> list[Object]:
        query = [("labelSelector", selector)] if selector else []
        found = self._call("GET", kind, namespace, None, query=query)
        return list((found or {}).get("items", []))

    def services(self, namespaces: tuple[str, ...]) -> list[Object]:
        """Every InferenceService that this operator looks after."""
        prefix, plural = KINDS[KIND]
        paths = [f"{prefix}/namespaces/{n}/{plural}" for n in namespaces] or [f"{prefix}/{plural}"]
        found: list[Object] = []
        for path in paths:
            page = self._send("GET", path, [], None, "application/json", f"{KIND} list", False)
            found += (page or {}).get("items", [])
        return found

    def apply(self, body: Object) -> Object:
        """Server-side apply; takes back fields that somebody else has changed."""
        query = [("fieldManager", FIELD_MANAGER), ("force", "true")]
        meta = body["metadata"]
        self.writes += 1
        return self._must(
            self._call(
                "PATCH",
                body["kind"],
                meta["namespace"],
                meta["name"],
                body=body,
                query=query,
                content="application/apply-patch+yaml",
            )
        )

    def replace_status(self, namespace: str, name: str, status: Object, version: str) -> None:
        """The whole status in one write, refused if the object changed since it was read."""
        patch = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": version},
            {"op": "add", "path": "/status", "value": status},
        ]
        self.writes += 1
        self._call(
            "PATCH",
            KIND,
            namespace,
            f"{name}/status",
            body=patch,
            query=[("fieldManager", FIELD_MANAGER)],
            content="application/json-patch+json",
        )

    def patch(self, kind: str, namespace: str, name: str, patch: list[Object]) -> None:
        """A JSON patch; raises Invalid where one of its tests does not hold."""
        content = "application/json-patch+json"
        self._call("PATCH", kind, namespace, name, body=patch, content=content)

    def log(self, namespace: str, pod: str, container: str) -> str:
        """What a container has printed so far."""
        path = f"{KINDS['Pod'][0]}/namespaces/{namespace}/pods/{pod}/log"
        what = f"log of Pod {namespace}/{pod}"
        query = [("container", container)]
        return self._raw("GET", path, query, None, "application/json", what)[1].decode()

    def create(self, body: Object) -> bool:
        """False when an object of that name exists already."""
        self.writes += 1
        try:
            self._call("POST", body["kind"], body["metadata"]["namespace"], None, body=body)
        except Conflict:
            return False
        return True

    def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Deletes exactly that object, in the background; gone already is fine."""
        self.writes += 1
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        self._call("DELETE", kind, namespace, name, body=body, missing_is_none=True)

    def served_versions(self) -> list[str]:
        """Versions of our group that the API server serves; empty when the CRD is absent."""
        found = self._send("GET", f"/apis/{GROUP}", [], None, "application/json", "APIGroup", True)
        return [v["version"] for v in (found or {}).get("versions", [])]

    def _call(
        self,
        method: str,
        kind: str,
        namespace: str,
        name: str | None,
        *,
        body: Any = None,
        query: list[tuple[str, str]] | None = None,
        content: str = "application/json",
        missing_is_none: bool = False,
    ) -> Object | None:
        prefix, plural = KINDS[kind]
        path = f"{prefix}/namespaces/{namespace}/{plural}" + (f"/{name}" if name else "")
        what = f"{kind} {namespace}/{name or '*'}"
        return self._send(method, path, query or [], body, content, what, missing_is_none)

    def _send(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]],
        body: Any,
        content: str,
        what: str,
        missing_is_none: bool,
    ) -> Object | None:
        status, raw = self._raw(method, path, query, body, content, what)
        if status == 404 and missing_is_none:
            return None
        if status == 404:
            raise _error(method, what, status, raw)
        return dict(json.loads(raw)) if raw else {}

    def _raw(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]],
        body: Any,
        content: str,
        what: str,
    ) -> tuple[int, bytes]:
        """Status and body, of a success or of a 404; raises for all else."""
        headers = {"Accept": "application/json", "Content-Type": content}
        try:
            response = self._api.call_api(
                *self._api.param_serialize(
                    method=method,
                    resource_path=path,
                    query_params=query,
                    header_params=headers,
                    body=body,
                    auth_settings=["BearerToken"],
                ),
                _request_timeout=TIMEOUT,
            )
            raw: bytes = response.read()  # type: ignore[no-untyped-call]
            status = response.status
        except ApiException as error:
            status, raw = error.status or 0, (error.body or "").encode()
        except HTTPError as error:
            raise ApiUnavailable(f"{method} {what}: {type(error).__name__}") from None
        if 200 <= status < 300 or status == 404:
            return status, raw
        raise _error(method, what, status, raw)

    @staticmethod
    def _must(value: Object | None) -> Object:
        assert value is not None
        return value


def _error(method: str, what: str, status: int, raw: Any) -> OperatorError:
    """The API server's own message is kept for 403 and 422: it names the quota or the field."""
    try:
        message = str(json.loads(raw).get("message", ""))[:512]
    except (ValueError, AttributeError):
        message = ""
    text = f"{method} {what}: HTTP {status}"
    if status == 409:
        return Conflict(text)
    if status == 403 and "quota" not in message:
        return Forbidden(f"{text}: {message}")
    if status in (403, 422, 400):
        return Invalid(f"{text}: {message}")
    return ApiUnavailable(text)


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

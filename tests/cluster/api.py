"""Direct calls to the API server, for what is polled many times a second: a kubectl process for
each would take most of a small machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from errors import ClusterError
from kubernetes import client, config
from urllib3.exceptions import HTTPError

Object = dict[str, Any]
JSON, MERGE = "application/json", "application/merge-patch+json"


class Api:
    """With a kubeconfig; by default the one that the environment names."""

    def __init__(self, kubeconfig: Path | None = None) -> None:
        settings = client.Configuration()
        where = str(kubeconfig) if kubeconfig else None
        config.load_kube_config(where, client_configuration=settings)  # type: ignore[no-untyped-call]
        settings.connection_pool_maxsize = 32
        settings.retries = False
        self._client = client.ApiClient(settings)
        self._paths: dict[str, tuple[str, str]] = {}

    def get(self, path: str, **query: str) -> Object | None:
        """None for an object that does not exist. Raises ClusterError without an answer."""
        return self._call("GET", path, query, None)

    def merge(self, path: str, patch: Object) -> bool:
        """A merge patch; False for an object that does not exist."""
        return self._call("PATCH", path, {}, patch) is not None

    def stream(self, path: str, **query: str) -> Iterator[Object]:
        """Events of a watch, until the API server ends it."""
        rest = b""
        answer = self._send("GET", path, {"watch": "1", **query}, None)
        for chunk in answer.stream(65536) if answer else ():
            *whole, rest = (rest + chunk).split(b"\n")
            yield from (json.loads(line) for line in whole)

    def path(self, kind: str, namespace: str, name: str = "") -> str:
        """The path of a kind's objects in a namespace; kinds are named as for kubectl."""
        if kind not in self._paths:
            self._paths = dict(self._discover())
        prefix, plural = self._paths[kind]
        return f"{prefix}/namespaces/{namespace}/{plural}" + (f"/{name}" if name else "")

    def _discover(self) -> Iterator[tuple[str, tuple[str, str]]]:
        """Every name of a kind -> path of its version, plural. Core kinds come last and take
        precedence, as in kubectl."""
        groups = (self.get("/apis") or {}).get("groups", [])
        prefixes = {f"/apis/{g['preferredVersion']['groupVersion']}": g["name"] for g in groups}
        for prefix, group in [*prefixes.items(), ("/api/v1", "")]:
            for kind in (self.get(prefix) or {}).get("resources", []):
                if kind["namespaced"] and "/" not in kind["name"]:
                    full = f"{kind['name']}.{group}"
                    words = (kind["name"], kind["singularName"], full, *kind.get("shortNames", ()))
                    yield from ((word, (prefix, kind["name"])) for word in words)

    def _call(self, method: str, path: str, query: dict[str, str], body: Any) -> Object | None:
        answer = self._send(method, path, query, body)
        return None if answer is None else dict(json.loads(answer.read()))

    def _send(self, method: str, path: str, query: dict[str, str], body: Any) -> Any:
        given = self._client.param_serialize(
            method=method,
            resource_path=path,
            query_params=list(query.items()),
            header_params={"Accept": JSON, "Content-Type": MERGE if body else JSON},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            answer = self._client.call_api(*given).response
        except HTTPError as error:
            raise ClusterError(f"{method} {path}: {type(error).__name__}") from None
        if answer.status == 404:
            return None
        if answer.status >= 300:
            raise ClusterError(f"{method} {path}: HTTP {answer.status}")
        return answer

"""Access to the cluster with the user's kubeconfig and permissions."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from kubernetes import client, config

from kvline_contract.names import (
    CLI_FIELD_MANAGER,
    KIND,
    LABEL_MANAGED_BY,
    LABEL_REVISION,
    LABEL_SERVICE,
    MANAGED_BY,
    base_name,
)
from kvline_operator.errors import Denied, Forbidden, Invalid
from kvline_operator.kube import Kube, api_client
from kvline_operator.observe import earlier_group
from kvline_operator.report.status_cache import RevisionEntry, history
from kvline_operator.store.revision_state import read

Object = dict[str, Any]
SET_UP = ("FailedMount", "FailedAttachVolume", "FailedMapVolume", "FailedCreatePodSandBox")
OURS = f"{LABEL_MANAGED_BY}={MANAGED_BY}"
TRIES = 10  # of a patch, while only the status changes
POLL = 0.3  # seconds


class Problem(Exception):
    """An error for the user; printed without a traceback."""


class Refused(Problem):
    """The API server does not accept the user's manifest."""


@dataclass(frozen=True, slots=True)
class Cluster:
    kube: Kube
    namespace: str

    def find(self, name: str) -> Object | None:
        return self.kube.get(KIND, self.namespace, name)

    def service(self, name: str) -> Object:
        found = self.find(name)
        if found is None:
            text = f"no InferenceService {name} in namespace {self.namespace}"
            raise Problem("\n".join([text, *self.earlier((self.namespace,))]))
        return found

    def validate(self, body: Object, file: str) -> None:
        """Raises Refused with a line for each field that the API server refuses. kubectl apply
        prints the whole object before them. What a user may not create is not validated."""
        meta = {key: body["metadata"][key] for key in ("name", "namespace")}
        try:
            self.kube.validate({**body, "metadata": meta})
        except (Forbidden, Denied):
            return
        except Invalid as error:
            of_schema = (f"{c.field}: {c.message}".removeprefix(": ") for c in error.answer.causes)
            unknown = error.answer.message.partition("strict decoding error: ")[2]
            lines = tuple(of_schema) or (unknown or error.answer.message,)
            raise Refused("\n".join(f"{file}: {line}" for line in lines)) from None

    def earlier(self, namespaces: tuple[str, ...]) -> list[str]:
        """What there is to say of services of the kind's earlier group; nothing to a user who may
        not list them."""
        try:
            found = earlier_group.count(self.kube, namespaces)
        except Forbidden:
            return []
        return [earlier_group.text(found)] if found else []

    def patch(self, body: Object, patch: list[Object]) -> Object:
        """Patches the service if it is as it was read, and returns it. Raises Problem where its
        spec has changed. The operator writes the status all through a rollout: a version that is
        new by that alone is patched instead."""
        name, now = body["metadata"]["name"], body
        for left in reversed(range(TRIES)):
            version = now["metadata"]["resourceVersion"]
            test = {"op": "test", "path": "/metadata/resourceVersion", "value": version}
            try:
                tested = [test, *patch]
                return self.kube.patch(KIND, self.namespace, name, tested, CLI_FIELD_MANAGER)
            except Invalid:
                now = self.service(name)
                if _written(now) != _written(body):
                    raise Problem(
                        f"{name} has changed meanwhile; check it and run the command again"
                    ) from None
                if not left or now["metadata"]["resourceVersion"] == version:
                    raise
        raise AssertionError("the last try returned or raised")

    def observed(self, written: Object, seconds: float) -> Object:
        """The service once the operator has read what was written."""
        meta, until = written["metadata"], time.monotonic() + seconds
        while True:
            now = self.service(meta["name"])
            read = (now.get("status") or {}).get("observedGeneration", 0)
            if now["metadata"]["uid"] != meta["uid"] or read >= meta["generation"]:
                return now
            if time.monotonic() >= until:
                raise Problem(
                    f"{meta['name']} is changed, but the operator has not read it within "
                    f"{seconds:g} s: is it running?"
                )
            time.sleep(POLL)

    def history(self, name: str) -> tuple[RevisionEntry, ...]:
        """The service's revisions with their stored states, newest first."""
        selector = f"{LABEL_SERVICE}={base_name(name)}"
        found = self.kube.select("ControllerRevision", self.namespace, selector)
        stored = {item["metadata"]["labels"][LABEL_REVISION]: item for item in found}
        return history(stored, {revision: read(item) for revision, item in stored.items()}, {})

    def newest_revision(self, name: str) -> Object | None:
        """The newest ControllerRevision of a service; of one that has none any other's in the
        namespace, whose pods have the operator's settings too. None where there is none."""
        found = self.kube.select("ControllerRevision", self.namespace, OURS)
        base = base_name(name)
        of = [r for r in found if r["metadata"]["labels"].get(LABEL_SERVICE) == base] or found
        return max(of, key=lambda r: int(r.get("revision", 0)), default=None)

    def events(self, body: Object) -> list[Object]:
        """Events of a service, oldest first; with those about volumes and network of its pods,
        whose cause is nowhere else."""
        uid = body["metadata"]["uid"]
        sized = (body.get("status") or {}).get("replicaSizing") or []
        pods = {item["pod"] for item in sized}
        found = self.kube.select("Event", self.namespace)
        own = [
            e
            for e in found
            if e["involvedObject"].get("uid") == uid
            or (e["involvedObject"].get("name") in pods and e["reason"] in SET_UP)
        ]
        return sorted(own, key=lambda e: e.get("lastTimestamp") or "")


def _written(body: Object) -> tuple[Any, ...]:
    """What a patch replaces: the spec, of this object."""
    return body["metadata"]["uid"], body["spec"]


def connect(context: str | None, kubeconfig: str | None, namespace: str | None) -> Cluster:
    try:
        settings = client.Configuration()
        config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=kubeconfig, context=context, client_configuration=settings
        )
        known, current = config.list_kube_config_contexts(kubeconfig)  # type: ignore[no-untyped-call]
    except config.ConfigException as error:
        raise Problem(f"no usable kubeconfig: {error}") from None
    used = next((c for c in known if c["name"] == context), current)
    home = namespace or used["context"].get("namespace") or "default"
    return Cluster(Kube(api_client(settings)), home)

"""Prometheus metrics of the operator and of every service's status.

Units are in the names. Metrics of services are read from the status cache at each scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvline_operator.kube import Kube
from kvline_operator.observe.claims import Claims
from kvline_operator.observe.earlier_group import EarlierGroup
from kvline_operator.report.display import ROLES, memory, rank_memories, wanted
from kvline_operator.report.status_cache import StatusCache, View

Object = dict[str, Any]
MIB = 1 << 20
STATES = {"True": 1, "False": 0, "Unknown": -1}
SERVICE = ["namespace", "service"]


class Queue(Protocol):
    """Of the services to be reconciled."""

    def __len__(self) -> int: ...
    def oldest_overdue(self) -> float: ...
    def stalled(self) -> float: ...


class Metrics:
    """Counts reconciles, and collects all other metrics at each scrape."""

    def __init__(
        self,
        cache: StatusCache,
        kube: Kube,
        queue: Queue,
        earlier: EarlierGroup | None = None,
        claims: Claims | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self._reconciles = Counter(
            "kvline_reconciles", "Reconciles by result", ["result"], registry=self.registry
        )
        self._seconds = Histogram(
            "kvline_reconcile_seconds", "Duration of a reconcile", registry=self.registry
        )
        self._cpu = Histogram(
            "kvline_reconcile_cpu_seconds",
            "CPU time of a reconcile's own thread, without the threads that read lists and reports",
            registry=self.registry,
        )
        calls = Histogram(
            "kvline_api_call_seconds",
            "Duration of a call to the API server",
            registry=self.registry,
        )
        kube.on_call = calls.observe
        self.registry.register(_Services(cache))
        self.registry.register(_Work(kube, queue, earlier))
        if claims is not None:
            self.registry.register(_Claims(claims))

    def reconciled(self, result: str, seconds: float) -> None:
        self._reconciles.labels(result).inc()
        self._seconds.observe(seconds)

    def worked(self, seconds: float) -> None:
        self._cpu.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Work(Collector):
    def __init__(self, kube: Kube, queue: Queue, earlier: EarlierGroup | None) -> None:
        self._kube = kube
        self._queue = queue
        self._earlier = earlier

    def collect(self) -> Iterator[Metric]:
        text = "1 if this operator holds the lease and reconciles, 0 if it stands by"
        yield GaugeMetricFamily("kvline_operator_active", text, int(self._kube.may_write()))
        text = "Writes to the API server since the start, without renewals of the lease"
        yield CounterMetricFamily("kvline_api_writes", text, value=self._kube.writes)
        text = "Services queued for a reconcile"
        yield GaugeMetricFamily("kvline_queue_keys", text, len(self._queue))
        text, late = "Delay of the most overdue reconcile", self._queue.oldest_overdue()
        yield GaugeMetricFamily("kvline_queue_overdue_seconds", text, late)
        text = "Time since a reconcile last finished while some are due; liveness fails above 300"
        yield GaugeMetricFamily("kvline_queue_stalled_seconds", text, self._queue.stalled())
        text = "Services of the API group kvline.dev, which this version does not reconcile"
        earlier = self._earlier.services if self._earlier is not None else 0
        yield GaugeMetricFamily("kvline_earlier_group_services", text, earlier)


class _Claims(Collector):
    def __init__(self, claims: Claims) -> None:
        self._claims = claims

    def collect(self) -> Iterator[Metric]:
        text = "1 if a namespace is left to another release, 0 if that one renews no Lease"
        labels = ["namespace", "release"]
        family = GaugeMetricFamily("kvline_namespace_claim_active", text, labels=labels)
        for namespace, claim in sorted(self._claims.known().items()):
            family.add_metric([namespace, claim.release], claim.lives)
        yield family


class _Services(Collector):
    """Metrics of each service's status."""

    def __init__(self, cache: StatusCache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        views = self._cache.all()
        for name, text, label, figures in FAMILIES:
            labels = [*SERVICE, *([label] if label else [])]
            family = GaugeMetricFamily(f"kvline_service_{name}", text, labels=labels)
            for view in views:
                for key, value in figures(view).items():
                    where = [view.key.namespace, view.key.name, *([key] if label else [])]
                    family.add_metric(where, value)
            yield family
        yield _ranks(views)
        yield _conditions(views)
        yield _revisions(views)


Values = dict[str, int]  # by the value of the family's own label


def _capacity(view: View) -> Object:
    return dict(view.status.get("capacity") or {})


def _budget(view: View) -> Values:
    figures = _capacity(view)
    if not figures:
        return {}
    spread = figures["spread"]
    return {"min": spread["min"], "max": spread["max"], "sum": figures["kvTokensTotal"]}


def _memory(view: View) -> Values:
    found = memory(view.status)
    if found is None:
        return {}
    return {"total": found.total_mib * MIB, **{p.name: p.mib * MIB for p in found.parts}}


def _replicas(view: View) -> Values:
    status = view.status
    existing, ready = status.get("replicas", 0), status.get("readyReplicas", 0)
    counts = {"wanted": wanted(view.spec, status), "existing": existing, "ready": ready}
    return {**counts, "ended": status.get("endedPods", 0)}


def _gate(view: View) -> Values:
    gate = (view.status.get("rollout") or {}).get("gate") or {}
    return {name: gate[name] for name in ("measured", "required", "baseline") if name in gate}


def _gate_sequences(view: View) -> Values:
    gate = (view.status.get("rollout") or {}).get("gate") or {}
    return {name: int(value) for name, value in (gate.get("sequences") or {}).items()}


def _outdated(view: View) -> Values:
    return {"": int((view.status.get("rollout") or {}).get("imageOutdated", False))}


def _of_capacity(name: str) -> Callable[[View], Values]:
    return lambda view: {"": int(_capacity(view)[name])} if name in _capacity(view) else {}


FAMILIES: tuple[tuple[str, str, str, Callable[[View], Values]], ...] = (
    (
        "budget_tokens",
        "Validated KV tokens of the ready replicas; while none is ready, of the last that was",
        "figure",
        _budget,
    ),
    (
        "budget_serving",
        "1 if ready replicas serve the budget, 0 if it is the last one served",
        "",
        _of_capacity("serving"),
    ),
    ("memory_bytes", "Memory of the smallest replica by part", "part", _memory),
    ("replicas", "Replicas by state", "state", _replicas),
    ("gate_tokens", "KV tokens of the latest gate verdict", "figure", _gate),
    ("gate_sequences", "Sequences of the latest gate verdict", "figure", _gate_sequences),
    ("image_outdated", "1 if the operator's default image is another one", "", _outdated),
    (
        "full_length_sequences",
        "Sequences of maxModelLen tokens that fit the smallest budget",
        "",
        _of_capacity("fullLengthSequences"),
    ),
    (
        "sequences",
        "Sequences whose recurrent states a replica holds at once; none of other models",
        "",
        _of_capacity("sequences"),
    ),
    (
        "validation_attempts",
        "Validation attempts of the smallest replica; above 1: the first size failed",
        "",
        _of_capacity("attempts"),
    ),
)


def _ranks(views: list[View]) -> Metric:
    """Of replicas with several ranks alone; memory_bytes has that of the only rank."""
    family = GaugeMetricFamily(
        "kvline_service_rank_memory_bytes",
        "Memory of each rank of the smallest replica by part, where it has several ranks",
        labels=[*SERVICE, "rank", "part"],
    )
    for view in views:
        for item in rank_memories(view.status):
            where = [view.key.namespace, view.key.name, str(item.rank)]
            for part in item.parts:
                family.add_metric([*where, part.name], part.mib * MIB)
    return family


def _conditions(views: list[View]) -> Metric:
    family = GaugeMetricFamily(
        "kvline_service_condition",
        "1 if the condition is True, 0 if False, -1 if Unknown",
        labels=[*SERVICE, "type", "reason"],
    )
    for view in views:
        for item in view.status.get("conditions") or []:
            where = [view.key.namespace, view.key.name, item["type"], item["reason"]]
            family.add_metric(where, STATES.get(item["status"], -1))
    return family


def _revisions(views: list[View]) -> Metric:
    family = GaugeMetricFamily(
        "kvline_service_revision_info",
        "Always 1; the revisions of a service as labels",
        labels=[*SERVICE, *ROLES],
    )
    for view in views:
        rollout = view.status.get("rollout") or {}
        names = [rollout.get(f"{role}Revision", "") for role in ROLES]
        family.add_metric([view.key.namespace, view.key.name, *names], 1)
    return family

"""One reconcile of an InferenceService: read, parse, observe, plan, apply, report.

Level-triggered: it may run twice, stop half-way, run late or on stale data, and does not depend on
which event triggered it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime

from kvline_contract.names import KIND
from kvline_operator.api.key import Key
from kvline_operator.api.spec import parse
from kvline_operator.apply.drift import Corrections
from kvline_operator.apply.tokens import Tokens
from kvline_operator.apply.writer import Writer
from kvline_operator.errors import Gone
from kvline_operator.kube import Kube
from kvline_operator.observe.children import observe
from kvline_operator.observe.claims import Claims
from kvline_operator.observe.ownership import PodOwnership
from kvline_operator.observe.reports import Reports
from kvline_operator.plan.service_plan import ServicePlan
from kvline_operator.report.reporter import Reporter
from kvline_operator.report.status_cache import StatusCache
from kvline_operator.settings import Settings

CLAIMED_SECONDS = 30.0  # until a service that another release has is looked at again


@dataclass(frozen=True, slots=True)
class Context:
    """Clients, caches and settings shared by all reconciles of the process."""

    kube: Kube
    settings: Settings
    reports: Reports
    pool: ThreadPoolExecutor
    status_cache: StatusCache
    pod_ownership: PodOwnership
    claims: Claims
    corrections: Corrections = field(default_factory=Corrections)
    tokens: Tokens = field(default_factory=Tokens)
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    @property
    def writer(self) -> Writer:
        reads = self.reports, self.pool
        return Writer(self.kube, self.settings, *reads, self.corrections, self.tokens, self.now)

    @property
    def reporter(self) -> Reporter:
        return Reporter(self.kube, self.settings, self.status_cache, self.now)


def reconcile(context: Context, key: Key) -> float:
    """Brings one service closer to its spec. Returns the seconds after which to requeue it; 0: with
    the next event. What it raises is in the status too, where that could be written."""
    body = context.kube.get(KIND, key.namespace, key.name)
    if body is None or body["metadata"].get("deletionTimestamp"):
        context.status_cache.drop(key)
        return 0.0  # its children are garbage collected
    try:
        if context.claims.other(key.namespace):
            context.status_cache.drop(key)
            return CLAIMED_SECONDS
        spec = parse(body)
        observed = observe(context.kube, spec, context.reports, context.pool, context.pod_ownership)
        plan = ServicePlan.of(spec, observed, context.settings, context.now())
        written = context.writer.write(plan)
    except Gone:
        context.status_cache.drop(key)
        return 0.0
    except Exception as error:
        return context.reporter.failed(key, body, error)
    if written.version:  # else the status would be refused as that of an earlier version
        body["metadata"]["resourceVersion"] = written.version
    return context.reporter.report(key, body, plan, written.error, written.lasting)

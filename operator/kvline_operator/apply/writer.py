"""Writes what a plan wants and the cluster has not, then deletes what it no longer wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvline_contract.names import base_name, gate_name, revision_of, scale_name
from kvline_contract.times import stamp
from kvline_operator.apply import ensure as apply
from kvline_operator.apply import notices
from kvline_operator.apply.drift import Corrections
from kvline_operator.apply.tokens import Tokens
from kvline_operator.errors import NameConflict, OperatorError
from kvline_operator.kube import Kube
from kvline_operator.observe.ended_pods import HISTORY_LIMIT
from kvline_operator.observe.reports import Reports
from kvline_operator.plan import jobs, prepare, render, revisions, rollout
from kvline_operator.plan.service_plan import ServicePlan
from kvline_operator.settings import Settings

Object = dict[str, Any]
REMOVED = "set back; change the InferenceService instead"
ADMITTED = "so made by a mutating admission webhook or policy as it was written; it stays"


@dataclass(frozen=True, slots=True)
class Written:
    """What came of the writes."""

    error: OperatorError | None = None  # at the first that failed; those after it were not tried
    lasting: tuple[str, ...] = ()  # changes by others that came back after each removal
    version: str = ""  # resourceVersion of the service, where it was written too


@dataclass(frozen=True, slots=True)
class Writer:
    kube: Kube
    settings: Settings
    reports: Reports
    pool: ThreadPoolExecutor
    corrections: Corrections
    tokens: Tokens
    now: Callable[[], datetime]

    def write(self, plan: ServicePlan) -> Written:
        spec, observed = plan.spec, plan.observed
        notices.end_waits(self.reports, self.pool, self.tokens, spec.uid, observed.needless)
        try:
            lasting = [*self._objects(plan), *self._revisions(plan)]
            self._prepare(plan)
            self._prune(plan)
            version = self._scale(plan)
        except OperatorError as error:
            return Written(error)
        waiting = plan.rollout.to_notify(observed.pods)
        notices.open_gates(self.reports, self.pool, self.tokens, spec.uid, waiting)
        return Written(lasting=tuple(filter(None, lasting)), version=version)

    def _objects(self, plan: ServicePlan) -> list[str]:
        """Of the service, then its ControllerRevisions: before their Deployments, so that a crash
        in between does not lose a verdict. Those are written only over the version that was read:
        after a write by another operator this reconcile fails and runs again."""
        lasting = [self._ensure(plan, wanted) for wanted in plan.objects]
        lasting += [self._ensure(plan, wanted, exact=True) for wanted in plan.maps]
        for wanted, over in plan.revisions:
            if over is None:
                apply.create_revision(self.kube, wanted)
            else:
                self.kube.apply(wanted, over=over, exact=True)
        return lasting

    def _revisions(self, plan: ServicePlan) -> list[str]:
        spec, observed, state = plan.spec, plan.observed, plan.rollout
        lasting = []
        for name, replicas in rollout.write_order(state.plan.replicas, observed.deployment_states):
            if name not in state.stored:
                continue  # its ControllerRevision was deleted: the Deployment stays unchanged
            seen = observed.config_map(gate_name(spec.base, name))
            rolls = bool(state.plan.candidate)
            digest = notices.digest(self.tokens, (spec.uid, name), seen, rolls)
            gate = state.gate(name, spec, digest)
            launch = self._launch(plan, state.stored[name])
            objects = render.revision_objects(spec, state.stored[name], replicas, gate, launch)
            lasting += [self._ensure(plan, wanted) for wanted in objects]
        return lasting

    def _launch(self, plan: ServicePlan, stored: Object) -> str:
        """A revision's launch file: from its ControllerRevision, else from the live ConfigMap."""
        if "launch" in stored["data"]:
            return render.launch_text(plan.spec, stored, None)
        name = stored["metadata"]["name"]
        live = plan.observed.config_map(name)
        live = live or self.kube.get("ConfigMap", plan.spec.namespace, name)
        return render.launch_text(plan.spec, stored, live)

    def _ensure(self, plan: ServicePlan, wanted: Object, exact: bool = False) -> str:
        """Applies an object. Returns a description of changes by others that are tolerated for now;
        empty where there are none. An event reports the others."""
        kind, meta = wanted["kind"], wanted["metadata"]
        listed = plan.observed.listed
        seen = listed.get(kind, {}).get(meta["name"])
        absent = kind in listed or not plan.observed.revisions
        found = apply.ensure(self.kube, wanted, seen, absent, exact, self.corrections)
        for dispute in found:
            if dispute.end is not apply.End.TOLERATED:
                self._notify(wanted, dispute)
        return "".join(dispute.text for dispute in found if dispute.end is apply.End.TOLERATED)

    def _notify(self, wanted: Object, dispute: apply.Dispute) -> None:
        """Now and not with the status: a later write may fail, and the event would be lost."""
        meta = wanted["metadata"]
        of = meta["ownerReferences"][0]
        owner = render.Owner(meta["namespace"], of["name"], of["uid"], base_name(of["name"]))
        event = ("ForeignChangeRemoved", "Warning", f"{dispute.text}: {REMOVED}")
        if dispute.end is apply.End.ADMITTED:
            event = ("AdmissionChanged", "Normal", f"{dispute.text}: {ADMITTED}")
        self.kube.create(render.event(owner, event, dispute.version, stamp(self.now())))

    def _scale(self, plan: ServicePlan) -> str:
        spec, wanted = plan.spec, plan.replicas_to_write
        if wanted is None:
            return ""
        return self.kube.scale(spec.namespace, spec.name, wanted, spec.replicas_field.version)

    def _prepare(self, plan: ServicePlan) -> None:
        """Creates the Job that the pods wait for and deletes other unfinished ones; finished Jobs
        are deleted by their TTL. Jobs are immutable, so none is updated."""
        wanted = plan.rollout.preparing
        name = wanted.name if wanted is not None else ""
        for job in prepare.unfinished(plan.observed):
            if job["metadata"]["name"] != name:
                apply.prune(self.kube, job, "Job")
        if wanted is None or wanted.exists:
            return
        self._ensure(plan, jobs.policy(plan.spec, wanted.job, self.settings))
        if not self.kube.create(wanted.job):
            raise NameConflict(
                f"Job {name} exists and is not this service's; rename one of the two"
            )

    def _prune(self, plan: ServicePlan) -> None:
        """Deletes Deployments, ConfigMaps and ResourceClaimTemplates of revisions that are not in
        the plan, all but the newest ten ControllerRevisions and terminal pods, and what the
        autoscaler stored where it is off."""
        spec, observed, replicas = plan.spec, plan.observed, plan.rollout.plan.replicas
        of_revisions: tuple[tuple[str, Sequence[Object]], ...] = (
            ("Deployment", observed.deployments),
            ("ConfigMap", observed.config_maps),
            ("ResourceClaimTemplate", observed.claim_templates),
        )
        for kind, items in of_revisions:
            for item in items:
                if (revision := revision_of(item)) and revision not in replicas:
                    apply.prune(self.kube, item, kind)
        for pod in observed.ended[HISTORY_LIMIT:]:
            self.kube.delete("Pod", spec.namespace, pod.name, pod.uid)
        newest = sorted(observed.revisions, key=lambda r: r.get("revision", 0), reverse=True)
        for item in newest[revisions.HISTORY_LIMIT :]:
            if revision_of(item) not in replicas:
                apply.prune(self.kube, item, "ControllerRevision")
        old = observed.config_map(scale_name(spec.base))
        if spec.autoscaling is None and old is not None:
            apply.prune(self.kube, old, "ConfigMap")

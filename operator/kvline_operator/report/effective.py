"""status.effective: the settings that hold, with the defaults of absent fields. Pure.

Defaults are not written into the spec: one in a field that makes a revision would be a new revision
whenever it changes.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvline_contract.codec import camel, encode
from kvline_contract.launch import KVCacheDtype, LoadFormat
from kvline_contract.report import SizingReport
from kvline_operator.api.modalities import BOUNDS, Modality
from kvline_operator.api.spec import speculation
from kvline_operator.plan.podspec import DRAIN_SECONDS, START_SECONDS, shared_memory
from kvline_operator.report.service_state import ServiceState

Object = dict[str, Any]
CHOSEN = ("maxModelLen", "maxRunningRequests", "maxPrefillTokens", "maxTopLogprobs")


def effective(state: ServiceState) -> Object:
    """Under the spec's names. What the server chooses is there once a replica of the newest
    revision has reported it."""
    spec, inputs = state.spec, state.inputs
    reports = [p.report for p in state.newest if p.report is not None]
    chosen = (report.effective for report in reports)
    reported: Object = next((encode(found) for found in chosen if found is not None), {})
    engine, resources = inputs.get("engine", {}), inputs["resources"]
    kept = {key: reported[key] for key in CHOSEN if key in reported}
    capacity = {"headroomMiB": reported["headroomMiB"]} if reported else {}
    out: Object = {
        "drainSeconds": inputs.get("drainSeconds", DRAIN_SECONDS),
        "startupSeconds": inputs.get("startupSeconds", START_SECONDS),
        "upgradePolicy": str(spec.upgrade_policy),
        "model": {"loadFormat": inputs["model"].get("loadFormat", str(LoadFormat.WEIGHTS))},
        "resources": {"gpus": resources.get("gpus", 0), "sharedMemory": shared_memory(resources)},
        "engine": {
            "kvCacheDtype": str(KVCacheDtype.AUTO),
            **engine,
            **kept,
            **_speculation(engine),
            **_states(reports),
            **_images(reported),
        },
        "capacity": {**inputs.get("capacity", {}), **capacity, "reuse": str(spec.reuse)},
        "rollout": _fields(spec.rollout),
    }
    if spec.autoscaling is not None:
        out["autoscaling"] = _fields(spec.autoscaling)
    return out


def _speculation(engine: Object) -> Object:
    if "speculation" not in engine:
        return {}
    found = speculation(engine)
    made: Object = {"method": str(found.method), "maxDraftTokens": found.draft_tokens}
    if found.max_sequences is not None:
        made["maxSequences"] = found.max_sequences
    return {"speculation": made}


def _states(reports: list[SizingReport]) -> Object:
    """Of a model whose layers keep recurrent states; servers before there was a choice of their
    dtype report none."""
    results = [r.result for r in reports if r.result is not None]
    result = next((r for r in results if r.snapshots is not None), None)
    if result is None:
        return {}
    dtype = {"stateDtype": result.state_dtype} if result.state_dtype else {}
    return {"prefixSnapshots": result.snapshots, **dtype}


def _images(reported: Object) -> Object:
    """What a replica serves, which without the field depends on its model."""
    bounds = {key: reported[key] for key in BOUNDS if key in reported}
    if not reported:
        return {}
    kinds = [Modality.TEXT, Modality.IMAGE] if bounds else [Modality.TEXT]
    return {"modalities": list(map(str, kinds)), **bounds}


def _fields(policy: Any) -> Object:
    """Without `promote`, which has no default."""
    found = {camel(name): value for name, value in asdict(policy).items() if name != "promote"}
    return {name: str(v) if isinstance(v, str) else v for name, v in found.items()}

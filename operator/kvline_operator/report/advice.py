"""What each reason of each condition means and what to do about it. Source of the table in
docs/operations.md and of `kubectl kvline explain`."""

from __future__ import annotations

from kvline_operator.report.start_advice import NOTHING as NOTHING
from kvline_operator.report.start_advice import START_ADVICE, Advice
from kvline_operator.store.records import DRIFT_PERCENT

ADVICE = (
    *START_ADVICE,
    Advice(
        "CapacityMeasured",
        ("Validated",),
        "a replica's KV budget is validated: the stress set ran at that size",
        NOTHING,
    ),
    Advice(
        "CapacityMeasured",
        ("Pending", "Loading", "Autotuning", "Probing", "Stressing", "Validating"),
        "a replica is being sized",
        "wait; the message has the stage, and the page and the pod's log also its seconds so far "
        "and those left; a stage without progress for 300 s ends the container",
    ),
    Advice(
        "CapacityMeasured",
        ("ShrunkRetry",),
        "a size ran out of memory; the next attempt is 5 % smaller",
        "nothing; there are at most four attempts",
    ),
    Advice(
        "CapacityMeasured",
        ("OutOfMemory",),
        "every attempt ran out of memory, or the engine did while serving, or with a GPU the "
        "container was killed for host memory",
        "change a field that the message or status.diagnosis names; without a GPU, or after a kill "
        "for host memory, raise spec.resources.memory",
    ),
    Advice(
        "CapacityMeasured",
        ("ContextDoesNotFit",),
        "spec.engine.maxModelLen does not fit the KV budget",
        "lower it; the message has the largest value that fits",
    ),
    Advice(
        "CapacityMeasured",
        ("StepTooLong",),
        "a step took longer than 30 s, and in service would be taken for a hung engine",
        "lower the setting in the message to the value given there, or give the pod more CPUs",
    ),
    Advice(
        "CapacityMeasured",
        ("EngineExited",),
        "the engine ended with an error",
        "the message has its last error; see `kubectl logs` of the pod",
    ),
    Advice(
        "CapacityMeasured",
        ("Killed",),
        "the kubelet or the node killed the container; that rejects no revision",
        "see the events of the pod: a failed probe, a node shutdown, or node pressure",
    ),
    Advice(
        "CapacityMeasured",
        ("ReportInvalid",),
        "the pod's sizing report is invalid",
        "compare the versions of operator and server image",
    ),
    Advice(
        "CapacityMeasured",
        ("ReportMissing",),
        "the sizing report of a pod that runs cannot be fetched",
        "check that a NetworkPolicy of yours lets the operator reach port 8001",
    ),
    Advice("CapacityMeasured", ("ScaledToZero",), "spec.replicas is 0", NOTHING),
    Advice(
        "CapacitySufficient",
        ("Sufficient",),
        "each replica reaches its threshold; the message has it and its source",
        NOTHING,
    ),
    Advice(
        "CapacitySufficient",
        ("BelowMinimum",),
        "a replica measured less than spec.capacity.minKVTokens or minSequences",
        "lower it, or without a GPU raise spec.resources.memory; the message has both figures, and "
        "other fields",
    ),
    Advice(
        "CapacitySufficient",
        ("BelowBaseline",),
        "a replica of a new revision measured less than minCapacityPercent of its baseline",
        "change the spec, lower spec.rollout.minCapacityPercent, or promote the revision",
    ),
    Advice(
        "CapacitySufficient",
        ("NotComparable",),
        "a replica is measured, but its model, kvCacheDtype, stateDtype, bytes per token, number "
        "of GPUs or GPU model has no baseline",
        "set spec.capacity.minKVTokens, or promote the revision",
    ),
    Advice("CapacitySufficient", ("Unknown",), "nothing is measured yet", "see CapacityMeasured"),
    Advice("CapacityStable", ("Stable",), "identical replicas measure the same", NOTHING),
    Advice(
        "CapacityStable",
        ("BelowBaseline",),
        "a replica of the stable revision measured less than minCapacityPercent of the baseline; "
        "it serves nevertheless",
        "check what changed on its node (driver, GPU, other processes), or where the message names "
        "it, its memory; if it is intended, promote the revision: that begins a new baseline",
    ),
    Advice(
        "CapacityStable",
        ("Drifted",),
        f"a replica measured over {DRIFT_PERCENT} % more or less than recorded for an identical "
        "one",
        "check what shares its node or GPU; the message has both figures",
    ),
    Advice("CapacityStable", ("Unknown",), "nothing is measured yet", "see CapacityMeasured"),
    Advice(
        "CapacityStable",
        ("NoRecord",),
        "no size of these replicas is recorded yet",
        "nothing; pinned sizes are not recorded",
    ),
    Advice("UpToDate", ("UpToDate",), "the spec's revision alone serves", NOTHING),
    Advice(
        "UpToDate",
        ("ScaledToZero",),
        "spec.replicas is 0, so a new revision is measured and rolled out only once it is more",
        NOTHING,
    ),
    Advice(
        "UpToDate",
        ("RollingOut", "Scaling"),
        "in progress; a new revision is measured before it takes traffic",
        "wait",
    ),
    Advice(
        "UpToDate",
        ("GateHeld",),
        "a new revision cannot be measured (no pod, node, image, model or GPU, or a lost rank) or "
        "compared; with Surge the stable one serves meanwhile, with Replace and Recreate it is "
        "scaled up again after spec.rollout.progressDeadlineSeconds",
        "the message has the cause; for another model, number of GPUs, kvCacheDtype or stateDtype "
        "set spec.capacity.minKVTokens, or promote",
    ),
    Advice(
        "UpToDate",
        ("RevisionRejected",),
        "a new revision measured too few KV tokens, its engine failed twice, or (Replace, "
        "Recreate) no replica was ready in time; the stable one serves or is scaled up again, and "
        "the rejected one's replicas are deleted (with spec.rollout.onFailure Hold: kept, without "
        "traffic)",
        "change the spec, or promote the revision; the message has figures and reason",
    ),
    Advice(
        "UpToDate",
        ("PromotionRefused",),
        "spec.rollout.promote names a revision of which no replica was ever measured, or that it "
        "has accepted before",
        "correct what the message names, or restart for another try; to promote it again, remove "
        "the field and set it again",
    ),
    Advice(
        "UpToDate",
        ("Paused",),
        "spec.rollout.paused is true",
        "kubectl kvline resume NAME, or remove the field",
    ),
    Advice(
        "UpToDate",
        ("ForeignChange",),
        "another manager makes the same change to a child object after each correction; after five "
        "within an hour it is tolerated, as is any change to an object corrected twenty times",
        "the message names path and field manager: stop that one and change the InferenceService; "
        "for a restart set spec.restartedAt",
    ),
    Advice("ScalingActive", ("Stable", "Scaling"), "replicas follow the load", NOTHING),
    Advice(
        "ScalingActive",
        ("AtMaximum",),
        "the load needs more than spec.autoscaling.maxReplicas",
        "raise it, or let clients wait",
    ),
    Advice(
        "ScalingActive",
        ("DemandUnknown",),
        "ready replicas do not report their load, or none is ready; none is removed meanwhile",
        "check that the operator reaches port 8001 of the pods",
    ),
    Advice(
        "ScalingActive",
        ("ForeignChange",),
        "another manager writes spec.replicas too; it is set back, at most three times a day, and "
        "has no effect meanwhile",
        "the message names it: make it ignore the field, or remove spec.autoscaling",
    ),
    Advice("Ready", ("Serving",), "a ready replica of an accepted revision serves", NOTHING),
    Advice("Ready", ("ScaledToZero",), "spec.replicas is 0", NOTHING),
)


def advise(condition: str, reason: str) -> Advice | None:
    """Ready has the reason and the advice of the condition that prevents it."""
    for item in ADVICE:
        if reason in item.reasons and item.condition == condition:
            return item
    if condition == "Ready":
        return next((item for item in ADVICE if reason in item.reasons), None)
    return None

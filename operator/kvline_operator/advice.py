"""Tell: what each reason of each condition means and what to do. docs/operations.md and
`kubectl kvline explain` say the same, because both say this."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Advice:
    condition: str
    reasons: tuple[str, ...]
    happened: str
    do: str


NOTHING = "nothing"
ADVICE = (
    Advice("Accepted", ("Valid",), "the spec can be acted on", NOTHING),
    Advice(
        "Accepted",
        ("SpecInvalid",),
        "the server refused a setting, or the API refused an object of ours",
        "the message names the field; correct it and apply again",
    ),
    Advice(
        "Accepted",
        ("NameConflict",),
        "an object that is not ours has a child's name",
        "rename one of the two",
    ),
    Advice(
        "Accepted",
        ("Forbidden",),
        "the operator lacks a right",
        "the message names verb and kind; compare the operator's role with the one that ships",
    ),
    Advice("ModelAvailable", ("Available",), "the pinned model is on the node", NOTHING),
    Advice("ModelAvailable", ("Random",), "weights are random, from config.json alone", NOTHING),
    Advice("ModelAvailable", ("Pending",), "no container has run yet", "see Progressing"),
    Advice(
        "ModelAvailable",
        ("Downloading", "DownloadFailed"),
        "the download step runs, or failed and is tried again",
        "if it fails, check the hub's address, the way out of the cluster, and the disk",
    ),
    Advice(
        "ModelAvailable",
        ("SecretMissing",),
        "a Secret that the spec names, or the key in it, is not there",
        "create it in the service's namespace; the pod goes on by itself within minutes",
    ),
    Advice(
        "ModelAvailable",
        ("NotFound", "Invalid", "Unsupported"),
        "no such model; a broken file; an architecture that we do not run",
        "the message names file and reason; correct spec.model.source",
    ),
    Advice(
        "CapacityMeasured",
        ("Validated",),
        "a replica's budget survived the stress at its final size",
        NOTHING,
    ),
    Advice(
        "CapacityMeasured",
        ("Pending", "Loading", "Autotuning", "Probing", "Stressing", "Validating"),
        "the sizing loop is under way",
        "wait; Loading says how far it is; a stage without progress for 300 s ends the container",
    ),
    Advice(
        "CapacityMeasured",
        ("ShrunkRetry",),
        "a size did not survive, the next is 5 % smaller",
        "nothing; there are at most four attempts",
    ),
    Advice(
        "CapacityMeasured",
        ("OutOfMemory",),
        "no size survived, or the engine ran out of memory while it served",
        "raise spec.resources.memory, or turn a knob that the message names",
    ),
    Advice(
        "CapacityMeasured",
        ("ContextDoesNotFit",),
        "spec.engine.maxModelLen is above the budget",
        "the message names the largest that fits",
    ),
    Advice(
        "CapacityMeasured",
        ("EngineExited",),
        "the engine ended with an error",
        "the message has its last words; `kubectl logs` of the pod has more",
    ),
    Advice(
        "CapacityMeasured",
        ("Killed",),
        "the kubelet or the node killed the container; that rejects no revision",
        "events of the pod say why: a probe that failed, a node that shut down or ran short",
    ),
    Advice(
        "CapacityMeasured",
        ("ReportInvalid", "ReportMissing"),
        "the pod's report cannot be read, or had",
        "compare the versions of operator and server image; check that a NetworkPolicy of yours "
        "lets the operator reach port 8001",
    ),
    Advice("CapacityMeasured", ("ScaledToZero",), "no replica is asked for", NOTHING),
    Advice(
        "CapacitySufficient",
        ("Sufficient",),
        "each replica has what it must have; the message names the threshold and its source",
        NOTHING,
    ),
    Advice(
        "CapacitySufficient",
        ("BelowMinimum",),
        "a replica measured less than spec.capacity.minKVTokens",
        "lower it, or give more memory; the message has both figures",
    ),
    Advice(
        "CapacitySufficient",
        ("BelowBaseline",),
        "a replica of a new revision measured less than its share of the baseline of its GPU model",
        "change the spec, lower spec.rollout.minCapacityPercent, or promote the revision",
    ),
    Advice(
        "CapacitySufficient",
        ("NotComparable",),
        "a replica is measured, and there is no figure to compare it with: another model, token "
        "shape, or GPU model",
        "set spec.capacity.minKVTokens, or promote the revision",
    ),
    Advice("CapacitySufficient", ("Unknown",), "nothing is measured yet", "see CapacityMeasured"),
    Advice("CapacityStable", ("Stable",), "identical replicas measure the same", NOTHING),
    Advice(
        "CapacityStable",
        ("BelowBaseline",),
        "a replica of the accepted revision measured less than its share of the baseline; it "
        "serves all the same",
        "look for what changed on its node (driver, GPU, neighbours); if it is meant, promote the "
        "revision: that begins a new baseline",
    ),
    Advice(
        "CapacityStable",
        ("Drifted",),
        "a replica measured over 3 % away from what an identical one has on record",
        "look for what shares its node or GPU; the message names both figures",
    ),
    Advice(
        "CapacityStable",
        ("NoRecord",),
        "no size of these replicas is on record yet",
        "nothing; pinned sizes leave none",
    ),
    Advice("Progressing", ("Complete",), "nothing moves", NOTHING),
    Advice("Progressing", ("RollingOut",), "replicas are on their way", "wait"),
    Advice(
        "Progressing",
        ("Unschedulable",),
        "no node has room for a replica",
        "the message is the scheduler's; free or add a node, or ask for less",
    ),
    Advice(
        "Progressing",
        ("ImagePullFailed",),
        "the node cannot get the image",
        "the message is the kubelet's; correct spec.image or the registry's credentials",
    ),
    Advice(
        "Progressing",
        ("QuotaExceeded",),
        "the namespace's quota refuses an object",
        "the message names the quota; raise it or ask for less",
    ),
    Advice(
        "Progressing",
        ("PodsRefused",),
        "the API server makes no pod of the newest revision",
        "the message says why, such as a priority or runtime class that is not there; correct it",
    ),
    Advice(
        "Progressing",
        ("DeadlineExceeded",),
        "no progress within spec.rollout.progressDeadlineSeconds",
        "the other conditions say what it waits for",
    ),
    Advice(
        "Progressing",
        ("DeviceFailure",),
        "the GPU is missing, too old, or was lost, or the node could not give it to the pod",
        "check the node's driver and device plug-in; the pod is tried again",
    ),
    Advice("UpToDate", ("UpToDate",), "the spec's revision alone serves", NOTHING),
    Advice(
        "UpToDate",
        ("RollingOut", "Scaling"),
        "on its way; a new revision is measured before it takes traffic",
        "wait",
    ),
    Advice(
        "UpToDate",
        ("GateHeld",),
        "a new revision cannot be measured (no node, no image, no model), or its tokens cannot be "
        "compared; with Surge what serves goes on, else the message says so and it comes back at "
        "spec.rollout.progressDeadlineSeconds",
        "the message says which; for another model set spec.capacity.minKVTokens, or promote",
    ),
    Advice(
        "UpToDate",
        ("RevisionRejected",),
        "a new revision measured too little, its engine ended twice, or (Replace, Recreate) none "
        "of its replicas was ready in time; the one before serves or is coming back, and the "
        "rejected one's replicas are deleted (with spec.rollout.onFailure Hold: kept, without "
        "traffic)",
        "change the spec, or promote the revision; the message has figures and reason",
    ),
    Advice(
        "UpToDate",
        ("Paused",),
        'annotation kvline.dev/paused is "true"',
        "take it away: kubectl annotate kvl NAME kvline.dev/paused-",
    ),
    Advice(
        "UpToDate",
        ("ForeignChange",),
        "somebody changes an object of ours again each time that it is put back; after five times "
        "within an hour it is left as it is",
        "the message names path and field manager: stop it there, and change the InferenceService; "
        "for a restart annotate kvline.dev/restart",
    ),
    Advice("ScalingActive", ("Stable", "Scaling"), "replicas follow the load", NOTHING),
    Advice(
        "ScalingActive",
        ("AtMaximum",),
        "the load asks for more than spec.autoscaling.maxReplicas",
        "raise it, or let clients wait",
    ),
    Advice(
        "ScalingActive",
        ("DemandUnknown",),
        "ready replicas do not say their load, or none is ready; none are taken away meanwhile",
        "check that the operator reaches port 8001 of the pods",
    ),
    Advice("Ready", ("Serving",), "a ready replica of an accepted revision serves", NOTHING),
    Advice("Ready", ("ScaledToZero",), "no replica is asked for", NOTHING),
)


def advise(condition: str, reason: str) -> Advice | None:
    """Ready has the reason of the condition that stands in its way, and its advice."""
    for item in ADVICE:
        if reason in item.reasons and item.condition == condition:
            return item
    if condition == "Ready":
        return next((item for item in ADVICE if reason in item.reasons), None)
    return None

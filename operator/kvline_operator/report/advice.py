"""What each reason of each condition means and what to do about it. Source of the table in
docs/operations.md and of `kubectl kvline explain`."""

from __future__ import annotations

from dataclasses import dataclass

from kvline_operator.store.records import DRIFT_PERCENT


@dataclass(frozen=True, slots=True)
class Advice:
    condition: str
    reasons: tuple[str, ...]
    happened: str
    do: str


NOTHING = "nothing"
ADVICE = (
    Advice("Accepted", ("Valid",), "the spec is valid", NOTHING),
    Advice(
        "Accepted",
        ("SpecInvalid",),
        "the server refuses a setting, or the API server refuses a child object or lacks its kind",
        "the message names the field; correct it and apply again",
    ),
    Advice(
        "Accepted",
        ("NameConflict",),
        "a foreign object has the name of a child object",
        "rename one of the two",
    ),
    Advice(
        "Accepted",
        ("Forbidden",),
        "the operator lacks an RBAC permission",
        "the message names verb and kind; compare the operator's role with the chart's",
    ),
    Advice("ModelAvailable", ("Available",), "the model is available to the pods", NOTHING),
    Advice("ModelAvailable", ("Random",), "weights are random, from config.json alone", NOTHING),
    Advice("ModelAvailable", ("Pending",), "no container has run yet", "see Progressing"),
    Advice(
        "ModelAvailable",
        ("Downloading", "DownloadFailed"),
        "the model is being downloaded, or the download failed and is retried",
        "if it fails, check the hub's address, egress from the cluster, and disk space",
    ),
    Advice(
        "ModelAvailable",
        ("CheckFailed",),
        "the Job that checks the model before replicas are removed has no result",
        "describe its pod and read its log; usual causes are a kill (137), an image that is not "
        "kvline's, and a volume that cannot be mounted",
    ),
    Advice(
        "ModelAvailable",
        ("SecretMissing",),
        "a Secret of the spec, or its key, does not exist",
        "create it in the service's namespace; the pod starts by itself within minutes",
    ),
    Advice(
        "ModelAvailable",
        ("NotFound", "Invalid"),
        "no such model; a damaged file",
        "the message names file and reason; correct spec.model.source",
    ),
    Advice(
        "ModelAvailable",
        ("Unsupported",),
        "an unsupported architecture or option, or a number of GPUs that cannot share the model",
        "the message names the reason; correct spec.model.source, or set spec.resources.gpus to a "
        "number that it lists",
    ),
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
        "raise spec.resources.memory, or change a field that the message names",
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
        ("ReportInvalid", "ReportMissing"),
        "the pod's sizing report is invalid, or cannot be fetched",
        "compare the versions of operator and server image; check that a NetworkPolicy of yours "
        "lets the operator reach port 8001",
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
        "a replica measured less than spec.capacity.minKVTokens",
        "lower it, or raise the memory; the message has both figures",
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
        "a replica is measured, but its model, kvCacheDtype, bytes per token, number of GPUs or "
        "GPU model has no baseline",
        "set spec.capacity.minKVTokens, or promote the revision",
    ),
    Advice("CapacitySufficient", ("Unknown",), "nothing is measured yet", "see CapacityMeasured"),
    Advice("CapacityStable", ("Stable",), "identical replicas measure the same", NOTHING),
    Advice(
        "CapacityStable",
        ("BelowBaseline",),
        "a replica of the stable revision measured less than minCapacityPercent of the baseline; "
        "it serves nevertheless",
        "check what changed on its node (driver, GPU, other processes); if it is intended, promote "
        "the revision: that begins a new baseline",
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
    Advice("Progressing", ("Complete",), "the rollout is complete", NOTHING),
    Advice("Progressing", ("RollingOut",), "replicas are starting", "wait"),
    Advice(
        "Progressing",
        ("Unschedulable",),
        "no node fits a replica",
        "the message is the scheduler's; free or add a node, or request less",
    ),
    Advice(
        "Progressing",
        ("ImagePullFailed",),
        "the node cannot pull the image",
        "the message is the kubelet's; correct spec.image or the registry's credentials",
    ),
    Advice(
        "Progressing",
        ("QuotaExceeded",),
        "a ResourceQuota of the namespace refuses an object",
        "the message names the quota; raise it or request less",
    ),
    Advice(
        "Progressing",
        ("LimitRangeViolated",),
        "a LimitRange of the namespace refuses an object",
        "the message has its limit and what was asked; request less, or change the LimitRange",
    ),
    Advice(
        "Progressing",
        ("PodSecurityViolated",),
        "the namespace's Pod Security level refuses pods",
        "the message names the fields; change them in the spec, or the namespace's label",
    ),
    Advice(
        "Progressing",
        ("AdmissionDenied",),
        "an admission webhook, a policy or another admission plug-in refuses an object",
        "the message names it and its reason; change the spec, or its rule; it is tried again each "
        "minute",
    ),
    Advice(
        "Progressing",
        ("WebhookUnavailable",),
        "an admission webhook that the API server must ask does not answer",
        "the message names it; repair its service, or delete its webhook configuration; nothing of "
        "this service changes meanwhile",
    ),
    Advice(
        "Progressing",
        ("NamespaceTerminating",),
        "the namespace is being deleted, and takes no new objects",
        "nothing; or create the service in another namespace",
    ),
    Advice(
        "Progressing",
        ("ApiUnavailable", "ChildDeleting"),
        "the API server did not answer a call, or a child object is still being deleted",
        "nothing, it is tried again within a minute; if it lasts, the message has the call: check "
        "the API server, or the finalizers of the object that it names",
    ),
    Advice(
        "Progressing",
        ("InternalError",),
        "the operator failed in a way that it does not expect",
        "see its log and report it; the service is tried again within a minute",
    ),
    Advice(
        "Progressing",
        ("PodsRefused",),
        "the API server refuses pods of the spec's revision",
        "the message has the cause, such as a missing priority or runtime class; correct it",
    ),
    Advice(
        "Progressing",
        ("DeadlineExceeded",),
        "no progress within spec.rollout.progressDeadlineSeconds",
        "see the other conditions for what it waits for",
    ),
    Advice(
        "Progressing",
        ("DeviceFailure",),
        "the GPU is missing, unsupported or lost, or the node could not allocate it",
        "check the node's driver and device plug-in; the container restarts by itself",
    ),
    Advice(
        "Progressing",
        ("RankLost",),
        "one rank of a pod with several ended (killed, or its GPU hung), so the others ended too; "
        "that rejects no revision",
        "nothing the first time, the container restarts by itself; if it repeats, check the GPU of "
        "the rank that the message names (rank 1 has the pod's GPU 1) and the node's log for kills",
    ),
    Advice(
        "Progressing",
        ("NoProgress",),
        "a process of a pod that served made no progress for 60 s while work waited, though its "
        "node gave it CPU: it hangs, or waits for a device or a disk; that rejects no revision",
        "nothing the first time, the container restarts by itself; if it repeats, check the node's "
        "GPU and disk, and report what the pod was asked",
    ),
    Advice("UpToDate", ("UpToDate",), "the spec's revision alone serves", NOTHING),
    Advice(
        "UpToDate",
        ("RollingOut", "Scaling"),
        "in progress; a new revision is measured before it takes traffic",
        "wait",
    ),
    Advice(
        "UpToDate",
        ("GateHeld",),
        "a new revision cannot be measured (no node, image, model or GPU, or a lost rank) or "
        "compared; with Surge the stable one serves meanwhile, with Replace and Recreate it is "
        "scaled up again after spec.rollout.progressDeadlineSeconds",
        "the message has the cause; for another model, number of GPUs or kvCacheDtype set "
        "spec.capacity.minKVTokens, or promote",
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
        ("Paused",),
        "spec.rollout.paused is true",
        "kubectl kvline resume NAME, or remove the field",
    ),
    Advice(
        "UpToDate",
        ("ForeignChange",),
        "another manager changes a child object again after each correction; after five within an "
        "hour the change is tolerated",
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

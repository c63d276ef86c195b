"""Advice on what keeps replicas from running: Accepted, Progressing and ModelAvailable."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Advice:
    condition: str
    reasons: tuple[str, ...]
    happened: str
    do: str


NOTHING = "nothing"
START_ADVICE = (
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
        ("NewerState",),
        "a newer operator has kept the state of a revision in a form that this one cannot read, "
        "so nothing is changed; pods serve on",
        "upgrade the operator again, or let it measure anew: remove the annotation of the "
        "ControllerRevision that the message names",
    ),
    Advice(
        "Accepted",
        ("Forbidden",),
        "the operator lacks an RBAC permission",
        "the message names verb and kind; compare the operator's role with the chart's",
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
        ("SchedulingGated",),
        "a pod has scheduling gates, such as those of Kueue, and the scheduler leaves it alone",
        "see the queue or controller that the gate's name tells; it removes the gate",
    ),
    Advice(
        "Progressing",
        ("PodNotSetUp",),
        "volumes or network of a pod are not set up on its node for over two minutes",
        "`kubectl describe pod` has the cause (FailedMount, FailedAttachVolume, "
        "FailedCreatePodSandBox); usual ones are a volume that is attached to another node, a "
        "storage or network driver that fails there",
    ),
    Advice(
        "Progressing",
        ("NodeNotReady",),
        "the kubelet of a pod's node does not report",
        "see `kubectl describe node`; Kubernetes replaces the pod after five minutes, and goes on "
        "with it where the node is back before",
    ),
    Advice(
        "Progressing",
        ("ContainerNotStarted",),
        "the node cannot run the image's program; that rejects no revision",
        "the message is the container runtime's: an image of another architecture or without "
        "kvline-server, or a driver's hook that fails on that node",
    ),
    Advice(
        "Progressing",
        ("ImagePullFailed",),
        "the node cannot pull the image",
        "the message is the kubelet's; correct spec.image, or the registry's credentials in the "
        "Secrets of spec.imagePullSecrets",
    ),
    Advice(
        "Progressing",
        ("QuotaExceeded",),
        "a ResourceQuota of the namespace refuses an object",
        "the message names the quota; raise it or request less; where it must specify limits.cpu, "
        "set spec.resources.cpuLimit",
    ),
    Advice(
        "Progressing",
        ("LimitRangeViolated",),
        "a LimitRange of the namespace refuses an object, or its default limit is below a request",
        "the message has its limit and what was asked; request what it allows, set "
        "spec.resources.cpuLimit, or change the LimitRange",
    ),
    Advice(
        "Progressing",
        ("PodSecurityViolated",),
        "the namespace's Pod Security level refuses pods",
        "the message names container and fields, which the spec does not have: see which webhook "
        "adds a sidecar, the chart's serverPods.platformUser, and the namespace's label",
    ),
    Advice(
        "Progressing",
        ("AdmissionDenied",),
        "an admission webhook, a policy or another admission plug-in refuses an object, or pods "
        "name a PriorityClass, RuntimeClass or ServiceAccount that does not exist",
        "the message names it and its reason; change the spec, or its rule; for a missing class or "
        "account see spec.scheduling.priorityClassName, spec.scheduling.runtimeClassName and "
        "spec.serviceAccountName; it is tried again each minute",
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
        "the message has the cause; correct it",
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
    Advice("ModelAvailable", ("Available",), "the model is available to the pods", NOTHING),
    Advice("ModelAvailable", ("Random",), "weights are random, from config.json alone", NOTHING),
    Advice(
        "ModelAvailable",
        ("Pending", "Loading"),
        "no pod has read the model yet",
        "wait; if no container runs, Progressing has the cause",
    ),
    Advice(
        "ModelAvailable",
        ("Downloading", "DownloadFailed"),
        "the model is being downloaded, or the download failed and is retried",
        "if it fails, the message has the cause: check the hub's address (the chart's hubEndpoint, "
        "hubProxy and hubCA), egress from the cluster, and disk space",
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
        "the message names it; create it in the service's namespace, and the pod starts by itself "
        "within minutes",
    ),
    Advice(
        "ModelAvailable",
        ("ClaimMissing",),
        "a PersistentVolumeClaim of the spec does not exist in the service's namespace",
        "create the claim that the message names, or correct spec.model; pods start by themselves",
    ),
    Advice(
        "ModelAvailable",
        ("ClaimPending",),
        "a PersistentVolumeClaim of the spec is bound to no volume",
        "its events have the cause: a StorageClass that does not exist, no default one, or no "
        "volume that fits; pods start by themselves",
    ),
    Advice(
        "ModelAvailable",
        ("NotFound",),
        "the claim has no such folder, or the hub no such repository or commit, or its token no "
        "right to read it",
        "correct spec.model.source; for a private or gated model set spec.model.tokenSecretRef to "
        "a token that may read it",
    ),
    Advice(
        "ModelAvailable",
        ("Invalid",),
        "a file of the model is damaged or missing",
        "the message names the file; copy or download the model again, or correct "
        "spec.model.source",
    ),
    Advice(
        "ModelAvailable",
        ("Unsupported",),
        "an unsupported architecture or option, images of a model without an encoder for them, or "
        "a number of GPUs that cannot share the model",
        "the message names the reason; correct spec.model.source, set spec.engine.modalities to "
        "[text], or spec.resources.gpus to a number that it lists",
    ),
)

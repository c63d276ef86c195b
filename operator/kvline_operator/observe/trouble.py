"""What keeps a pod from serving, as one value: the condition that it becomes, and what it means for
the gate of its revision. Pure; conditions, gate and prepare Job have no list of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from kvline_contract.exits import ExitCode, meaning
from kvline_contract.report import SizingReport, State
from kvline_operator.answers import of_message
from kvline_operator.observe.ended_pods import REFUSED, EndedPod
from kvline_operator.observe.pods import Ended, PodView

# OOM kills while sizing after which the next start may succeed: on a CPU it tries a smaller size;
# on a GPU the KV cache takes no host memory, but a single kill may have been the node's.
OOM_RETRIES, OOM_RETRIES_GPU = 4, 1
IMAGE_REASONS = {
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
    "SignatureValidationFailed",
}
START_REASONS = {
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "PreCreateHookError",
    "PreStartHookError",
    "PostStartHookError",
}
# Words of the kubelet about a Secret, and of the scheduler about a claim: neither has a code.
SECRET = re.compile(r'\bsecret "|\bin Secret ')
CLAIM = re.compile(r'persistentvolumeclaim "([^"]+)" not found')
UNBOUND = "unbound immediate PersistentVolumeClaims"
AFTER_LOAD = {
    ExitCode.OUT_OF_MEMORY,
    ExitCode.CONTEXT_DOES_NOT_FIT,
    ExitCode.STEP_TOO_LONG,
    ExitCode.NO_PROGRESS,
    ExitCode.OUT_OF_MEMORY_SERVING,
}
ABOUT_SPEC = {"Accepted", "ModelAvailable"}  # conditions
AT_ONCE = {ExitCode.SECRET_MISSING, ExitCode.MODEL_NOT_FOUND}  # before anything is read


class Effect(StrEnum):
    """What a trouble means for the revision."""

    WAITS = "waits"  # it passes by itself
    HOLDS = "holds"  # a user or the node has to act; then the pod goes on by itself
    REJECTS = "rejects"  # its engine failed


@dataclass(frozen=True, slots=True)
class Trouble:
    condition: str
    reason: str
    message: str  # of the condition
    text: str  # of the gate, with the pod's name
    effect: Effect = Effect.HOLDS


def of(pod: PodView) -> Trouble | None:
    """What keeps this pod from serving, the cause before its consequences; None for nothing."""
    if pod.ready:
        return None
    if pod.node_silent:
        return _of_node(pod)
    return before_start(pod) or _of_download(pod) or _of_end(pod) or of_report(pod)


def of_all(pods: tuple[PodView, ...]) -> tuple[Trouble, ...]:
    return tuple(filter(None, map(of, pods)))


def of_job(pods: tuple[PodView, ...], otherwise: tuple[str, str]) -> Trouble | None:
    """Of the pods of a prepare Job, oldest first. The failure of the last one is reported while the
    next one runs; `otherwise`: condition and reason of an end that says nothing about the model."""
    last = next(((p, e) for p in reversed(pods) for e in ends(p) if e.code), None)
    failed = last[1] if last is not None and not _goes_on(pods[-1], last[1]) else None
    if failed is not None and meaning(failed.code).condition == "ModelAvailable":
        return _made(pods[-1], "ModelAvailable", meaning(failed.code).reason, failed.message)
    waits = next(filter(None, map(before_start, reversed(pods))), None)
    if waits is not None or failed is None or last is None:
        return waits
    if failed.not_started:
        return _not_started(last[0], failed.message or failed.title)
    return _made(last[0], *otherwise, _how(*last))


def of_refusals(
    refused: str, pods: tuple[PodView, ...], ended: tuple[EndedPod, ...], on_gpu: bool
) -> Trouble | None:
    """Why a revision lacks pods: the API server refuses them, with the message `refused`, or a node
    cannot give them a GPU."""
    if refused:
        reason = of_message(refused) or "PodsRefused"
        return Trouble("Progressing", reason, refused, refused)
    ran = max((p.created for p in pods if p.running or p.ended or p.ready), default="")
    lost = (p for p in ended if on_gpu and p.reason == REFUSED and p.created >= ran)
    found = next(lost, None)
    if found is None:
        return None
    return Trouble("Progressing", "DeviceFailure", found.text, found.text)


def before_start(pod: PodView) -> Trouble | None:
    """What keeps its container from being started."""
    return _without_node(pod) or _without_volumes(pod) or _of_waiting(pod)


def of_report(pod: PodView) -> Trouble | None:
    """Of a server whose report cannot be read, which keeps a ready one from nothing."""
    if not pod.running or not pod.report_error or pod.report is not None:
        return None
    message = f"{pod.name}: {pod.report_error}"
    if pod.report_invalid:
        text = f"{pod.name}: its sizing report cannot be read: {pod.report_error}"
        return Trouble("CapacityMeasured", "ReportInvalid", message, text)
    if pod.fresh:  # its port opens within seconds
        return None
    text = f"{pod.name}: its sizing report cannot be fetched: {pod.report_error}"
    return Trouble("CapacityMeasured", "ReportMissing", message, text, Effect.WAITS)


def ends(pod: PodView) -> Iterator[Ended]:
    yield from (e for e in (pod.ended, pod.download_ended) if e is not None)


def has_seen_model(pod: PodView) -> bool:
    """Whether its server has loaded the model, or ended in a way that only comes after that."""
    if pod.ready or _has_loaded(pod.report):
        return True
    return pod.ended is not None and pod.ended.code in AFTER_LOAD


def _without_node(pod: PodView) -> Trouble | None:
    if pod.gates:
        gates = ", ".join(pod.gates)
        text = f"{pod.name} waits until others remove its scheduling gates: {gates}"
        return Trouble("Progressing", "SchedulingGated", text, text)
    if claim := CLAIM.search(pod.unschedulable):
        text = f"claim {claim[1]} does not exist in namespace {pod.namespace}"
        return _made(pod, "ModelAvailable", "ClaimMissing", text)
    if UNBOUND in pod.unschedulable:
        return _made(pod, "ModelAvailable", "ClaimPending", _unbound(pod))
    if pod.awaits:
        text = f"{pod.name} has no node until {pod.awaits} has left one: {pod.unschedulable}"
        return Trouble("Progressing", "RollingOut", text, text, Effect.WAITS)
    if not pod.unschedulable:
        return None
    text = f"{pod.name} has no node: {pod.unschedulable}"
    return Trouble("Progressing", "Unschedulable", pod.unschedulable, text)


def _unbound(pod: PodView) -> str:
    """The scheduler does not tell which claim."""
    names = " or ".join(pod.claims)
    describe = f"`kubectl -n {pod.namespace} describe pvc {' '.join(pod.claims)}`"
    return f"claim {names} of namespace {pod.namespace} has no volume: {describe} has the cause"


def _of_node(pod: PodView) -> Trouble:
    text = f"node {pod.node} does not report, so its pod {pod.name} serves nothing"
    return Trouble("Progressing", "NodeNotReady", text, text)


def _without_volumes(pod: PodView) -> Trouble | None:
    if not pod.not_set_up:
        return None
    text = (
        f"volumes or network of pod {pod.name} are not set up on {pod.node}; "
        f"`kubectl -n {pod.namespace} describe pod {pod.name}` has the cause"
    )
    return Trouble("Progressing", "PodNotSetUp", text, text)


def _of_waiting(pod: PodView) -> Trouble | None:
    if pod.waiting_reason in IMAGE_REASONS:
        text = f"{pod.waiting_reason}: {pod.waiting_message}"
        return _made(pod, "Progressing", "ImagePullFailed", text)
    if pod.waiting_reason not in START_REASONS:
        return None
    if pod.waiting_reason == "CreateContainerConfigError" and SECRET.search(pod.waiting_message):
        text = f"{pod.waiting_message} (namespace {pod.namespace})"
        return _made(pod, "ModelAvailable", "SecretMissing", text)
    return _not_started(pod, f"{pod.waiting_reason}: {pod.waiting_message}")


def _not_started(pod: PodView, why: str) -> Trouble:
    """An end that is the node's: no program in the image, another architecture, a driver's hook."""
    where = f" on {pod.node}" if pod.node else ""
    return _made(pod, "Progressing", "ContainerNotStarted", f"not started{where}: {why}")


def _of_download(pod: PodView) -> Trouble | None:
    ended = pod.download_ended
    if ended is None or not ended.code or _goes_on(pod, ended):
        if not pod.downloading:
            return None
        text = "the model is being downloaded"
        return _made(pod, "ModelAvailable", "Downloading", text, Effect.WAITS)
    if ended.not_started:
        return None if pod.downloading else _not_started(pod, ended.message or ended.title)
    known = meaning(ended.code)
    if known.condition in ABOUT_SPEC and not ended.from_outside:
        return _of_known(pod, ended)
    text = f"the download {_how(pod, ended)}"
    return _made(pod, "ModelAvailable", "DownloadFailed", text)


def _how(pod: PodView, ended: Ended) -> str:
    """How a container ended whose limits no field of the spec sets."""
    if ended.oom_killed:
        memory = pod.download_memory if ended is pod.download_ended else pod.memory
        return f"was killed at {_limit(memory)}, which the operator sets"
    text = f"ended with code {ended.code} ({ended.title})"
    return f"{text}: {ended.message}" if ended.message else f"{text} and no message"


def _limit(memory: str) -> str:
    return f"its memory limit{f' of {memory}' if memory else ''}"


def _goes_on(pod: PodView, ended: Ended) -> bool:
    """Whether the download runs for so long that this end's cause is gone. A transfer that failed
    may fail again at any time, so its reason stays."""
    return pod.downloading and not pod.fresh and ended.code in AT_ONCE


def _of_end(pod: PodView) -> Trouble | None:
    """Its server's last end, until its cause is gone: through restarts, so that a crash loop does
    not flap between Loading and its reason."""
    ended = pod.failed or _failing(pod.report)
    if ended is None or _is_past(pod, ended):
        return None
    if ended.from_outside:
        return _made(pod, "CapacityMeasured", "Killed", ended.killed_text)
    if ended.not_started:
        return _not_started(pod, ended.message or ended.title)
    if ended.oom_killed:
        return _of_oom_kill(pod, ended)
    known = meaning(ended.code)
    if not known.rejects:
        return _of_known(pod, ended)
    if pod.failures < 2:
        return _of_known(pod, ended, Effect.WAITS)
    text = _rejection(pod, ended, pod.failures)
    return Trouble(known.condition, known.reason, _words(pod, ended), text, Effect.REJECTS)


def _failing(report: SizingReport | None) -> Ended | None:
    """The end that a server reports which is about to exit."""
    failure = report.failure if report is not None else None
    if failure is None:
        return None
    return Ended(failure.code, "Error", failure, failure.message)


def _is_past(pod: PodView, ended: Ended) -> bool:
    """Whether the container that runs now shows that the cause of this end is gone."""
    if not pod.running:
        return False
    if ended.from_outside:
        return True
    if ended.not_started:
        return not pod.fresh
    if meaning(ended.code).condition not in ABOUT_SPEC:
        return False  # until it is validated
    if ended.code == ExitCode.SECRET_MISSING and not pod.fresh:
        return True
    reads = pod.report is not None and any(s.total_bytes for s in pod.report.stages)
    return _has_loaded(pod.report) or (reads and ended.code in AT_ONCE)


def _has_loaded(report: SizingReport | None) -> bool:
    return report is not None and report.state not in (State.LOADING, State.FAILED)


def _of_oom_kill(pod: PodView, ended: Ended) -> Trouble:
    kind, kills = "CapacityMeasured", pod.oom_kills
    limit = _limit(pod.memory)
    if pod.on_gpu:
        text = (
            f"the container was killed at {limit}, which is host memory, kill {kills}; the KV "
            "cache is on the GPU and takes none of it: raise spec.resources.memory"
        )
        effect = Effect.REJECTS if kills > OOM_RETRIES_GPU else Effect.WAITS
        return _made(pod, kind, "OutOfMemory", text, effect)
    text = f"the container was killed at {limit} while sizing, kill {kills}; "
    if kills <= OOM_RETRIES:
        text += "each restart tries 95 % of the size that was killed"
        return _made(pod, kind, "ShrunkRetry", text, Effect.WAITS)
    text += "raise spec.resources.memory"
    return Trouble(kind, "OutOfMemory", text, _rejection(pod, ended, kills), Effect.REJECTS)


def _rejection(pod: PodView, ended: Ended, count: int) -> str:
    what = f"{pod.name} ended {count} times, with code {ended.code}"
    return f"{what} ({ended.title}): {_words(pod, ended)}"


def _words(pod: PodView, ended: Ended) -> str:
    """Of a container that wrote no message, such as one that a signal ended, where to read on."""
    log = f"`kubectl -n {pod.namespace} logs --previous {pod.name}`"
    return ended.message or f"ended with code {ended.code} and no message; see {log}"


def _of_known(pod: PodView, ended: Ended, effect: Effect = Effect.HOLDS) -> Trouble:
    known, message = meaning(ended.code), _words(pod, ended)
    if ended.code == ExitCode.SECRET_MISSING and pod.secrets:
        named = ", ".join(pod.secrets)
        message += f"; the pod reads Secret {named} of namespace {pod.namespace}"
    text = f"{pod.name}: {known.title}: {message}"
    return Trouble(known.condition, known.reason, message, text, effect)


def _made(
    pod: PodView, condition: str, reason: str, message: str, effect: Effect = Effect.HOLDS
) -> Trouble:
    return Trouble(condition, reason, message, f"{pod.name}: {message}", effect)

"""The pod template of a revision: fixed, of Pod Security level `restricted`, with only those
fields of the spec that the CRD's schema bounds. Pure."""

from __future__ import annotations

from typing import Any

from kvline_contract import names, tracing
from kvline_operator.api.source import Download, ModelSource
from kvline_operator.api.spec import ServiceSpec, device_class, gpus, ranks
from kvline_operator.observe.live_template import CHECK
from kvline_operator.plan import placement
from kvline_operator.plan.revisions import Revision
from kvline_operator.settings import Settings, port_of

Object = dict[str, Any]

GPU_RESOURCE = "nvidia.com/gpu"  # default: of NVIDIA's device plug-in
GPU_CLAIM = "gpu"  # name of the pod's claim, and of the claim's request
DRAIN_SECONDS = 120  # default of spec.drainSeconds, also the server's
START_SECONDS = 6 * 3600  # default of spec.startupSeconds
EXIT_SECONDS = 15  # for the engine to exit after the drain
STATE_SIZE_LIMIT = "4Gi"
PROXIES, DIRECT = ("HTTPS_PROXY", "HTTP_PROXY"), "NO_PROXY"
TRUSTED = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
SHARED_MEMORY, SHARED_MEMORY_OF_RANKS = "64Mi", "1Gi"  # several ranks exchange steps there

USER = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), names.RUN_AS)
_RESTRICTED: Object = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def pod_template(
    base: str, spec: ServiceSpec, revision: Revision, settings: Settings, alone: bool = False
) -> Object:
    """With spec.model.cache a Job downloads the model for all pods; not for one that runs `alone`
    (kubectl kvline size)."""
    inputs = spec.inputs
    name = names.revision_name(base, revision.name)
    pod: Object = {
        "serviceAccountName": inputs.get("serviceAccountName", base),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _grace(inputs),
        "securityContext": {
            "runAsNonRoot": True,
            **({} if settings.platform_user else USER),
            # Ownership of a large cache is changed once, not at each start.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_server(inputs, revision, settings)],
        "volumes": [
            *_volumes(spec, inputs, name, names.gate_name(base, revision.name), base),
            *_authority(spec.source, settings),
        ],
    }
    if device_class(inputs["resources"]):
        pod["resourceClaims"] = [{"name": GPU_CLAIM, "resourceClaimTemplateName": name}]
    access = inputs.get("access", {})
    if "apiKeySecretRef" in access:
        secret = access["apiKeySecretRef"]
        items = [{"key": secret["key"], "path": names.ACCESS_FILE}]
        _mount_secret(pod, "access", secret["name"], names.ACCESS_DIR, items)
    if "tlsSecretRef" in access:
        items = [{"key": name, "path": name} for name in (names.TLS_CERTIFICATE, names.TLS_KEY)]
        _mount_secret(pod, "tls", access["tlsSecretRef"]["name"], names.TLS_DIR, items)
    if spec.source.download is Download.POD or (alone and spec.source.download is Download.JOB):
        pod["initContainers"] = [download_container(spec.source, revision.image, settings)]
    pod |= placement.fields(inputs, base, revision.name, settings)
    return {
        "metadata": placement.metadata(inputs, placement.labels(base, revision.name)),
        "spec": pod,
    }


def _grace(inputs: Object) -> int:
    return names.PRE_STOP_SECONDS + int(inputs.get("drainSeconds", DRAIN_SECONDS)) + EXIT_SECONDS


def _server(inputs: Object, revision: Revision, settings: Settings) -> Object:
    return {
        "name": names.SERVER_CONTAINER,
        "image": revision.image,
        "imagePullPolicy": "IfNotPresent",
        "args": [
            "serve",
            f"--config={names.LAUNCH_DIR}/{names.LAUNCH_FILE}",
            f"--record={names.RECORDS_DIR}/{names.RECORDS_FILE}",
            f"--gate={names.GATE_DIR}/{names.GATE_FILE}",
            f"--state-dir={names.STATE_DIR}",
        ],
        "env": [*_environment(), *_traces(settings), *inputs.get("env", [])],
        "ports": [
            {"name": "api", "containerPort": names.API_PORT, "protocol": "TCP"},
            {"name": "internal", "containerPort": names.INTERNAL_PORT, "protocol": "TCP"},
        ],
        "resources": _resources(inputs["resources"]),
        "securityContext": _RESTRICTED,
        # The server itself ends a start without progress, and serving without: with a reason, which
        # the kubelet gives none. These two find a parent that is gone, on however busy a node; a
        # server of an earlier image is ended by liveness alone, so it does not wait for long.
        "startupProbe": _probe("/startupz", 1, inputs.get("startupSeconds", START_SECONDS)),
        "livenessProbe": _probe("/livez", 10, 12),
        "readinessProbe": _probe("/readyz", 1, 1),
        "lifecycle": {"preStop": _pre_stop(inputs, revision, settings)},
        "terminationMessagePath": names.TERMINATION_LOG,
        # Of an end before the server could write one, such as in an image of another architecture.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "launch", "mountPath": names.LAUNCH_DIR, "readOnly": True},
            {"name": "gate", "mountPath": names.GATE_DIR, "readOnly": True},
            {"name": "records", "mountPath": names.RECORDS_DIR, "readOnly": True},
            {"name": "models", "mountPath": names.MODELS_DIR, "readOnly": True},
            {"name": "state", "mountPath": names.STATE_DIR},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108
        ],
    }


def _mount_secret(pod: Object, name: str, secret: str, path: str, items: list[Object]) -> None:
    """Optional, so that a missing Secret ends the server with its own exit code and a condition,
    instead of a pod that waits for its mount."""
    wanted = {"secretName": secret, "items": items, "optional": True}
    pod["volumes"].append({"name": name, "secret": wanted})
    mount = {"name": name, "mountPath": path, "readOnly": True}
    pod["containers"][0]["volumeMounts"].append(mount)


def _environment() -> list[Object]:
    """The pod's identity, and writable folders for HOME and TMPDIR on a read-only root."""
    fields = (
        (names.ENV_POD_UID, "metadata.uid"),
        (names.ENV_POD_NAME, "metadata.name"),
        (names.ENV_NODE_NAME, "spec.nodeName"),
    )
    home = [{"name": n, "value": names.STATE_DIR} for n in ("HOME", "TMPDIR")]
    return [
        {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
        for name, path in fields
    ] + home


def _traces(settings: Settings) -> list[Object]:
    where = settings.traces_endpoint
    return [{"name": tracing.ENDPOINT, "value": where}] if where else []


def _resources(asked: Object) -> Object:
    """Memory: the request equals the limit, so that a measured size holds on every node. CPU: a
    limit only where it is asked for, as it throttles steps. Ranks on the CPU are processes and
    ask the node for nothing."""
    amounts: Object = {key: asked[key] for key in ("cpu", "memory") if key in asked}
    limits: Object = {"memory": asked["memory"]}
    if "cpuLimit" in asked:
        limits["cpu"] = asked["cpuLimit"]
    if "ephemeralStorage" in asked:
        amounts["ephemeral-storage"] = asked["ephemeralStorage"]
    if device_class(asked):
        return {"requests": amounts, "limits": limits, "claims": [{"name": GPU_CLAIM}]}
    if count := gpus(asked):
        name = asked.get("gpuResource", GPU_RESOURCE)
        amounts[name] = limits[name] = str(count)
    return {"requests": amounts, "limits": limits}


def _pre_stop(inputs: Object, revision: Revision, settings: Settings) -> Object:
    """An image that is inherited from an earlier operator may lack the route: its pods would end
    while requests are still sent to them."""
    default = settings.image_for(gpus(inputs["resources"]))
    if revision.named or revision.image == default:
        return _get(names.PRE_STOP_PATH)
    return {"sleep": {"seconds": names.PRE_STOP_SECONDS}}


def _get(path: str) -> Object:
    return {"httpGet": {"path": path, "port": "internal", "scheme": "HTTP"}}


def _probe(path: str, period: int, failures: int) -> Object:
    return {
        **_get(path),
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
        "successThreshold": 1,
    }


def check_container(stored: Object) -> Object:
    """Checks the model of a revision's data without loading it: in a claim as the server sees it,
    on the hub with the token and settings of the container that downloads it for each pod."""
    changed = {
        "args": list(CHECK),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        # Little, as it runs beside the replicas of a full node.
        "resources": {
            "requests": {"cpu": "10m", "memory": "128Mi"},
            "limits": {"memory": "512Mi"},
        },
    }
    if loads := stored["podTemplate"]["spec"].get("initContainers"):
        return {**loads[0], **changed}
    return {
        **changed,
        "name": names.SERVER_CONTAINER,
        "image": stored["image"],
        "imagePullPolicy": "IfNotPresent",
        "securityContext": _RESTRICTED,
        "terminationMessagePath": names.TERMINATION_LOG,
        "volumeMounts": [
            {"name": "launch", "mountPath": names.LAUNCH_DIR, "readOnly": True},
            {"name": "models", "mountPath": names.MODELS_DIR, "readOnly": True},
        ],
    }


def download_container(source: ModelSource, image: str, settings: Settings) -> Object:
    """Downloads the model. This container, and the check made from it, have the hub token."""
    environment: list[Object] = [{"name": n, "value": names.STATE_DIR} for n in ("HOME", "TMPDIR")]
    if settings.hub_endpoint:
        environment.append({"name": "HF_ENDPOINT", "value": settings.hub_endpoint})
    if source.token is not None:
        reference = {"name": source.token["name"], "key": source.token["key"]}
        environment.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}})
    if settings.hub_proxy:
        environment += [{"name": n, "value": settings.hub_proxy} for n in PROXIES]
        if settings.hub_no_proxy:
            environment.append({"name": DIRECT, "value": ",".join(settings.hub_no_proxy)})
    volumes = _authority(source, settings)
    authority = [{"name": v["name"], "mountPath": names.HUB_CA_DIR} for v in volumes]
    if authority:
        trusted = f"{names.HUB_CA_DIR}/{names.HUB_CA_FILE}"
        environment += [{"name": n, "value": trusted} for n in TRUSTED]
    return {
        "name": names.DOWNLOAD_CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "args": ["download", f"--config={names.LAUNCH_DIR}/{names.LAUNCH_FILE}"],
        "env": environment,
        "resources": {
            "requests": {"cpu": "250m", "memory": "512Mi"},
            "limits": {"cpu": "2", "memory": "2Gi"},
        },
        "securityContext": _RESTRICTED,
        "terminationMessagePath": names.TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "launch", "mountPath": names.LAUNCH_DIR, "readOnly": True},
            {"name": "models", "mountPath": names.MODELS_DIR},
            {"name": "state", "mountPath": names.STATE_DIR},
            *authority,
        ],
    }


def hub_ports(download: Object) -> set[int]:
    """The ports that a stored container which downloads or checks connects to: the proxy's, and the
    hub's where it needs no proxy for some hosts. The settings of today may have another proxy."""
    environment = {item["name"]: item.get("value") for item in download.get("env", [])}
    hub = {port_of(environment.get("HF_ENDPOINT") or "")}
    if not (proxy := environment.get(PROXIES[0])):
        return hub
    return {port_of(proxy)} | (hub if environment.get(DIRECT) else set())


def _authority(source: ModelSource, settings: Settings) -> list[Object]:
    """The volume of what a download trusts. Optional: serving pods of a cached model do not need
    it, and a download without it names the certificate that it cannot check."""
    if not settings.hub_ca or source.download is Download.NOBODY:
        return []
    items = [{"key": names.HUB_CA_FILE, "path": names.HUB_CA_FILE}]
    wanted = {"name": settings.hub_ca, "items": items, "optional": True}
    return [{"name": names.HUB_CA_VOLUME, "configMap": wanted}]


def shared_memory(resources: Object) -> str:
    """Of /dev/shm."""
    least = SHARED_MEMORY_OF_RANKS if ranks(resources) > 1 else SHARED_MEMORY
    return str(resources.get("sharedMemory", least))


def _volumes(spec: ServiceSpec, inputs: Object, launch: str, gate: str, base: str) -> list[Object]:
    records = {"name": names.records_name(base), "optional": True}
    shared = shared_memory(inputs["resources"])
    return [
        {"name": "launch", "configMap": {"name": launch}},
        {"name": "gate", "configMap": {"name": gate}},
        {"name": "records", "configMap": records},
        {"name": "models", **spec.source.volume},
        {"name": "state", "emptyDir": {"sizeLimit": STATE_SIZE_LIMIT}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shared}},
    ]

"""Whether a ControllerRevision's data is what the renderer may have written. Pure.

It is asked of one that has no owner: its labels, name and field manager can be anybody's. What an
earlier operator rendered, or one with other settings, must pass too, so the form is checked, and
each name against the field of the inputs that it is from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvline_contract import names, tracing
from kvline_contract.codec import loads
from kvline_contract.names import HUB_CA_VOLUME, LABEL_REVISION
from kvline_operator.api.inputs import read
from kvline_operator.api.source import source_of
from kvline_operator.errors import SpecError

Object = dict[str, Any]
POD = {
    "affinity",
    "automountServiceAccountToken",
    "containers",
    "enableServiceLinks",
    "imagePullSecrets",
    "initContainers",
    "nodeSelector",
    "priorityClassName",
    "resourceClaims",
    "runtimeClassName",
    "securityContext",
    "serviceAccountName",
    "terminationGracePeriodSeconds",
    "tolerations",
    "topologySpreadConstraints",
    "volumes",
}
PROBES = {"startupProbe", "livenessProbe", "readinessProbe"}
CONTAINER = PROBES | {
    "args",
    "env",
    "image",
    "imagePullPolicy",
    "lifecycle",
    "name",
    "ports",
    "resources",
    "securityContext",
    "terminationMessagePath",
    "terminationMessagePolicy",
    "volumeMounts",
}
COMMANDS = {"serve", "download"}
ARGUMENTS = {
    f"--config={names.LAUNCH_DIR}/{names.LAUNCH_FILE}",
    f"--record={names.RECORDS_DIR}/{names.RECORDS_FILE}",
    f"--gate={names.GATE_DIR}/{names.GATE_FILE}",
    f"--state-dir={names.STATE_DIR}",
}
# Plain variables, of which those of the operator's settings may have any value.
SETTINGS = {
    "HF_ENDPOINT",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "NO_PROXY",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_FILE",
    tracing.ENDPOINT,
}
FOLDERS = {"HOME", "TMPDIR"}
MAX_LAUNCH = 256 * 1024  # bytes


@dataclass(frozen=True, slots=True)
class _Named:
    """What the inputs name, each from its own field."""

    account: str
    claim: str  # empty: none
    token: str  # a Secret; empty: none
    secrets: frozenset[str]  # that are mounted
    variables: tuple[Object, ...]

    @classmethod
    def of(cls, inputs: Object, base: str) -> _Named:
        model, access = inputs["model"], inputs.get("access") or {}
        claim = source_of(model).volume.get("persistentVolumeClaim") or {}
        found = (access.get(key) for key in ("apiKeySecretRef", "tlsSecretRef"))
        return cls(
            account=inputs.get("serviceAccountName", base),
            claim=claim.get("claimName", ""),
            token=(model.get("tokenSecretRef") or {}).get("name", ""),
            secrets=frozenset(ref["name"] for ref in found if ref),
            variables=tuple(inputs.get("env") or ()),
        )


def is_data(data: Object, base: str, revision: str) -> bool:
    """All that a ControllerRevision of this name stores."""
    try:
        image, inputs = data["image"], data["inputs"]
        template, download = data["podTemplate"], data.get("download")
        named = _Named.of(read(inputs), base)
        return (
            template["metadata"]["labels"].get(LABEL_REVISION) == revision
            and _is_rendered(template, base, named, image)
            and (download is None or _is_container(download, image, named))
            and _is_claim(data.get("claimTemplate"), inputs)
            and _is_launch(data.get("launch"), base, revision, data)
        )
    except (AttributeError, KeyError, TypeError, ValueError, SpecError):  # it may have any shape
        return False


def _is_rendered(template: Object, base: str, named: _Named, image: str) -> bool:
    """Its pod template: of Pod Security level `restricted`, with one image."""
    pod = template["spec"]
    revision = template["metadata"]["labels"][LABEL_REVISION]
    return (
        pod.keys() <= POD
        and bool(pod["containers"])
        and pod["automountServiceAccountToken"] is False
        and pod["serviceAccountName"] == named.account
        and pod["securityContext"]["runAsNonRoot"] is True
        and all(
            _is_container(c, image, named)
            for c in [*pod.get("initContainers", []), *pod["containers"]]
        )
        and all(_is_volume(v, base, revision, named) for v in pod.get("volumes", []))
    )


def _is_container(container: Object, image: str, named: _Named) -> bool:
    context, (command, *arguments) = container["securityContext"], container["args"]
    return (
        container.keys() <= CONTAINER
        and container["image"] == image
        and not context.get("privileged")
        and context["allowPrivilegeEscalation"] is False
        and context["capabilities"] == {"drop": ["ALL"]}
        and context.get("runAsUser") != 0
        and command in COMMANDS
        and set(arguments) <= ARGUMENTS
        and all(_is_variable(v, named) for v in container.get("env", []))
        and all(_asks_us(container[key]) for key in PROBES & container.keys())
        and all(
            key == "preStop" and (_asks_us(hook) or hook.keys() == {"sleep"})
            for key, hook in container.get("lifecycle", {}).items()
        )
    )


def _asks_us(probe: Object) -> bool:
    """Whether it asks the container's own internal port and does nothing else."""
    request = probe.get("httpGet") or {}
    asks = request.get("port") == "internal" and not request.get("host")
    return asks and not probe.keys() & {"exec", "tcpSocket", "grpc"}


def _is_variable(variable: Object, named: _Named) -> bool:
    source = variable.get("valueFrom")
    if source is None:
        name = variable["name"]
        ours = name in SETTINGS or (name in FOLDERS and variable.get("value") == names.STATE_DIR)
        return ours or variable in named.variables
    if source.keys() == {"secretKeyRef"}:
        return bool(named.token) and source["secretKeyRef"]["name"] == named.token
    return bool(source.keys() == {"fieldRef"})


def _is_volume(volume: Object, base: str, revision: str, named: _Named) -> bool:
    (kind,) = volume.keys() - {"name"}
    source = volume[kind]
    if kind == "configMap":
        kinds = names.revision_name, names.gate_name
        ours = {names.records_name(base), *(made(base, revision) for made in kinds)}
        return volume["name"] == HUB_CA_VOLUME or source["name"] in ours
    if kind == "secret":
        return source["secretName"] in named.secrets
    if kind == "persistentVolumeClaim":
        return bool(named.claim) and source["claimName"] == named.claim
    return bool(kind == "emptyDir")


def _is_claim(template: Object | None, inputs: Object) -> bool:
    """Whether it is a ResourceClaimTemplate for the devices that the inputs name."""
    if template is None:
        return True
    requests = template["spec"]["spec"]["devices"]["requests"]
    classes = {request["exactly"]["deviceClassName"] for request in requests}
    return (
        template["kind"] == "ResourceClaimTemplate"
        and template.keys() == {"apiVersion", "kind", "spec"}
        and classes == {inputs["resources"]["gpuDeviceClass"]}
    )


def _is_launch(text: str | None, base: str, revision: str, data: Object) -> bool:
    """Whether a launch file is of this revision; other versions of it may have other fields."""
    if text is None:
        return True
    launch = loads(text, MAX_LAUNCH)
    found = [launch["service"], launch["revision"], launch["image"], launch["model"]["source"]]
    return bool(found == [base, revision, data["image"], data["inputs"]["model"]["source"]])

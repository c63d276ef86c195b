"""Names that operator and server share: API group, labels, ports, paths, environment variables."""

from __future__ import annotations

import hashlib
import re
from typing import Any

GROUP = "serving.kvline.dev"
EARLIER_GROUP = "kvline.dev"  # of the same kind, until it was renamed
API_VERSION = "v1alpha1"
KIND = "InferenceService"
PLURAL = "inferenceservices"
# Raised with each field that an older definition would drop in silence; the title of the schema in
# manifests/crd.yaml says it, so that an operator can tell an older one.
CRD_SCHEMA = 3
CRD_TITLE = "serving.kvline.dev schema "

LABEL_SERVICE = "kvline.dev/service"  # base name of the service that owns the object
LABEL_REVISION = "kvline.dev/revision"  # five characters, see revisions.py of the operator
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY = "kvline"
LABEL_PREPARES = "kvline.dev/prepares"  # base name; on pods of prepare Jobs, which are no replicas
FIELD_MANAGER = "kvline-operator"  # server-side apply's owner of our fields
AUTOSCALER = "kvline-autoscaler"  # field manager of spec.replicas with spec.autoscaling
# Of what kubectl kvline writes. Flux takes out fields of managers whose name begins with kubectl.
CLI_FIELD_MANAGER = "kvline-cli"
ANNOTATION_PAGE = "kvline.dev/page"  # of the operator's Lease: host:port of its holder's page
OPERATOR = "kvline-operator"  # the chart's name for the ServiceAccount, role, binding and Lease

# Of ControllerRevisions; what the operator keeps of a revision is in revision_state.py.
ANNOTATION_STATE = "kvline.dev/state"
ANNOTATION_IMAGE = "kvline.dev/image"

# As spec.resources.gpuResource: `gpus` counts ranks on the CPU, which no node has to offer.
CPU_RANK = "kvline.dev/cpu-rank"

HUB_CA_VOLUME = "hub-ca"  # of pods, a ConfigMap that the operator's settings name
HUB_CA_DIR, HUB_CA_FILE = "/etc/kvline/hub-ca", "ca.crt"
API_PORT = 8000  # /v1, in the Service
INTERNAL_PORT = 8001  # probes, sizing, load, metrics; pod address only
SIZING_PATH = "/sizing"  # GET ?version=: the newest report version that who asks reads
# The preStop hook waits on the internal port until no new request is sent to the pod.
PRE_STOP_PATH, PRE_STOP_SECONDS = "/prestop", 15
# The operator's notices, POSTs with `Authorization: Bearer TOKEN`; the pod's gate file has the
# token's SHA-256. Servers of earlier images ask for no token.
END_PRE_STOP_PATH = "/prestop/end"  # that wait serves nobody, another pod needs the GPU
OPEN_GATE_PATH = "/gate/open"  # ?uid=: the gate file is open, which has not arrived yet

SERVER_CONTAINER = "server"
DOWNLOAD_CONTAINER = "download"

LAUNCH_DIR = "/etc/kvline/launch"
LAUNCH_FILE = "launch.json"
GATE_DIR = "/etc/kvline/gate"
GATE_FILE = "gate.json"
RECORDS_DIR = "/etc/kvline/records"
RECORDS_FILE = "records.json"
SCALE_FILE = "scale.json"  # for the operator alone; no pod reads it
ACCESS_DIR = "/etc/kvline/access"
ACCESS_FILE = "key"
TLS_DIR = "/etc/kvline/tls"
TLS_CERTIFICATE, TLS_KEY = "tls.crt", "tls.key"  # of a Secret of type kubernetes.io/tls
MODELS_DIR = "/models"
STATE_DIR = "/var/lib/kvline"
ATTEMPTS_FILE = "attempts.json"
TERMINATION_LOG = "/dev/termination-log"

ENV_POD_UID = "KVLINE_POD_UID"
ENV_POD_NAME = "KVLINE_POD_NAME"
ENV_POD_IP = "KVLINE_POD_IP"  # of the operator
ENV_NODE_NAME = "KVLINE_NODE_NAME"

RUN_AS = 65532  # uid, gid and fsGroup of every container

# A service's base name must leave room for "-<rev>-gate" and for Kubernetes' own pod suffixes.
BASE_NAME_LIMIT = 40
_BASE_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def base_name(name: str) -> str:
    """The DNS label that a resource's children are named after: stable, at most 40 characters."""
    if len(name) <= BASE_NAME_LIMIT and _BASE_NAME.fullmatch(name):
        return name
    usable = re.sub(r"[^a-z0-9-]", "-", name.lower())[:24].strip("-")
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"kvl-{usable}-{digest}" if usable else f"kvl-{digest}"


def revision_of(item: dict[str, Any]) -> str:
    """Of a Kubernetes object, by its label; empty where it has none."""
    return str((item["metadata"].get("labels") or {}).get(LABEL_REVISION, ""))


def revision_name(base: str, revision: str) -> str:
    """Name of a revision's Deployment, ControllerRevision and LaunchConfig ConfigMap."""
    return f"{base}-{revision}"


def gate_name(base: str, revision: str) -> str:
    return f"{base}-{revision}-gate"


def prepare_name(base: str, revision: str) -> str:
    """The Job that fetches what a revision's pods need."""
    return f"{base}-{revision}-prepare"


def prepare_policy(base: str) -> str:
    return f"{base}-prepare"


def records_name(base: str) -> str:
    return f"{base}-records"


def scale_name(base: str) -> str:
    return f"{base}-scale"


def hub_folder(org: str, name: str, commit: str) -> str:
    """Where a hub model lies under /models: one folder a commit, complete when it has this name."""
    return f"{org}--{name}/{commit}"

"""`kubectl kvline size`: measures a spec in a Job, without changing the service."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from kvline_contract.launch import KVCacheDtype, StateDtype
from kvline_contract.names import KIND, LABEL_SERVICE, base_name
from kvline_kubectl.cluster import Cluster, Problem
from kvline_kubectl.size_job import Question, Reports, Say, operator_settings, run
from kvline_operator.api.quantity import in_bytes
from kvline_operator.api.spec import parse
from kvline_operator.plan.revisions import served_images
from kvline_operator.report.status_cache import RevisionEntry
from kvline_operator.store.revision_state import stable

Object = dict[str, Any]
NUMBERS = (
    "maxModelLen",
    "maxRunningRequests",
    "maxPrefillTokens",
    "maxTopLogprobs",
    "prefixSnapshots",
    "maxImagesPerRequest",
    "maxImagePatches",
)
DTYPES: dict[str, type[StrEnum]] = {"kvCacheDtype": KVCacheDtype, "stateDtype": StateDtype}


def add_arguments(made: argparse.ArgumentParser) -> None:
    made.add_argument("name", nargs="?", help="an existing service whose spec to measure")
    made.add_argument(
        "-f", "--filename", type=Path, help="a manifest to measure instead; it is not applied"
    )
    made.add_argument(
        "--image", help="server image; default: spec.image, else that of the newest revision"
    )
    made.add_argument("--memory", help="overrides spec.resources.memory")
    made.add_argument("--gpus", type=int, help="overrides spec.resources.gpus")
    made.add_argument(
        "--headroom-mib", type=int, dest="headroomMiB", help="overrides spec.capacity.headroomMiB"
    )
    made.add_argument("--load", choices=["weights", "random"], default="weights")
    for field in NUMBERS:
        made.add_argument(_flag(field), type=int, dest=field, help=f"overrides spec.engine.{field}")
    for field, kinds in DTYPES.items():
        made.add_argument(
            _flag(field),
            choices=[str(kind) for kind in kinds],
            dest=field,
            help=f"overrides spec.engine.{field}",
        )
    made.add_argument(
        "--modalities",
        type=lambda text: text.split(","),
        metavar="text[,image]",
        help="overrides spec.engine.modalities",
    )
    made.add_argument(
        "--compare",
        metavar="FIELD=VALUE,...",
        default="",
        help="measure this too with each of these changes alone, such as kvCacheDtype=fp8,"
        "memory=4Gi,modalities=text, one after the other in a pod with room for all",
    )


def _flag(field: str) -> str:
    return "--" + "".join(f"-{c.lower()}" if c.isupper() else c for c in field)


def command(a: argparse.Namespace, has_image: bool) -> str:
    """The one that measures the manifest of a `check` with these flags. `has_image`: the spec or a
    revision has one."""
    file = "FILE" if str(a.filename) == "-" else shlex.quote(str(a.filename))
    words = ["kubectl kvline size -f", file]
    for flag, value in (
        ("-n", a.namespace),
        ("--context", a.context),
        ("--kubeconfig", a.kubeconfig),
    ):
        words += [flag, shlex.quote(value)] if value else []
    return " ".join(words if has_image else [*words, "--image IMAGE"])


def measure(cluster: Cluster, a: argparse.Namespace, say: Say) -> Reports:
    """Sizing reports by choice; the first is the spec as given."""
    if (a.name is None) == (a.filename is None):
        raise Problem("exactly one of NAME and -f FILE is required")
    body = cluster.service(a.name) if a.name else from_file(a.filename, cluster, a.namespace)
    if a.filename:
        cluster.validate(body, str(a.filename))
    cluster = dataclasses.replace(cluster, namespace=body["metadata"]["namespace"])
    body = changed(body, a)
    stored = cluster.newest_revision(body["metadata"]["name"])
    image = a.image or body["spec"].get("image") or _image(body, stored)
    settings, room = operator_settings(image, stored), largest(body, a.compare)
    images = _images(body, cluster.history(body["metadata"]["name"]))
    return run(cluster, Question(body, image, settings, a.compare, room, images), say)


def _images(body: Object, history: tuple[RevisionEntry, ...]) -> str | None:
    """As the operator would have pods of this spec serve them."""
    accepted = stable({past.name: past.state for past in history})
    return served_images(parse(body), [past.revision for past in history], accepted)


def _image(body: Object, stored: Object | None) -> str:
    """Of the service's newest revision."""
    base = base_name(body["metadata"]["name"])
    if stored is None or stored["metadata"]["labels"].get(LABEL_SERVICE) != base:
        raise Problem("--image is required: neither the spec nor a revision has an image")
    return str(stored["data"].get("image", ""))


def from_file(path: Path, cluster: Cluster, namespace: str | None) -> Object:
    """The one InferenceService of a manifest, - for stdin, in the namespace that kubectl would
    apply it to; it need not exist."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text()
        found = [d for d in yaml.safe_load_all(text) if isinstance(d, dict)]
    except (OSError, yaml.YAMLError) as error:
        raise Problem(f"{path}: {error}") from None
    services = [d for d in found if d.get("kind") == KIND]
    if len(services) != 1 or not services[0].get("metadata", {}).get("name"):
        raise Problem(f"{path}: expected one named {KIND}, found {len(services)}")
    body = services[0]
    own = body["metadata"].get("namespace")
    if namespace and own and namespace != own:
        raise Problem(f"{path} has namespace {own}, -n has {namespace}")
    body["metadata"] = {"uid": "", **body["metadata"], "namespace": own or cluster.namespace}
    return dict(body)


def changed(body: Object, a: argparse.Namespace) -> Object:
    """The resource with the overrides of the command line."""
    after = copy.deepcopy(body)
    spec = after["spec"]
    sections = {
        "resources": ("memory", "gpus"),
        "engine": (*NUMBERS, *DTYPES, "modalities"),
        "capacity": ("headroomMiB",),
    }
    for section, fields in sections.items():
        given = {f: value for f in fields if (value := getattr(a, f)) is not None}
        if given:
            spec[section] = {**spec.get(section, {}), **given}
    if a.load == "random":
        spec["model"] = {**spec["model"], "loadFormat": "random"}
    return after


def largest(body: Object, compare: str) -> Object:
    """The service with the memory and the GPUs that every choice of the comparison fits into."""
    out = copy.deepcopy(body)
    resources = out["spec"]["resources"] = {**out["spec"]["resources"]}
    for choice in filter(None, compare.split(",")):
        field, _, value = choice.strip().partition("=")
        if field == "memory":
            now = resources["memory"]
            resources["memory"] = max(now, value, key=lambda one: in_bytes(one, choice))
        if field == "gpus" and value.isdigit():
            resources["gpus"] = max(int(value), int(resources.get("gpus", 0)))
    return out

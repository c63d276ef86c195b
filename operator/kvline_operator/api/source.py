"""Where a service's model comes from: a claim of its namespace, or the hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

from kvline_contract.names import hub_folder
from kvline_operator.errors import SpecError

Object = dict[str, Any]
CACHE_SIZE_LIMIT = "200Gi"  # of a model that each pod downloads for itself
SOURCE = re.compile(
    r"(?:hf://(?P<org>[\w.-]+)/(?P<name>[\w.-]+)@(?P<commit>[0-9a-f]{40})"
    r"|pvc://(?P<claim>[a-z0-9.-]+)/(?P<path>[\w./-]+))",
    re.ASCII,
)


class Download(Enum):
    """Who downloads the model."""

    NOBODY = auto()
    POD = auto()  # each for itself
    JOB = auto()  # one for all pods of a revision


class ModelSource(Protocol):
    @property
    def text(self) -> str:
        """As spec.model.source has it."""

    @property
    def path(self) -> str:
        """Of the model's folder, below that of the models."""

    @property
    def identity(self) -> str:
        """What stays equal over commits of one model."""

    @property
    def volume(self) -> Object:
        """The pod's volume of models, but for its name."""

    @property
    def download(self) -> Download: ...

    @property
    def token(self) -> Object | None:
        """The key of a Secret with which it is downloaded."""


@dataclass(frozen=True, slots=True)
class Claim:
    """pvc://"""

    text: str
    claim: str
    path: str
    download: Download = Download.NOBODY
    token: Object | None = None

    @property
    def identity(self) -> str:
        return self.text

    @property
    def volume(self) -> Object:
        return {"persistentVolumeClaim": {"claimName": self.claim, "readOnly": True}}


@dataclass(frozen=True, slots=True)
class Hub:
    """hf://"""

    text: str
    path: str
    cache: str = ""  # a claim that services share; empty: none
    token: Object | None = None

    @property
    def identity(self) -> str:
        return self.text.partition("@")[0]

    @property
    def volume(self) -> Object:
        if self.cache:
            return {"persistentVolumeClaim": {"claimName": self.cache}}
        return {"emptyDir": {"sizeLimit": CACHE_SIZE_LIMIT}}

    @property
    def download(self) -> Download:
        return Download.JOB if self.cache else Download.POD


def source_of(model: Object) -> ModelSource:
    """Of spec.model, or of a revision's inputs."""
    text = model.get("source")
    match = SOURCE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise SpecError(
            "spec.model.source must be hf://org/name@<40 hex> or pvc://claim/path, "
            f"got {text!r:.80}"
        )
    if match["claim"]:
        if ".." in match["path"].split("/"):
            raise SpecError(f"spec.model.source must not contain ..: {text!r:.80}")
        return Claim(match[0], match["claim"], match["path"])
    folder = hub_folder(match["org"], match["name"], match["commit"])
    cache = (model.get("cache") or {}).get("claimName", "")
    return Hub(match[0], folder, cache, model.get("tokenSecretRef"))

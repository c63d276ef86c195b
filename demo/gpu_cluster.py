"""What the GPU story needs of a cluster beside what every demo does, what its own nodes share, and
one without a GPU to rehearse on."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Protocol

import build
import model
from clusters import Cluster, LocalDemo, Say
from local import LocalCluster
from paths import ROOT

NEXT = "operator-next"  # of image_names: the operator's image under another name, for an upgrade


class GpuCluster(Cluster, Protocol):
    @property
    def cluster(self) -> LocalCluster: ...
    @property
    def gpus(self) -> int: ...
    @property
    def kubeconfig(self) -> Path: ...
    @property
    def models(self) -> Path:
        """The folder behind the claim."""

    @property
    def unpacked_seconds(self) -> float:
        """What check() took to unpack parts, which is a part of the node's start; 0 without any."""

    @property
    def has_engine(self) -> bool:
        """Whether `python` has all that the engine needs on this machine, without a container."""

    @property
    def python(self) -> str:
        """An interpreter of this machine that has the server's packages."""

    @property
    def environment(self) -> dict[str, str]:
        """What it needs to run kvline_server, kvline_kubectl and bench of this checkout."""

    def run_on_node(self, command: list[str]) -> subprocess.CompletedProcess[str]: ...


class StoryNode(LocalDemo):
    """A node on this machine, with the operator's image under another name too."""

    models = model.MODELS

    @property
    def kubeconfig(self) -> Path:
        return self.cluster.kubeconfig

    def images(self, say: Say) -> None:
        super().images(say)
        build.load_as(self.cluster.images, self.image_names()[NEXT], build.image_name("operator"))

    def image_names(self) -> dict[str, str]:
        names = super().image_names()
        return {**names, NEXT: f"{names['operator']}-next"}

    def run_on_node(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """In the node's network, where pods and Services answer."""
        return self.cluster.network.run(command, check=False)


class Rehearsal(StoryNode):
    gpus = 0
    has_engine = True
    unpacked_seconds = 0.0
    python = str(ROOT / ".venv" / "bin" / "python")
    environment = {"PYTHONPATH": f"{ROOT}/server:{ROOT}/operator"}  # noqa: RUF012

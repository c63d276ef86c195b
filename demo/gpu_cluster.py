"""What the GPU story needs of a cluster beside what every demo does, and a node without a GPU to
rehearse on."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Protocol

import build
import model
from clusters import Cluster, LocalDemo, Say
from paths import ROOT

NEXT = "operator-next"  # of image_names: the operator's image under another name, for an upgrade


class GpuCluster(Cluster, Protocol):
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
    def python(self) -> str:
        """An interpreter of this machine that has the server's packages."""

    @property
    def environment(self) -> dict[str, str]:
        """What it needs to run kvline_server, kvline_kubectl and bench of this checkout."""

    def run_on_node(self, command: list[str]) -> subprocess.CompletedProcess[str]: ...


class Rehearsal(LocalDemo):
    gpus = 0
    unpacked_seconds = 0.0
    python = str(ROOT / ".venv" / "bin" / "python")
    environment = {"PYTHONPATH": f"{ROOT}/server:{ROOT}/operator"}  # noqa: RUF012
    models = model.MODELS

    @property
    def kubeconfig(self) -> Path:
        return self.cluster.kubeconfig

    def images(self, say: Say) -> None:
        super().images(say)
        image = build.inspect(build.image_name("operator"))
        self.cluster.images.add(self.image_names()[NEXT], image.config, image.layers)

    def image_names(self) -> dict[str, str]:
        names = super().image_names()
        return {**names, NEXT: f"{names['operator']}-next"}

    def run_on_node(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return self.cluster.network.run(command, check=False)

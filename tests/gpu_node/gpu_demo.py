"""A cluster with GPUs as the demo sees it: on this machine, from packed parts or built here.

PARTS=FOLDER      unpacks the packed parts in it first: needs no network (make gpu-node)
PLUGIN=plain      devices as files and a mounted driver folder, not by CDI
DEVICES=/dev/null the plain plug-in's devices, where there is no GPU: a rehearsal
KERNELS=FILE      FlashInfer's kernels for the CUDA image, where that is built here
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import build
import check_images
import machine_image
import model
import node_programs
import parts
import tools
import unpack
from clusters import LocalDemo, Say
from errors import ClusterError
from gpu_cluster import NEXT
from node import GpuNode, count_gpus


class GpuDemo(LocalDemo):
    cluster: GpuNode

    def __init__(self) -> None:
        self.cluster = GpuNode()
        self.devices = [word for word in os.environ.get("DEVICES", "").split(",") if word]
        self.plain = os.environ.get("PLUGIN") == "plain" or bool(self.devices)

    @property
    def gpus(self) -> int:
        return len(self.devices) or count_gpus()

    @property
    def kubeconfig(self) -> Path:
        return self.cluster.kubeconfig

    @property
    def models(self) -> Path:
        return model.MODELS

    @property
    def unpacked(self) -> bool:
        """Whether packed parts brought programs and Python packages."""
        return node_programs.UNPACKED.is_file()

    @property
    def unpacked_seconds(self) -> float:
        return float(node_programs.UNPACKED.read_text()) if self.unpacked else 0.0

    @property
    def python(self) -> str:
        return sys.executable

    @property
    def environment(self) -> dict[str, str]:
        """With which kvline's packages run on this machine, outside of the cluster."""
        own = {"PYTHONPATH": f"{machine_image.KVLINE}:{parts.PACKAGES}"} if self.unpacked else {}
        return {**os.environ, **own, "FLASHINFER_DISABLE_JIT": "1"}

    def check(self, say: Say) -> None:
        tools.ensure_root()
        if not self.devices and count_gpus() == 0:
            raise ClusterError("nvidia-smi finds no GPU here; DEVICES=/dev/null plays one")
        if os.environ.get("PARTS") and not self.unpacked:
            folders = sorted(p for p in Path(os.environ["PARTS"]).iterdir() if p.is_dir())
            unpack.unpack(folders, say)
        if self.unpacked:
            machine_image.make_kvline()
        else:
            super().check(say)

    def model(self, say: Say) -> None:
        if not self.unpacked or model.MODEL.is_dir():
            model.ensure(say)

    def up(self, say: Say) -> None:
        """Until the node offers its GPUs to pods."""
        super().up(say)
        if not self.plain:
            node_programs.build(say, node_programs.OF_NVIDIA)
        started = time.monotonic()
        plain = self.devices or [f"/dev/nvidia{i}" for i in range(count_gpus())]
        self.cluster.start_plugin(plain if self.plain else None)
        how = "the plain device plug-in" if self.plain else "NVIDIA's device plug-in"
        say(f"nvidia.com/gpu: {self.gpus} by {how} ({time.monotonic() - started:.1f} s)")

    def images(self, say: Say) -> None:
        """The shipped images, or of parts, layers of the machine's own system and torch."""
        if self.unpacked:
            say("images of this machine's own system and torch; they are not the shipped ones")
            machine_image.add(self.cluster.images, self.image_names())
            return
        super().images(say)
        operator = build.inspect(build.image_name("operator"))
        self.cluster.images.add(self.image_names()[NEXT], operator.config, operator.layers)
        kernels = Path(os.environ.get("KERNELS", "dist/kernels.tar.xz"))
        if not kernels.is_file():
            raise ClusterError(f"KERNELS={kernels}: there is no such file; make kernels makes it")
        for image in check_images.build_cuda(kernels):
            self.cluster.images.add(image.name, image.config, image.layers)

    def image_names(self) -> dict[str, str]:
        names = machine_image.names()
        return {**names, NEXT: f"{names['operator']}-next"}

    def run_on_node(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """In the node's network, where pods and Services answer."""
        return self.cluster.network.run(command, check=False)

    def down(self) -> None:
        self.cluster.down()

"""A cluster with GPUs as the demo sees it: on this machine, from packed parts or built here.

PARTS=FOLDER      unpacks the packed parts in it first: needs no network (make gpu-node)
PLUGIN=plain      devices as files and a mounted driver folder, not by CDI
DEVICES=/dev/null the plain plug-in's devices, where there is no GPU: a rehearsal
KERNELS=FILE      FlashInfer's kernels for the CUDA image, where that is built here
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import build
import check_images
import machine_image
import model
import node_programs
import parts
import tools
import unpack
from clusters import Say
from errors import ClusterError
from gpu_cluster import StoryNode
from node import DRIVER_FOLDER, GpuNode, count_gpus, device_files
from paths import ROOT


class GpuDemo(StoryNode):
    cluster: GpuNode

    def __init__(self) -> None:
        super().__init__(GpuNode())
        self.devices = [word for word in os.environ.get("DEVICES", "").split(",") if word]
        self.plain = os.environ.get("PLUGIN") == "plain" or bool(self.devices)

    @property
    def gpus(self) -> int:
        return len(self.devices) or count_gpus()

    @property
    def unpacked(self) -> bool:
        """Whether packed parts brought programs and Python packages."""
        return node_programs.UNPACKED.is_file()

    @property
    def unpacked_seconds(self) -> float:
        return float(self._about().get("seconds", 0.0))

    @property
    def has_engine(self) -> bool:
        return self.unpacked

    @property
    def python(self) -> str:
        return sys.executable if self.unpacked else str(ROOT / ".venv" / "bin" / "python")

    @property
    def environment(self) -> dict[str, str]:
        own = {"PYTHONPATH": f"{machine_image.KVLINE}:{parts.PACKAGES}"} if self.unpacked else {}
        return {**os.environ, **own, "FLASHINFER_DISABLE_JIT": "1"}

    def check(self, say: Say) -> None:
        tools.ensure_root()
        if not self.devices and count_gpus() == 0:
            raise ClusterError("nvidia-smi finds no GPU here; DEVICES=/dev/null plays one")
        if os.environ.get("PARTS"):
            self._unpack(Path(os.environ["PARTS"]), say)
        if self.unpacked:
            machine_image.make_kvline()
        else:
            super().check(say)
            subprocess.run([sys.executable, str(ROOT / "tests" / "environment.py")], check=True)

    def _unpack(self, folder: Path, say: Say) -> None:
        """Unless these parts were unpacked before."""
        if not folder.is_dir():
            raise ClusterError(f"PARTS={folder}: there is no such folder; make gpu-node makes it")
        found = sorted(path for path in folder.iterdir() if path.is_dir())
        files = [file for part in found for file in part.iterdir()]
        if self._about().get("parts") != parts.identity(files):
            unpack.unpack(found, say)

    @staticmethod
    def _about() -> dict[str, Any]:
        mark = node_programs.UNPACKED
        return dict(json.loads(mark.read_text())) if mark.is_file() else {}

    def model(self, say: Say) -> None:
        if not self.unpacked or model.MODEL.is_dir():
            model.ensure(say)

    def up(self, say: Say) -> None:
        """Until the node offers its GPUs to pods."""
        super().up(say)
        if not self.plain:
            node_programs.build(say, node_programs.OF_NVIDIA)
        started = time.monotonic()
        # A device that plays a GPU needs no driver.
        mount = "" if self.devices else DRIVER_FOLDER
        plain = self.devices or device_files()
        self.cluster.start_plugin(plain if self.plain else None, mount)
        how = "the plain device plug-in" if self.plain else "NVIDIA's device plug-in"
        say(f"nvidia.com/gpu: {self.gpus} by {how} ({time.monotonic() - started:.1f} s)")

    def images(self, say: Say) -> None:
        """The shipped images, or of parts, layers of the machine's own system and torch."""
        if self.unpacked:
            say("images of this machine's own system and torch; they are not the shipped ones")
            machine_image.add(self.cluster.images, self.image_names())
            return
        kernels = Path(os.environ.get("KERNELS", "dist/kernels.tar.xz"))
        if not kernels.is_file():
            raise ClusterError(f"KERNELS={kernels}: there is no such file; make kernels makes it")
        super().images(say)
        for image in check_images.build_cuda(kernels):
            self.cluster.images.add(image.name, image.config, image.layers)

    def image_names(self) -> dict[str, str]:
        return {**super().image_names(), build.CUDA: build.image_name(build.CUDA)}

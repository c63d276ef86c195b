"""Loads weights from safetensors into a model's blocks, or makes random ones by shape alone.

Every tensor is first looked up in the files' headers, so a missing one or a wrong shape ends the
start within seconds, by name. Data is copied to anonymous memory: file-backed pages could be
evicted by the kernel and would not count against the container's limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from kvline_contract.memory import WEIGHTS
from kvline_server.errors import ModelInvalid
from kvline_server.kernels.interface import Kernels
from kvline_server.memory.parts import OwnedPart
from kvline_server.model.blocks import Layer, Norm
from kvline_server.model.config import ModelConfig
from kvline_server.model.files import open_weights, weight_files
from kvline_server.model.linear import Rows, Tensors, TensorSource

COPY_BYTES = 64 << 20


class Weights:
    def __init__(self, tensors: Tensors, config: ModelConfig) -> None:
        c = config
        vocabulary = range(c.vocabulary)
        self.embedding = tensors.get([Rows("model.embed_tokens.weight", vocabulary)], c.hidden)
        self.layers = [Layer(tensors, c, index) for index in range(c.layers)]
        self.norm = Norm(tensors, c, "model.norm", c.hidden)
        self.head = self.embedding  # [vocabulary, hidden]
        if not c.tied_embeddings:
            self.head = tensors.get([Rows("lm_head.weight", vocabulary)], c.hidden)
        self.elements = tensors.elements

    def parts(self) -> tuple[OwnedPart, ...]:
        return (OwnedPart(WEIGHTS, fixed=self.elements * self.embedding.itemsize),)


class SafetensorsSource:
    def __init__(self, folder: Path) -> None:
        self.files = {path: open_weights(path, "pt") for path in weight_files(folder)}
        self.where = {
            name: path
            for path, file in self.files.items()
            for name in file.keys()  # noqa: SIM118 - not a dict
        }
        self.folder = folder

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        path = self.where.get(name)
        if path is None:
            raise ModelInvalid(f"{self.folder}: tensor {name} is in no safetensors file")
        got = tuple(self.files[path].get_slice(name).get_shape())
        if got != shape:
            raise ModelInvalid(
                f"{path}: tensor {name} has shape {list(got)}, config.json requires {list(shape)}"
            )

    def copy(self, name: str, into: torch.Tensor, row: int = 0) -> None:
        # A view of the mapped file: only the rows copied here are read from the disk.
        whole = self.files[self.where[name]].get_tensor(name)
        into.copy_(whole[row : row + len(into)])


class RandomSource:
    """Small normal weights from a fixed seed: the model's shapes and speed, meaningless output."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        return

    def copy(self, name: str, into: torch.Tensor, row: int = 0) -> None:
        if self.generator is None:  # each device needs a generator of its own
            self.generator = torch.Generator(into.device).manual_seed(0)
        if name.endswith("norm.weight"):
            into.fill_(1.0)
        else:
            into.normal_(0.0, 0.02, generator=self.generator)


def load_weights(
    source: TensorSource,
    config: ModelConfig,
    kernels: Kernels,
    copied: Callable[[int, int], None] = lambda done, total: None,
) -> Weights:
    """All weights, fused, on the kernels' device. Checks every name and shape before any copy;
    `copied(done, total)` is called at least every COPY_BYTES. Raises ModelInvalid."""
    checked = Weights(Tensors(source), config)
    total = checked.elements * kernels.dtype.itemsize
    return Weights(Loading(source, kernels, total, copied), config)


def weight_elements(config: ModelConfig) -> int:
    """Elements of all tensors, from the shapes alone."""
    return Weights(Tensors(RandomSource()), config).elements


class Loading(Tensors):
    """Copies what a block asks for to the device."""

    def __init__(
        self,
        source: TensorSource,
        kernels: Kernels,
        total: int,
        copied: Callable[[int, int], None],
    ) -> None:
        super().__init__(source)
        self.kernels = kernels
        self.copied = copied
        self.done, self.total = 0, total  # bytes

    def get(
        self, parts: Sequence[Rows], columns: int | None = None, offset: float = 0.0
    ) -> torch.Tensor:
        shape = (sum(len(part.rows) for part in parts), *(() if columns is None else (columns,)))
        out = torch.empty(shape, dtype=self.kernels.dtype, device=self.kernels.device)
        start = 0
        for part in parts:
            self._copy(part, out[start : start + len(part.rows)])
            start += len(part.rows)
        self.elements += out.numel()
        return out.add_(offset) if offset else out

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return self.kernels.pack(weight)

    def _copy(self, part: Rows, into: torch.Tensor) -> None:
        """Copies in steps, because one tensor may take minutes on a slow volume."""
        step = max(1, COPY_BYTES // max(1, into[:1].nbytes))
        for row in range(0, len(into), step):
            rows = into[row : row + step]
            self.source.copy(part.name, rows, part.rows.start + row)
            self.done += rows.nbytes
            self.copied(self.done, self.total)

"""Loads weights from safetensors into fused tensors, or makes random ones from the shapes alone.

Every tensor is first looked up in the files' headers, so a missing one or a wrong shape ends the
start within seconds, by name. Data is copied to anonymous memory: file-backed pages could be
evicted by the kernel and would not count against the container's limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from kvline_server.errors import ModelInvalid
from kvline_server.kernels.interface import Kernels
from kvline_server.model.config import ModelConfig
from kvline_server.model.files import open_weights, weight_files

COPY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. GEMMs that share an input are fused along the output axis."""

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * dim, hidden]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [dim]
    k_norm: torch.Tensor | None
    output: torch.Tensor  # [hidden, heads * dim]
    output_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [hidden, intermediate]
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: torch.Tensor  # [vocabulary, hidden]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor  # [vocabulary, hidden]; the embedding itself when tied

    def tensors(self) -> Iterator[torch.Tensor]:
        yield self.embedding
        yield self.norm
        if self.head is not self.embedding:
            yield self.head
        for layer in self.layers:
            for name in LayerWeights.__slots__:
                tensor = getattr(layer, name)
                if tensor is not None:
                    yield tensor

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())


class TensorSource(Protocol):
    """Tensors by name. `check` is called for all of them before the first `copy`, which copies
    len(into) rows from `row` on."""

    def check(self, name: str, shape: tuple[int, ...]) -> None: ...

    def copy(self, name: str, into: torch.Tensor, row: int = 0) -> None: ...


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
    plan = _Plan(source, config, kernels, copied)
    plan.checking = True
    plan.build()
    plan.checking = False
    return plan.build()


class _Plan:
    """Visits the model's tensors once to check and once to copy them, with the same code."""

    def __init__(
        self,
        source: TensorSource,
        config: ModelConfig,
        kernels: Kernels,
        copied: Callable[[int, int], None],
    ) -> None:
        self.source = source
        self.config = config
        self.kernels = kernels
        self.copied = copied
        self.checking = False
        self.done = self.total = 0  # bytes

    def build(self) -> Weights:
        c = self.config
        embedding = self.fused([("model.embed_tokens.weight", c.vocabulary)], c.hidden)
        layers = tuple(self.layer(f"model.layers.{i}.") for i in range(c.layers))
        norm = self.fused([("model.norm.weight", c.hidden)])
        head = embedding
        if not c.tied_embeddings:
            head = self.fused([("lm_head.weight", c.vocabulary)], c.hidden)
        return Weights(embedding, layers, norm, head)

    def layer(self, at: str) -> LayerWeights:
        c = self.config
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        attention, mlp = at + "self_attn.", at + "mlp."
        projections = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)]
        gates = [("gate_proj", c.intermediate), ("up_proj", c.intermediate)]
        return LayerWeights(
            input_norm=self.fused([(at + "input_layernorm.weight", c.hidden)]),
            qkv=self.matrix([(f"{attention}{n}.weight", s) for n, s in projections], c.hidden),
            qkv_bias=self.maybe(c.qkv_bias, [(f"{attention}{n}.bias", s) for n, s in projections]),
            q_norm=self.maybe(c.qk_norm, [(attention + "q_norm.weight", c.head_dim)]),
            k_norm=self.maybe(c.qk_norm, [(attention + "k_norm.weight", c.head_dim)]),
            output=self.matrix([(attention + "o_proj.weight", c.hidden)], q),
            output_bias=self.maybe(c.output_bias, [(attention + "o_proj.bias", c.hidden)]),
            post_norm=self.fused([(at + "post_attention_layernorm.weight", c.hidden)]),
            gate_up=self.matrix([(f"{mlp}{n}.weight", s) for n, s in gates], c.hidden),
            gate_up_bias=self.maybe(c.mlp_bias, [(f"{mlp}{n}.bias", s) for n, s in gates]),
            down=self.matrix([(mlp + "down_proj.weight", c.hidden)], c.intermediate),
            down_bias=self.maybe(c.mlp_bias, [(mlp + "down_proj.bias", c.hidden)]),
        )

    def matrix(self, parts: list[tuple[str, int]], columns: int) -> torch.Tensor:
        """A GEMM's weight, in the layout that is fastest for its kernel."""
        plain = self.fused(parts, columns)
        return plain if self.checking else self.kernels.pack(plain)

    def maybe(self, wanted: bool, parts: list[tuple[str, int]]) -> torch.Tensor | None:
        return self.fused(parts) if wanted else None

    def fused(self, parts: list[tuple[str, int]], columns: int | None = None) -> torch.Tensor:
        """One tensor: the rows of the named tensors, concatenated."""
        width = () if columns is None else (columns,)
        shape = (sum(rows for _, rows in parts), *width)
        if self.checking:
            for name, rows in parts:
                self.source.check(name, (rows, *width))
            self.total += math.prod(shape) * self.kernels.dtype.itemsize
            return torch.empty(0)
        out = torch.empty(shape, dtype=self.kernels.dtype, device=self.kernels.device)
        start = 0
        for name, rows in parts:
            self.copy(name, out[start : start + rows])
            start += rows
        return out

    def copy(self, name: str, into: torch.Tensor) -> None:
        """Copies in parts, because one tensor may take minutes on a slow volume."""
        step = max(1, COPY_BYTES // max(1, into[:1].nbytes))
        for row in range(0, len(into), step):
            part = into[row : row + step]
            self.source.copy(name, part, row)
            self.done += part.nbytes
            self.copied(self.done, self.total)

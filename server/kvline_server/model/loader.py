"""Loads weights from safetensors into a model's blocks, or makes random ones by shape alone.

Every tensor is first looked up in the files' headers, so a missing one or a wrong shape ends the
start within seconds, by name. Data is copied to anonymous memory: file-backed pages could be
evicted by the kernel and would not count against the container's limit.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from kvline_contract.memory import EXPERTS, SCALES, TOWER, WEIGHTS
from kvline_server.errors import ModelInvalid, ModelUnsupported
from kvline_server.kernels.fp8 import FP8, Weight
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.mxfp4 import BIAS, NAN, Mxfp4Weight, PackedMxfp4
from kvline_server.memory.parts import OwnedPart
from kvline_server.model import layer
from kvline_server.model.blocks import norm
from kvline_server.model.config import ModelConfig
from kvline_server.model.draft_head import DraftHead
from kvline_server.model.experts import Experts
from kvline_server.model.files import open_weights, weight_files
from kvline_server.model.linear import Rows, Tensors, TensorSource
from kvline_server.model.quantization import MXFP4_SCALES, Quantization
from kvline_server.model.shard import WHOLE, Shard
from kvline_server.model.shard import vocabulary as own_tokens
from kvline_server.model.vision.config import VisionConfig
from kvline_server.model.vision.read import read_tower

COPY_BYTES = 64 << 20
PACKED_BYTES = 16 << 20  # of experts in MXFP4 that are read before they are packed
DRAWN = 1 << 24  # random numbers at a time: 32 MiB in bfloat16
SCALE = 2.0**-11  # of random weights in fp8
EXPONENTS = 119, 121  # of random weights in MXFP4, below the second: numbers up to 6 times 2^-7
MXFP4 = "in 4 bits (MXFP4)"  # detail of a part
ROUTERS = (".gate.weight", ".router.layer.weight")  # of experts, which no format quantises


class Weights:
    """Of one rank. Each has the whole embedding, its own rows of the LM head, and the whole tower
    for images where `vision` asks for it."""

    def __init__(
        self,
        tensors: Tensors,
        config: ModelConfig,
        vision: VisionConfig | None = None,
        encoded: int = 0,
    ) -> None:
        """`encoded` rows are for what the tower makes of images, behind the embeddings."""
        names, own = config.names.found(tensors.source.has), own_tokens(config, tensors.shard)
        c, at = replace(config, names=names), names.decoder
        every = Rows(f"{at}{names.embedding}.weight", range(c.vocabulary), c.vocabulary)
        self.embedding = tensors.get([every], c.hidden, room=encoded)
        self.first, self.layers = layer.read(tensors, c)
        self.norm = norm(tensors, c, at + names.norm, c.hidden)
        self.head = self.embedding[own.start : own.stop]  # a view [own tokens, hidden]
        if not c.tied_embeddings:
            self.head = tensors.get([Rows("lm_head.weight", own, c.vocabulary)], c.hidden)
        self.drafts = DraftHead(tensors, c) if c.draft_head else None
        self.tower = None if vision is None else read_tower(tensors, vision)
        self.counts = tensors.counts  # elements by dtype
        self.scales = tensors.scales  # elements
        self.padding = tensors.padding  # bytes

    def nbytes(self, dtype: torch.dtype) -> int:
        """In a model of this dtype, with what the kernels' layout of experts adds."""
        return self.read_nbytes(dtype) + self.padding

    def read_nbytes(self, dtype: torch.dtype) -> int:
        """In a model of this dtype, as the files have them."""
        return _nbytes(self.counts, dtype)

    def parts(self) -> tuple[OwnedPart, ...]:
        layers, size = self.experts(), self.embedding.dtype
        of_linears = self.scales * 4
        scales = of_linears + self.expert_scales
        experts = sum(each.layer.nbytes for each in layers) - self.expert_scales
        of_experts = sum(_nbytes(each.counts, size) for each in layers)
        tower = 0 if self.tower is None else self.tower.nbytes(size)
        others = self.read_nbytes(size) - of_linears - of_experts - tower
        sizes = {WEIGHTS: others, SCALES: scales, EXPERTS: experts, TOWER: tower}
        details = {EXPERTS: MXFP4} if self.expert_scales else {}
        return tuple(OwnedPart(name, n, detail=details.get(name)) for name, n in sizes.items() if n)

    def experts(self) -> list[Experts]:
        """All mixtures, in order, that of a draft head last; none of a dense model."""
        layers = self.layers if self.drafts is None else [*self.layers, self.drafts.layer]
        blocks = [block for own in (self.first, *(a.blocks for a in layers)) for block in own]
        return [block for block in blocks if isinstance(block, Experts)]

    @property
    def expert_scales(self) -> int:
        """Bytes."""
        return sum(each.layer.scales_nbytes for each in self.experts())


def _nbytes(counts: Counter[torch.dtype | None], dtype: torch.dtype) -> int:
    return sum(n * (kind or dtype).itemsize for kind, n in counts.items())


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
        if (got := self.shape(name)) != shape:
            raise ModelInvalid(
                f"{path}: tensor {name} has shape {list(got)}, config.json requires {list(shape)}"
            )

    def has(self, name: str) -> bool:
        return name in self.where

    def count(self, prefix: str) -> int:
        return sum(name.startswith(prefix) for name in self.where)

    def fp8(self, name: str) -> Quantization | None:
        return None

    def shape(self, name: str) -> tuple[int, ...]:
        if not self.has(name):
            return ()
        return tuple(self.files[self.where[name]].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As safetensors names it."""
        return str(self.files[self.where[name]].get_slice(name).get_dtype())

    def whole(self, name: str) -> torch.Tensor:
        """A view of the mapped file: only what is copied of it is read from the disk."""
        tensor: torch.Tensor = self.files[self.where[name]].get_tensor(name)
        return tensor

    def copy(self, part: Rows, into: torch.Tensor, column: int = 0) -> None:
        whole = self.whole(part.name)
        made = whole if part.stacked is None else part.stacked.of(whole)
        into.copy_(_slice(made, part.rows, into, column))


class RandomSource:
    """Small normal weights: the model's shapes and speed, meaningless output. A tensor's numbers
    follow from its name, so those of several ranks are the slices of the one that a single rank
    has. They are drawn in blocks of whole rows, the last of which is kept: a tensor's parts come
    in the order of its rows, mostly. Those of `quantization` are near the ones without it; those of
    MXFP4 are as wide, and each as likely."""

    def __init__(self, quantization: Quantization | None = None) -> None:
        self.quantization = quantization
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.drawn: tuple[str, int, torch.Tensor] = ("", 0, torch.empty(0))

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        self.shapes[name] = shape

    def has(self, name: str) -> bool:
        """Names are those of the configuration."""
        return False

    def count(self, prefix: str) -> int:
        return 0

    def shape(self, name: str) -> tuple[int, ...]:
        return ()

    def fp8(self, name: str) -> Quantization | None:
        return None if name.endswith(ROUTERS) else self.quantization

    def copy(self, part: Rows, into: torch.Tensor, column: int = 0) -> None:
        name, rows = part.name, part.rows
        if name.endswith(("norm.weight", "norm_f.weight")):
            into.fill_(1.0)
            return
        if self.quantization is not None and name.endswith(self.quantization.suffix):
            into.fill_(SCALE)
            return
        shape = self.shapes[name]
        if part.stacked is not None:
            shape = tuple(part.stacked.of(torch.empty(shape, device="meta")).shape)
            name = f"{name}[{part.stacked.at}]"
        height, *width = shape
        block = min(height, max(1, DRAWN // max(1, *width, 1)))
        done = 0
        while done < len(into):
            start = rows[done] - rows[done] % block
            drawn = self._block(name, start, (min(block, height - start), *width), into)
            there = -(-(start + len(drawn) - rows[done]) // rows.step)
            own, some = rows[done : done + there], into[done : done + there]
            own = range(own.start - start, own.stop - start, own.step)
            made = _slice(drawn, own, some, column)
            some.copy_(made / SCALE if into.dtype == FP8 else made)
            done += there

    def _block(
        self, name: str, start: int, shape: tuple[int, ...], like: torch.Tensor
    ) -> torch.Tensor:
        """A tensor's rows from `start` on, on the device and of the dtype of `like`, if that can be
        drawn."""
        kept, dtype = self.drawn[2], torch.bfloat16 if like.dtype == FP8 else like.dtype
        same = (kept.shape, kept.device, kept.dtype) == (shape, like.device, dtype)
        if self.drawn[:2] != (name, start) or not same:
            digest = hashlib.blake2b(f"{name} {start}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "big") >> 1
            generator = torch.Generator(like.device).manual_seed(seed)
            self.drawn = ("", 0, kept[:0])  # frees its memory before more is taken
            del kept
            made = torch.empty(shape, dtype=dtype, device=like.device)
            if dtype == torch.uint8:
                low, high = EXPONENTS if MXFP4_SCALES in name else (0, 256)
                made.random_(low, high, generator=generator)
            else:
                made.normal_(0.0, 0.02, generator=generator)
            self.drawn = (name, start, made)
        return self.drawn[2]


def _slice(whole: torch.Tensor, rows: range, into: torch.Tensor, column: int) -> torch.Tensor:
    """Of the shape of `into`."""
    own = whole[rows.start : rows.stop : rows.step]
    return own if into.dim() == 1 else own[:, column : column + into.shape[1]]


def left_out(source: TensorSource, config: ModelConfig, vision: VisionConfig | None = None) -> str:
    """A warning where the files have tensors that no block of the model asks for: of towers for
    images but the one of `vision`, of draft heads."""
    loaded = config.drafts if config.draft_head else ""
    others = (
        at for at in config.left_out if at != loaded and (vision is None or not vision.reads(at))
    )
    found = ((at, source.count(at)) for at in others)
    each = " and ".join(f"{count} tensors {at}*" for at, count in found if count)
    return (
        f"{each} are not loaded: of {config.architecture} its text model is served" if each else ""
    )


def checked(
    source: TensorSource,
    config: ModelConfig,
    shard: Shard = WHOLE,
    kernels: Kernels | None = None,
    vision: VisionConfig | None = None,
) -> Weights:
    """Checks every name and shape that a rank loads, and counts elements and bytes, of weights as
    these kernels keep them; its tensors are empty. Raises ModelInvalid."""
    return Weights(Tensors(source, shard, kernels), config, vision)


def load_weights(
    source: TensorSource,
    config: ModelConfig,
    kernels: Kernels,
    copied: Callable[[int, int], None] = lambda done, total: None,
    shard: Shard = WHOLE,
    vision: VisionConfig | None = None,
    encoded: int = 0,
) -> Weights:
    """All weights of a rank, fused, on the kernels' device; `config` is that of the whole model.
    Checks every name and shape before any copy; `copied(done, total)` is called at least every
    COPY_BYTES. Raises ModelInvalid."""
    total = checked(source, config, shard, kernels, vision).read_nbytes(kernels.dtype)
    return Weights(Loading(source, kernels, total, copied, shard), config, vision, encoded)


class Loading(Tensors):
    """Copies what a block asks for to the device."""

    def __init__(
        self,
        source: TensorSource,
        kernels: Kernels,
        total: int,
        copied: Callable[[int, int], None],
        shard: Shard,
    ) -> None:
        super().__init__(source, shard, kernels)
        self.kernels, self.device = kernels, kernels.device
        self.copied = copied
        self.done, self.total = 0, total  # bytes

    def get(
        self,
        parts: Sequence[Rows],
        columns: int | None = None,
        own: range | None = None,
        offset: float = 0.0,
        dtype: torch.dtype | None = None,
        room: int = 0,
    ) -> torch.Tensor:
        width = () if columns is None else (columns if own is None else len(own),)
        rows, kept = sum(len(part.rows) for part in parts), dtype or self.kernels.dtype
        whole = torch.empty((rows + room, *width), dtype=kept, device=self.kernels.device)
        whole[rows:].zero_()
        out = whole[:rows]
        start = 0
        for part in parts:
            into = out[start : start + len(part.rows)]
            self._copy(part, into, 0 if own is None else own.start)
            start += len(part.rows)
        self.counts[dtype] += out.numel()
        if offset:
            out.add_(offset)
        return whole

    def pack(self, weight: Weight) -> Weight:
        return self.kernels.gemms.pack(weight)

    def experts(
        self, values: Sequence[Rows], scales: Sequence[Rows], inputs: int, own: range | None = None
    ) -> Mxfp4Weight | PackedMxfp4:
        """What is packed is read in parts: never is a whole layer there in both layouts."""
        room = self._packing(values, inputs, own)
        if room is None:
            return self._valid(self._mxfp4(values, scales, inputs, own), scales[0].name)
        step = max(1, PACKED_BYTES // (len(values[0].rows) * inputs // 2))
        at = 0
        for start in range(0, len(values), step):
            cut = slice(start, start + step)
            some = self._mxfp4(values[cut], scales[cut], inputs, own)
            room.put(self._valid(some, scales[0].name), at)
            at += len(some)
        return room.made

    def _valid(self, weight: Mxfp4Weight, scales: str) -> Mxfp4Weight:
        """Raises ModelInvalid or ModelUnsupported for scales that the kernels do not take."""
        most, largest = int(weight.scales.max()), self.kernels.experts.largest_scale
        if most == NAN:
            raise ModelInvalid(f"tensor {scales} has a NaN, expected powers of two")
        if most > largest:
            raise ModelUnsupported(
                f"tensor {scales} has a scale of 2^{most - BIAS}, this device's kernels take up to "
                f"2^{largest - BIAS}"
            )
        return weight

    def _copy(self, part: Rows, into: torch.Tensor, column: int) -> None:
        """Copies in steps, because one tensor may take minutes on a slow volume."""
        step = max(1, COPY_BYTES // max(1, into[:1].nbytes))
        for at in range(0, len(into), step):
            rows = into[at : at + step]
            self.source.copy(replace(part, rows=part.rows[at : at + step]), rows, column)
            self.done += rows.nbytes
            self.copied(self.done, self.total)

"""Images of a launch: whether they are served, within which bounds, and the largest passes of their
encoder, which run before the KV cache is sized."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from kvline_contract.launch import Device as Kind
from kvline_contract.launch import EngineOptions, LaunchConfig, LoadFormat
from kvline_contract.launch import Images as Asked
from kvline_contract.memory import ENCODER_CACHE
from kvline_contract.report import Stage
from kvline_server.engine.encoding import Bounds
from kvline_server.errors import ConfigInvalid, ModelInvalid, ModelNotFound, ModelUnsupported
from kvline_server.images.digests import digest
from kvline_server.images.processor import MAX_RATIO, Processor
from kvline_server.ipc import starvation
from kvline_server.ipc.messages import Progress, SendProgress
from kvline_server.kernels.encoder import DIM_STEP, HEAD_DIMS, MAX_NORM_WIDTH
from kvline_server.memory.device import MIB, Device
from kvline_server.memory.parts import OwnedPart
from kvline_server.memory.states import BOUNDARY
from kvline_server.model.config import ModelConfig
from kvline_server.model.decoder import Decoder
from kvline_server.model.fields import Fields, read_json
from kvline_server.model.linear import Tensors
from kvline_server.model.loader import SafetensorsSource
from kvline_server.model.vision import preprocessor
from kvline_server.model.vision.config import SECTION, VisionConfig, image_token, read_vision
from kvline_server.model.vision.read import read_tower
from kvline_server.worker.encoder import Encoder, Given

PER_REQUEST = 8
# Of an image, resized. On a CPU the largest would take minutes of every start.
PATCHES = {Kind.CUDA: 16384, Kind.CPU: 1024}
SLICE_SECONDS = 0.02  # of the encoder between two steps with decodes, where a layer takes less
TEXT = 16  # tokens of the context that an image leaves to the rest of a prompt
Size = tuple[int, int]  # height and width in pixels


@dataclass(frozen=True, slots=True)
class Images:
    vision: VisionConfig
    processor: Processor
    per_request: int
    patches: int  # of an image at most
    chunk: int = 1  # that prompts' chunks are multiples of

    @property
    def tokens(self) -> int:
        """Of an image at most."""
        return self.patches // self.vision.merge**2

    @property
    def whole(self) -> int:
        """Tokens of an image of which a step has all or none; 0: prompts' chunks may cut images."""
        return self.tokens if self.vision.two_way else 0

    def bounds(self, chunk: int) -> Bounds:
        """Of the encoder beside steps with prompts of up to `chunk` tokens."""
        return Bounds.of(self.tokens, chunk, self.chunk)

    def within(self, longest: int) -> int:
        """Patches of an image at most in a context of so many tokens."""
        of_token = self.vision.merge**2
        few = max(1, longest - TEXT) * of_token
        return self.patches if self.vision.image else min(self.patches, few)

    def largest(self) -> Iterator[list[Size]]:
        """The images of each of the encoder's largest passes: a square, the widest strip, and as
        many small ones as a pass takes."""
        side, tokens = self.vision.factor, self.tokens
        if self.vision.image:
            yield [(self.vision.image, self.vision.image)]
            return
        rows = math.isqrt(tokens)
        yield [(rows * side, tokens // rows * side)]
        rows = max(1, math.ceil(math.sqrt(tokens / MAX_RATIO)))
        yield [(rows * side, tokens // rows * side)]
        yield [(side, side)] * tokens


def asked(launch: LaunchConfig, model: ModelConfig, longest: int) -> tuple[Images | None, str]:
    """What is served of images to sequences of up to `longest` tokens, and a warning where the
    model has what would be, and its files or this server do not serve it. Raises ConfigInvalid for
    bounds, and where images are required all else that is wrong."""
    engine = launch.engine
    if engine.images is None:
        return None, ""
    try:
        return _served(launch, model, longest), ""
    except (ModelInvalid, ModelNotFound, ModelUnsupported) as error:
        if engine.images is Asked.REQUIRED:
            raise
        return None, "" if isinstance(error, NoEncoder) else f"images are not served: {error}"


class NoEncoder(ModelUnsupported):
    """The model is one of text alone."""


def _served(launch: LaunchConfig, model: ModelConfig, longest: int) -> Images:
    folder, engine = Path(launch.model.path), launch.engine
    path = folder / "config.json"
    fields = Fields(read_json(path), path)
    if not fields.section(SECTION).raw:
        raise NoEncoder(
            f"{path} has no vision_config: the model is one of text, and spec.engine.modalities "
            "has image"
        )
    vision = read_vision(fields)
    if launch.device is not Kind.CPU:
        _check_kernels(fields, vision)
    patches = _patches(launch.device, engine, vision, longest)
    processor = preprocessor.read(folder).within(patches)
    if not processor.fixed:
        patches = min(patches, processor.longest // vision.patch**2)  # the model's own limit
    _check_files(launch, fields, vision)
    count = engine.max_images_per_request or PER_REQUEST
    return Images(vision, processor, count, patches, BOUNDARY if model.recurrent else 1)


def _check_kernels(fields: Fields, vision: VisionConfig) -> None:
    """Raises ModelUnsupported for a tower that a GPU's kernels do not take."""
    joined = vision.merge**2 if vision.kind == "qwen3" else 1  # patches of a row that is normed
    most = MAX_NORM_WIDTH // joined
    for name, found, wanted, fits in (
        (
            "hidden_size / heads",
            vision.head_dim,
            f"a multiple of {DIM_STEP} up to {HEAD_DIMS[-1]}",
            vision.head_dim % DIM_STEP == 0 and vision.head_dim <= HEAD_DIMS[-1],
        ),
        ("hidden_size", vision.hidden, f"up to {most}", vision.hidden <= most),
    ):
        if not fits:
            raise ModelUnsupported(
                f"{fields.path}: vision_config has {name} = {found}, kernels on GPUs take "
                f"{wanted}; leave image out of spec.engine.modalities"
            )


def _check_files(launch: LaunchConfig, fields: Fields, vision: VisionConfig) -> None:
    """What a start would miss of a tower only later. Raises ModelInvalid."""
    image_token(fields)
    if launch.model.load_format is LoadFormat.WEIGHTS:
        read_tower(Tensors(SafetensorsSource(Path(launch.model.path))), vision)


def _patches(device: Kind, engine: EngineOptions, vision: VisionConfig, longest: int) -> int:
    of_token, fixed = vision.merge**2, (vision.image // vision.patch) ** 2
    least, most = fixed or of_token, max(0, longest - TEXT) * of_token
    if most < least:
        raise ModelUnsupported(
            f"a context of {longest} tokens has no room for an image: raise "
            "spec.engine.maxModelLen, or leave image out of spec.engine.modalities"
        )
    given = engine.max_image_patches
    if given is not None and not least <= given <= most:
        raise ConfigInvalid(
            f"spec.engine.maxImagePatches: expected {least} to {most}, as {of_token} patches "
            f"are a token and the context has {longest}, got {given}; raise maxModelLen, or lower "
            "it"
        )
    found = fixed or given or min(PATCHES[device], most)
    return found // of_token * of_token


def owned(images: Images | None, chunk: int, dtype: torch.dtype) -> tuple[OwnedPart, ...]:
    """The encoder's cache beside steps of up to `chunk` prompt tokens; its tower is among the
    weights."""
    if images is None:
        return ()
    rows, vision = images.bounds(chunk).cached, images.vision
    text = 1 if vision.deepstack else 0  # the row of zeros that is added to text
    nbytes = rows * vision.width + text * (vision.width - vision.out)
    detail = f"{rows} tokens of images"
    return (OwnedPart(ENCODER_CACHE, fixed=nbytes * dtype.itemsize, detail=detail),)


def opened(
    images: Images | None, decoder: Decoder, device: Device, send: SendProgress
) -> tuple[Encoder | None, int, int]:
    """The encoder; the bytes that its largest passes take, which in service are its own or stay
    free for it; and the tokens times layers that it encodes in a second. Each rank has its largest
    share of a pass, without the others, which may not have loaded yet. Raises DeviceOutOfMemory."""
    tower = decoder.weights.tower
    if images is None or tower is None:
        return None, 0, 1
    encoder, began = Encoder(tower, decoder, images.processor.normalisation), time.monotonic()
    with encoder.group.apart():
        most, seconds = _largest_passes(encoder, images, device)
    ms, taken = round((time.monotonic() - began) * 1000), -(-most // MIB) * MIB
    what = f"images of up to {images.patches} patches"
    send(Progress(stage=Stage("encoder", ms, taken, what)))
    return encoder, taken, max(1, round(1 / seconds))


def _largest_passes(encoder: Encoder, images: Images, device: Device) -> tuple[int, float]:
    """-> the most bytes that one of them takes, and the most seconds of a token in a layer"""
    most, slowest = 0, 0.0
    device.settle()
    first = device.now()
    for sizes in images.largest():
        given = [_blank(*size, images) for size in sizes] * encoder.group.ranks  # each has all
        tokens = sum(each.tokens for each in given)
        rows = np.arange(tokens, dtype=np.int64) % len(encoder.embeddings)
        device.settle()
        device.reset_peak()
        before = device.now()
        seconds = starvation.took(partial(_whole, encoder, given, rows), [os.getpid()])
        own = tokens // encoder.group.ranks
        slowest = max(slowest, seconds / (own * encoder.tower.config.layers))
        device.keep_peak(again=False)
        most = max(most, device.peak() - before)
    device.settle()
    return max(most, device.now() - first), slowest  # a GPU keeps what each pass took


def _whole(encoder: Encoder, images: list[Given], rows: NDArray[np.int64]) -> None:
    """A pass."""
    assert not encoder.begin(images, rows)
    encoder.run(0)
    encoder.embeddings[0].cpu()  # waits for a GPU


def slice_of(pace: int) -> int:
    """Tokens times layers that are encoded between two steps with decodes."""
    return max(1, round(SLICE_SECONDS * pace))


def _blank(height: int, width: int, images: Images) -> Given:
    pixels = np.zeros((height, width, 3), np.uint8)
    return Given(height * width // images.vision.factor**2, digest(pixels), pixels)

"""A tower as vision_config of config.json describes it. Imports no torch.

An option that changes the computation and is not implemented is refused by name, as in families.
Absent fields have the defaults of the classes in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvline_server.model.fields import Fields
from kvline_server.model.neutral import IGNORED, NEUTRAL

SECTION = "vision_config"
TOKENS = ("image_token_id", "image_token_index")  # of images, by the class that saved the file
GELU = "gelu_pytorch_tanh"
CHANNELS, FRAMES = 3, 2  # Qwen's patches have the same picture twice: video has two frames there
QWEN = ("model.visual.", "visual.")
GEMMA = (
    "vision_tower.vision_model.",
    "model.vision_tower.vision_model.",
    "vision_tower.",  # as transformers 5.23 saves it
    "model.vision_tower.",
)
# Of video, of heads that no text model reads, and what is a copy of another field or unused.
UNUSED = frozenset(("tokens_per_second", "vision_use_head"))


@dataclass(frozen=True, slots=True)
class VisionConfig:
    kind: Literal["qwen3", "qwen2_5", "siglip"]
    prefixes: tuple[str, ...]  # before the names of its tensors; the first where files have none
    layers: int
    hidden: int
    intermediate: int
    heads: int
    patch: int  # pixels of its side
    merge: int  # patches of the side of a square that is one token
    frames: int  # of a patch: an image is as many equal ones
    out: int  # elements of a token: the text model's hidden size
    eps: float
    theta: float = 0.0  # of rotary embeddings; 0: none
    positions: int = 0  # of the side of a square table of embeddings; 0: none
    # After which layers it is merged besides: each has rows of its own behind a token's.
    deepstack: tuple[int, ...] = ()
    window: int = 0  # tokens of its side, within which layers attend; 0: the image
    whole: frozenset[int] = frozenset()  # layers without a window, where others have one
    image: int = 0  # pixels of the side of every image; 0: of any that `factor` divides
    two_way: bool = False  # whether a text model's layers attend both ways within an image

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def factor(self) -> int:
        """Pixels of a token's side."""
        return self.patch * self.merge

    @property
    def width(self) -> int:
        """Elements of a token's row, with what deepstack adds."""
        return self.out * (1 + len(self.deepstack))

    @property
    def inputs(self) -> int:
        """Numbers of a patch."""
        return CHANNELS * self.frames * self.patch**2

    def reads(self, at: str) -> bool:
        """Whether tensors whose names begin so are the tower's."""
        own = (*self.prefixes, "multi_modal_projector.") if self.kind == "siglip" else self.prefixes
        return any(name.startswith(at) for name in own)


def read_vision(fields: Fields) -> VisionConfig:
    """The tower of a checkpoint; `fields` are the whole file's. Raises ModelInvalid and
    ModelUnsupported."""
    kind, vision = fields.value("model_type"), fields.section(SECTION)
    if kind not in READERS:
        raise fields.unsupported("model_type", f", towers of {', '.join(READERS)} are")
    made = READERS[kind](fields, vision)
    vision.refuse_unread(IGNORED | UNUSED, NEUTRAL)
    if made.hidden % made.heads:
        raise vision.invalid("hidden_size", f"a multiple of the heads, {made.heads}")
    if made.theta and made.head_dim % 4:
        raise vision.invalid("hidden_size", f"a multiple of 4 times the heads, {made.heads}")
    return made


def image_token(fields: Fields) -> int:
    """The id of the token that stands for an image. Raises ModelInvalid."""
    for name in TOKENS:
        if type(token := fields.value(name)) is int and token >= 0:
            return token
    raise fields.invalid(TOKENS[0], "the id of the token of images")


def _qwen3(fields: Fields, vision: Fields) -> VisionConfig:
    """Qwen3-VL's, and Qwen3.5's, which has no deepstack."""
    kind = fields.value("model_type")
    _of_type(vision, "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    vision.only("hidden_act", GELU, GELU)
    layers = vision.integer("depth", 27)
    deepstack: tuple[int, ...] = ()
    if kind.startswith("qwen3_vl"):
        deepstack = _numbers(vision, "deepstack_visual_indexes", (8, 16, 24))
        if list(deepstack) != sorted({each for each in deepstack if each < layers}):
            raise vision.invalid("deepstack_visual_indexes", f"layers of {layers}, in order")
    table = vision.integer("num_position_embeddings", 2304)
    if math.isqrt(table) ** 2 != table:
        raise vision.invalid("num_position_embeddings", "a square")
    return VisionConfig(
        kind="qwen3",
        prefixes=QWEN,
        layers=layers,
        hidden=vision.integer("hidden_size", 1152),
        intermediate=vision.integer("intermediate_size", 4304),
        heads=vision.integer("num_heads", 16),
        patch=vision.integer("patch_size", 16),
        merge=vision.integer("spatial_merge_size", 2),
        frames=_frames(vision),
        out=_out(fields, vision),
        eps=1e-6,
        theta=_theta(vision),
        positions=math.isqrt(table),
        deepstack=deepstack,
    )


def _qwen2_5(fields: Fields, vision: Fields) -> VisionConfig:
    _of_type(vision, "qwen2_5_vl")
    vision.only("hidden_act", "silu", "silu")
    patch = vision.integer("patch_size", 14)
    # Of older files, which the class does not read.
    vision.only("in_chans", CHANNELS, CHANNELS)
    vision.only("spatial_patch_size", patch, patch)
    merge, pixels = vision.integer("spatial_merge_size", 2), vision.integer("window_size", 112)
    window = pixels // merge // patch
    if not window:
        raise vision.invalid("window_size", f"{merge * patch} pixels or more, those of a token")
    return VisionConfig(
        kind="qwen2_5",
        prefixes=QWEN[::-1],
        layers=vision.integer("depth", 32),
        hidden=vision.integer("hidden_size", 3584),
        intermediate=vision.integer("intermediate_size", 3420),
        heads=vision.integer("num_heads", 16),
        patch=patch,
        merge=merge,
        frames=_frames(vision),
        out=_out(fields, vision),
        eps=1e-6,
        theta=_theta(vision),
        window=window,
        whole=frozenset(_numbers(vision, "fullatt_block_indexes", (7, 15, 23, 31))),
    )


def _gemma3(fields: Fields, vision: Fields) -> VisionConfig:
    """SigLIP's, whose patches a projector averages: `merge` is the side of what it averages."""
    _of_type(vision, "siglip_vision_model")
    vision.only("hidden_act", GELU, GELU)
    vision.only("num_channels", CHANNELS, CHANNELS)
    image, patch = vision.integer("image_size", 224), vision.integer("patch_size", 16)
    tokens = fields.integer("mm_tokens_per_image", 256)
    side, made = image // patch, math.isqrt(tokens)
    if image % patch or made**2 != tokens or side % made:
        raise fields.invalid("mm_tokens_per_image", f"a square that divides {side} x {side}")
    return VisionConfig(
        kind="siglip",
        prefixes=GEMMA,
        layers=vision.integer("num_hidden_layers", 12),
        hidden=vision.integer("hidden_size", 768),
        intermediate=vision.integer("intermediate_size", 3072),
        heads=vision.integer("num_attention_heads", 12),
        patch=patch,
        merge=side // made,
        frames=1,
        out=_text(fields).integer("hidden_size", 2304),
        eps=vision.number("layer_norm_eps", 1e-6),
        positions=side,
        image=image,
        two_way=True,
    )


def _of_type(vision: Fields, *served: str) -> None:
    """Its model_type: the name of the whole model in older files."""
    found = vision.value("model_type", served[0])
    if found not in {name + end for name in served for end in ("", "_vision")}:
        raise vision.unsupported("model_type", f", {served[0]} is")


def _frames(vision: Fields) -> int:
    vision.only("in_channels", CHANNELS, CHANNELS)
    vision.only("temporal_patch_size", FRAMES, FRAMES)
    return FRAMES


def _theta(vision: Fields) -> float:
    rope = vision.section("rope_parameters")
    rope.only("rope_type", "axial", "axial")
    theta = rope.number("rope_theta", 10000.0)
    rope.refuse_unread()
    return theta


def _text(fields: Fields) -> Fields:
    """The text model's, which older files of Qwen2.5-VL have beside the section of the tower."""
    text = fields.section("text_config")
    return text if text.raw else Fields(fields.raw, fields.path)


def _out(fields: Fields, vision: Fields) -> int:
    out, hidden = vision.integer("out_hidden_size", 3584), _text(fields).value("hidden_size")
    if hidden is not None and hidden != out:
        raise vision.invalid("out_hidden_size", f"the text model's hidden_size, {hidden!r:.40}")
    return out


def _numbers(vision: Fields, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """Of layers."""
    found = vision.value(key, list(default))
    if not isinstance(found, list) or not all(type(each) is int and each >= 0 for each in found):
        raise vision.invalid(key, "a list of numbers of layers")
    return tuple(found)


READERS: dict[str, Callable[[Fields, Fields], VisionConfig]] = {
    "qwen3_vl": _qwen3,
    "qwen3_vl_moe": _qwen3,
    "qwen3_5": _qwen3,
    "qwen3_5_moe": _qwen3,
    "qwen2_5_vl": _qwen2_5,
    "gemma3": _gemma3,
}

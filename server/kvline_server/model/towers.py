"""Checkpoints of a text model beside towers, for images and video: their config.json has the text
model's in a section. The towers are left out. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from kvline_server.model.fields import Fields

SECTION = "text_config"


@dataclass(frozen=True, slots=True)
class Beside:
    """How such checkpoints of a family differ from those of its text model alone."""

    architecture: str
    model_type: str
    decoder: str  # before the names of its tensors
    towers: tuple[str, ...]  # before those of the others
    fields: tuple[str, ...]  # of the towers, and of tokens for what they see


QWEN = Beside(
    architecture="Qwen3_5ForConditionalGeneration",
    model_type="qwen3_5",
    decoder="model.language_model.",
    towers=("model.visual.",),
    fields=(
        "vision_config",
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
    ),
)


def text_of(fields: Fields, beside: Beside) -> Fields:
    """The text model's. The LM head is tied as the outer file says."""
    fields.only("model_type", beside.model_type, beside.model_type)
    fields.read.update(beside.fields)
    text = fields.section(SECTION)
    if not text.raw:
        raise fields.invalid(SECTION, "an object")
    tied = "tie_word_embeddings"
    outer = fields.value(tied)
    if outer is not None and text.raw.get(tied, outer) != outer:
        raise text.unsupported(tied, f" beside {tied} {outer!r:.40}")
    if outer is not None:
        text.raw = {**text.raw, tied: outer}
    return text

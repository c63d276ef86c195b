"""Checkpoints of a text model beside towers, for images and video: their config.json has the text
model's in a section. The towers are left out. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from kvline_server.model.fields import Fields

SECTION, TIED, END = "text_config", "tie_word_embeddings", "eos_token_id"


@dataclass(frozen=True, slots=True)
class Beside:
    """How such checkpoints of a family differ from those of its text model alone."""

    architecture: str
    model_type: str
    decoders: tuple[str, ...]  # before the names of its tensors: the first that a file has
    towers: tuple[str, ...]  # before those of the others
    fields: tuple[str, ...]  # of the towers, and of tokens for what they see
    flat: bool = False  # older files have the text model's fields beside them, in no section
    # The class of the text model has a default of its own, which is never asked for.
    unasked_tie: bool = False


QWEN = Beside(
    architecture="Qwen3_5ForConditionalGeneration",
    model_type="qwen3_5",
    decoders=("model.language_model.",),
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
    if not text.raw and beside.flat:
        outer = ("model_type", "architectures", *beside.fields)
        own = {key: value for key, value in fields.raw.items() if key not in outer}
        fields.read.update(own)
        return Fields(own, fields.path)
    if not text.raw:
        raise fields.invalid(SECTION, "an object")
    if fields.null(TIED):
        raise fields.invalid(TIED, "true or false")
    tied, end = fields.value(TIED), fields.raw.get(END)
    if tied is not None and text.raw.get(TIED, tied) != tied and not beside.unasked_tie:
        raise text.unsupported(TIED, f" beside {TIED} {tied!r:.40}")
    if tied is not None:
        text.raw = {**text.raw, TIED: tied}
    if end is not None and text.raw.get(END) is None:
        text.raw = {**text.raw, END: end}
    return text

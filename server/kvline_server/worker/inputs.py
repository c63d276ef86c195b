"""What the decoder reads of a step, on the device."""

from __future__ import annotations

import torch

from kvline_server.kernels.attention import SlotMapping
from kvline_server.model.decoder import Decoder
from kvline_server.worker.step import Step


def upload(
    decoder: Decoder, step: Step, last_tokens: torch.Tensor
) -> tuple[torch.Tensor, list[SlotMapping], torch.Tensor]:
    """Token ids [rows], of which those that the host has not read are in `last_tokens`, by request;
    where they are written in each group of layers; and the LM head's rows."""
    layout, kernels = step.layout, decoder.kernels
    ids, positions, pending, read, logits_indices, *slots = kernels.upload(
        step.tokens,
        layout.positions,
        step.pending_rows,
        step.pending_requests,
        step.logits_indices,
        *(group.slots for group in layout.groups),
    )
    if len(step.pending_rows):
        ids.index_copy_(0, pending, last_tokens[read])
    if layout.images is not None and decoder.axes is not None:
        images = layout.images
        rows, *of_each = kernels.upload(images.rows, images.times, images.heights, images.widths)
        placed = decoder.axes.place(torch.stack(of_each)).to(positions.dtype)
        positions = positions.index_copy(0, rows, placed)
    return ids, [SlotMapping(positions, each) for each in slots], logits_indices

"""The decoder: a model's blocks in the order of a step, cut where a mixer runs over sequences.

`forward` returns hidden states and never runs the LM head; `compute_logits` runs it on the rows
that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import pad

from kvline_server.kernels.attention import SlotMapping
from kvline_server.kernels.experts import Given
from kvline_server.kernels.fp8 import Weight
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.layout import Layout
from kvline_server.kernels.projection import Join, Norm, Operand
from kvline_server.kernels.recurrent import Sequences
from kvline_server.kernels.routing import Played
from kvline_server.memory.arena import UNSCALED, KVShape, Scales
from kvline_server.memory.groups import CacheGroup, Memory, order
from kvline_server.memory.state_shape import StateShape
from kvline_server.model.axes import Axes
from kvline_server.model.config import ModelConfig
from kvline_server.model.draft_head import Fed
from kvline_server.model.experts import Experts
from kvline_server.model.layer import FeedForward
from kvline_server.model.loader import Weights
from kvline_server.model.mixer import Made, Place, Projected
from kvline_server.model.rope import cos_sin
from kvline_server.model.sequence import Kind

Mappings = list[SlotMapping]  # of each group of layers that share pages


@dataclass(frozen=True, slots=True)
class LayerState:
    """A layer's state before its mixer runs."""

    residual: torch.Tensor  # [rows, hidden]
    projected: Projected
    encoded: torch.Tensor | None = None  # int64 [rows], of the rows that are added behind layers


def cache_groups(
    config: ModelConfig, longest: int, dtype: torch.dtype, scales: tuple[Scales, ...] = ()
) -> tuple[CacheGroup, ...]:
    """Of a rank's `config`, for sequences of up to `longest` tokens; `scales` of each attention.
    Their layers are indices of the model's mixers, of which the others have states, and the draft
    head's behind them."""
    heads, mixers = (config.kv_heads, config.head_dim, dtype), tuple(config.attentions)
    windows = config.every_window
    if config.draft_head:  # one layer more, without a window
        mixers, windows = (*mixers, len(config.mixers)), (*windows, 0)
        scales = (*scales, UNSCALED) if scales else ()
    return tuple(
        CacheGroup(
            window,
            tuple(mixers[i] for i in own),
            KVShape(len(own), *heads, tuple(scales[i] for i in own if scales)),
        )
        for window, own in order(windows, longest).items()
    )


def state_shapes(config: ModelConfig) -> tuple[StateShape, ...]:
    """Of the recurrent mixers of a rank's `config`, in order."""
    sizes = config.recurrent
    if sizes is None:
        return ()
    count = sum(block.kind is Kind.RECURRENT for block in config.mixers)
    return (StateShape(sizes.inputs, sizes.matrices),) * count


class Decoder:
    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        positions: int,
        kernels: Kernels,
        image_rows: int = 0,
        deepstack: int = 0,
    ) -> None:
        """`config` is the rank's (shard.local); sequences have up to `positions` tokens, and a step
        up to `image_rows` of images. What an encoder made of these stands behind the embeddings of
        the vocabulary, and what is added behind each of the first `deepstack` layers in
        `deepstack`."""
        self.config = config
        groups = cache_groups(config, positions, kernels.dtype)
        self.windows = tuple(group.window for group in groups)  # of each group of layers
        self.group_of = {layer: at for at, own in enumerate(groups) for layer in own.layers}
        self.weights = weights
        self.kernels = kernels
        scale = torch.tensor(config.embedding_scale, dtype=kernels.dtype)
        self.embedding_scale = float(scale)  # rounded, as in training
        self.ropes = _ropes(config, positions, kernels, image_rows)
        self.axes: Axes | None = None
        if image_rows and config.rope.axes:
            (table,) = {id(table): table for table in self.ropes.values()}.values()
            self.axes = Axes(table, config.rope.axes, positions)
        # [layers, 1 + rows, hidden], of which the first is added to the rows of text.
        encoded = len(weights.embedding) - config.vocabulary
        self.deepstack = weights.embedding.new_zeros((deepstack, 1 + encoded, config.hidden))

    def step(
        self,
        token_ids: torch.Tensor,
        mappings: Mappings,
        memories: Sequence[Memory],
        layout: Layout,
        logits_indices: torch.Tensor,
        played: Played = Played.NOTHING,
    ) -> torch.Tensor:
        """Plans and runs `forward`, padded to a row count of the kernels. Padding rows write to the
        dummy page, and no expert gets them. token_ids [rows], logits_indices [n] -> [n, hidden]"""
        rows = self.kernels.gemms.padded(len(token_ids))
        positions = _pad(mappings[0].positions, rows)
        padded = [SlotMapping(positions, _pad(each.slots, rows)) for each in mappings]
        given = Given(len(token_ids), played)
        plans = self.plan(layout)
        return self.forward(_pad(token_ids, rows), padded, memories, plans, logits_indices, given)

    def plan(self, layout: Layout) -> list[Any]:
        """Of a step: of attention in each group of layers, then of the recurrent layers, if any."""
        plans = [
            self.kernels.attention.plan(layout, group, window)
            for group, window in enumerate(self.windows)
        ]
        if self.config.recurrent is not None:
            held = layout.states
            assert held is not None
            rows = layout.row_starts, held.slots, held.sources, held.snapshots, held.each
            plans.append(self.kernels.recurrent.plan(Sequences(*rows)))
        return plans

    def forward(
        self,
        token_ids: torch.Tensor,
        mappings: Mappings,
        memories: Sequence[Memory],
        plans: list[Any],
        logits_indices: torch.Tensor,
        given: Given | None = None,
    ) -> torch.Tensor:
        """Hidden states after the last norm, for the LM head's rows only: after the last mixer ran,
        rows no longer depend on each other. Rows that are not `given` are padding; where
        that is on the device, logits_indices are all of them, in order. `memories` are those of
        each mixer. token_ids [rows], logits_indices [n] -> [n, hidden]

        The code between two mixers' runs is one graph segment (worker/graphs/segments.py)."""
        given = given or Given(len(token_ids))
        state = self.start(token_ids, mappings, memories[0], given)
        for index, memory in enumerate(memories):
            made = self.run(index, state.projected, memory, plans)
            if index + 1 < len(memories):
                next = memories[index + 1]
                state = self.between(index, made, state, mappings, next, given)
        rows = _pad(logits_indices, self.kernels.gemms.padded(len(logits_indices)))
        last = given if given.on_device is not None else replace(given, rows=len(logits_indices))
        picked = LayerState(
            state.residual[rows],
            state.projected.picked(rows),
            None if state.encoded is None else state.encoded[rows],
        )
        return self.finish(made[rows], picked, last)[: len(logits_indices)]

    def warm_up(self, rows: int, memories: Sequence[Memory]) -> None:
        """Runs every GEMM shape of a step once at this row count, in the first layers alone that
        have it."""
        device, layers = self.kernels.device, self.weights.layers
        given = Given(rows)
        nothing = torch.zeros(rows, dtype=torch.int64, device=device)
        mappings = [SlotMapping(nothing, nothing)] * len(self.windows)
        residual = self.start(nothing, mappings, memories[0], given).residual
        for index in self.segments():
            mixer = layers[index - 1].mixer
            projected = mixer.split([residual.new_zeros((rows, width)) for width in mixer.widths])
            made, state = residual.new_zeros((rows, mixer.width)), LayerState(residual, projected)
            if index < len(layers):
                self.between(index - 1, made, state, mappings, memories[index], given)
            else:
                self.finish(made, state, given)

    def segments(self) -> list[int]:
        """Those behind mixers, of which each has other GEMMs than all before it; and the last one.
        Segment i is behind mixer i - 1, before mixer i."""
        kinds = [layer.kind for layer in self.weights.layers]
        first: dict[Any, int] = {}
        for index in range(1, len(kinds)):
            first.setdefault((kinds[index - 1], kinds[index][0]), index)
        return [*first.values(), len(kinds)]

    def start(
        self,
        token_ids: torch.Tensor,
        mappings: Mappings,
        memory: Memory,
        given: Given,
        into: Made | None = None,
    ) -> LayerState:
        """From token ids to the first mixer's first half, which is written to `into` if given."""
        residual = self._embedded(token_ids)
        blocks, mixer = self.weights.first, self.weights.layers[0].mixer
        before = blocks[0].before if blocks else mixer.before
        x = Operand(residual if before is None else self.kernels.rows.rms_norm(residual, before))
        x = self._through(blocks, x, residual, mixer.before, given)
        place = self._place(0, mappings)
        projected = mixer.project(self.kernels, x, memory, place, into)
        return LayerState(residual, projected, self._encoded(token_ids))

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[rows] -> [rows, hidden]"""
        made = self.weights.embedding[token_ids]
        if self.embedding_scale != 1.0:
            made *= self._scales(token_ids)
        return made

    def _scales(self, token_ids: torch.Tensor) -> torch.Tensor | float:
        """Of embeddings, which those of images are not multiplied by. [rows, 1]"""
        vocabulary = self.config.vocabulary
        if len(self.weights.embedding) == vocabulary:
            return self.embedding_scale
        return torch.where(token_ids < vocabulary, self.embedding_scale, 1.0).unsqueeze(1)

    def _encoded(self, token_ids: torch.Tensor) -> torch.Tensor | None:
        """Which of the encoder's rows are added to each row behind the first layers."""
        if not len(self.deepstack):
            return None
        return (token_ids - (self.config.vocabulary - 1)).clamp_(min=0)

    def run(
        self,
        index: int,
        projected: Projected,
        memory: Memory,
        plans: list[Any],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Mixer `index` over the step's sequences. -> [rows, width]"""
        plan = plans[self.group_of.get(index, len(self.windows))]
        mixer = self.weights.layers[index].mixer
        return mixer.run(self.kernels, projected.inputs, memory, plan, out)

    def between(
        self,
        index: int,
        made: torch.Tensor,
        state: LayerState,
        mappings: Mappings,
        memory: Memory,
        given: Given,
        into: Made | None = None,
    ) -> LayerState:
        """From what mixer `index` made to the first half of the next one. Overwrites the residual:
        a captured segment finds it where it was."""
        mixer = self.weights.layers[index + 1].mixer
        x = self._after(index, made, state, mixer.before, given)
        place = self._place(index + 1, mappings)
        projected = mixer.project(self.kernels, x, memory, place, into)
        return LayerState(state.residual, projected, state.encoded)

    def finish(self, made: torch.Tensor, state: LayerState, given: Given) -> torch.Tensor:
        """From what the last mixer made to hidden states."""
        last = len(self.weights.layers) - 1
        x = self._after(last, made, state, self.weights.norm, given)
        return self.kernels.gemms.settle(x)

    def _place(self, index: int, mappings: Mappings) -> Place:
        """A recurrence knows no positions, whatever they are."""
        return Place(mappings[self.group_of.get(index, 0)], self.ropes.get(index))

    def _after(
        self, index: int, made: torch.Tensor, state: LayerState, norm: Norm | None, given: Given
    ) -> Operand:
        """From what a mixer made to the input of what follows its layer, whose norm is given."""
        layer = self.weights.layers[index]
        mixer, blocks = layer.mixer, layer.blocks
        added = None if index >= len(self.deepstack) else state.encoded
        after = norm if added is None else None  # else it follows what is added
        before = blocks[0].before if blocks else after
        then = Join(state.residual, mixer.after, before, self.config.residual_scale)
        x = mixer.finish(self.kernels, made, state.projected.gate, then)
        x = self._through(blocks, x, state.residual, after, given)
        if added is None:
            return x
        residual = state.residual.add_(self.deepstack[index][added])
        return Operand(residual if norm is None else self.kernels.rows.rms_norm(residual, norm))

    def _through(
        self,
        blocks: list[FeedForward],
        x: Operand,
        residual: torch.Tensor,
        norm: Norm | None,
        given: Given,
    ) -> Operand:
        """Blocks one after the other, each with the norm of what follows it."""
        for at, block in enumerate(blocks):
            before = norm if block is blocks[-1] else blocks[at + 1].before
            x = block(self.kernels, x, residual, before, given)
        return x

    def feed_drafts(
        self, token_ids: torch.Tensor, before: torch.Tensor, mappings: Mappings, memory: Memory
    ) -> Fed:
        """The first half of the draft head, whose entries of tokens are written to its memory.
        `before` are the hidden states of the tokens before. token_ids [rows], [rows, hidden]"""
        assert self.weights.drafts is not None
        given = self._embedded(token_ids), before, memory
        place = self._place(len(self.weights.layers), mappings)
        return self.weights.drafts.feed(self.kernels, *given, place)

    def draft(
        self,
        token_ids: torch.Tensor,
        before: torch.Tensor,
        mappings: Mappings,
        memory: Memory,
        layout: Layout,
    ) -> torch.Tensor:
        """As feed_drafts, and the second half: for compute_logits, of the token behind the next
        one. -> [rows, hidden]"""
        assert self.weights.drafts is not None
        fed = self.feed_drafts(token_ids, before, mappings, memory)
        group = self.group_of[len(self.weights.layers)]
        plan = self.kernels.attention.plan(layout, group, self.windows[group])
        return self.weights.drafts.run(self.kernels, fed, memory, plan, Given(len(token_ids)))

    def gemm_weights(self) -> list[list[Weight]]:
        """One list per GEMM of a layer, with its weight of each layer that has it."""
        every: dict[Any, list[Weight]] = {}
        for layer in self.weights.layers:
            for block in (layer.mixer, *layer.blocks):
                for at, one in enumerate(block.projections):
                    kind = type(block), at, tuple(one.weight.shape)
                    every.setdefault(kind, []).append(one.weight)
        return list(every.values())

    def experts(self) -> list[Experts]:
        """All mixtures, in order; none of a dense model."""
        return self.weights.experts()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the rows given, of this rank's tokens. [rows, hidden] -> [rows, tokens]"""
        logits = self.kernels.gemms.logits(hidden, self.weights.head)
        divisor = self.config.logits_divisor
        return logits if divisor == 1.0 else logits.div_(divisor)


def _ropes(
    config: ModelConfig, positions: int, kernels: Kernels, image_rows: int
) -> dict[int, torch.Tensor]:
    """The rotary table of each attention, by the mixer that it is, and of the draft head behind
    all of them; rows of images behind those of all positions."""
    ropes = {at: config.rope_of(layer) for at, layer in config.attentions.items()}
    if config.draft_head:
        ropes[len(config.mixers)] = config.rope
    tables = {}
    for rope in set(ropes.values() if config.rotates else ()):
        both = cos_sin(rope, config.head_dim, positions)
        room = (0, 0, 0, image_rows if rope.axes else 0)
        tables[rope] = kernels.attention.rope_table(*(pad(each, room) for each in both))
    return {at: tables[rope] for at, rope in ropes.items() if config.rotates}


def _pad(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Pads with zeros at the end. [n] -> [rows]"""
    missing = rows - len(values)
    return torch.cat((values, values.new_zeros(missing))) if missing else values

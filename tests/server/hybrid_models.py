"""Tiny hybrids, made by the library whose answers are the reference, and what runs them: pages and
states of a few sequences, without an engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engines import mapped
from families import SMALL, WIDE

from kvline_server.kernels.attention import SlotMapping
from kvline_server.kernels.layout import GroupLayout, Layout, StateLayout
from kvline_server.kernels.recurrent import DUMMY
from kvline_server.memory.pages import PAGE_SIZE, pages_for
from kvline_server.memory.state_shape import States
from kvline_server.model.decoder import Decoder

LONGEST = 256
LINEAR, FULL = "linear_attention", "full_attention"
# More value than key heads; a quarter and more of a head is rotated.
QWEN: dict[str, Any] = WIDE | {
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, FULL, LINEAR, LINEAR],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5Text", QWEN),
}


def build(name: str) -> torch.nn.Module:
    """A model of transformers, in float32: what a state holds shows long after, and no norm is
    without effect."""
    import transformers

    torch.manual_seed(7)
    architecture, extra = HYBRIDS[name]
    config = getattr(transformers, f"{architecture}Config")(**(SMALL | extra))
    kind = getattr(transformers, f"{architecture.removesuffix('Text')}ForCausalLM")
    made: torch.nn.Module = kind(config).float().eval()
    with torch.no_grad():
        for key, each in made.named_parameters():
            _spread(key, each)
    return made


def _spread(name: str, parameter: torch.Tensor) -> None:
    """The default decays forget within a few tokens."""
    kind = name.rpartition(".")[2]
    if kind in ("A_log", "dt_bias"):
        count = len(parameter)
        parameter.copy_(torch.linspace(-3, 1, count)[torch.randperm(count)])
    elif parameter.dim() == 1:
        parameter.add_(torch.randn(parameter.shape) * 0.4)
    else:
        parameter.normal_(0, 0.5 if kind == "weight" and "conv1d" in name else 0.2)


def logits_of(model: torch.nn.Module, tokens: Sequence[int]) -> torch.Tensor:
    """Of one whole prompt. -> [tokens, vocabulary]"""
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return found


@dataclass
class Work:
    """A sequence's next tokens, in one step."""

    sequence: int
    tokens: Sequence[int]


class Runner:
    """A decoder's steps, for `count` sequences of up to LONGEST tokens."""

    def __init__(self, made: Decoder, count: int = 8) -> None:
        self.decoder, self.done = made, [0] * count
        self.held = pages_for(LONGEST)
        self.memories = mapped(made, LONGEST, 1 + count * self.held, slots=1 + count).layers()
        for memory in self.memories:
            if isinstance(memory, States):  # no slot is read before it was written
                memory.inputs.fill_(math.nan)
                memory.matrices.fill_(math.nan)

    def layout(self, work: Sequence[Work]) -> Layout:
        """Those that go on by one token are decodes."""
        counts = np.array([len(each.tokens) for each in work])
        before = np.array([self.done[each.sequence] for each in work])
        own = np.array([each.sequence for each in work])
        lengths = before + counts
        pages = [
            1 + s * self.held + np.arange(pages_for(n)) for s, n in zip(own, lengths, strict=True)
        ]
        positions = np.concatenate([np.arange(a, b) for a, b in zip(before, lengths, strict=True)])
        whose = np.repeat(own, counts)
        group = GroupLayout(
            lengths=lengths.astype(np.int32),
            page_starts=np.cumsum([0, *map(len, pages)]).astype(np.int32),
            pages=np.concatenate(pages).astype(np.int32),
            slots=(1 + whose * self.held) * PAGE_SIZE + positions,
            cleared=np.zeros(0, np.int64),
        )
        return Layout(
            decodes=int(((counts == 1) & (before > 0)).sum()),
            row_starts=np.cumsum([0, *counts]).astype(np.int32),
            positions=positions.astype(np.int32),
            groups=(group,),
            states=StateLayout(1 + own, np.where(before > 0, 1 + own, DUMMY)),
        )

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> list[torch.Tensor]:
        """Logits of every row, by the order of the work, in which decodes are first."""
        layout = self.layout(work)
        ids = torch.tensor([token for each in work for token in each.tokens])
        mapping = SlotMapping(
            torch.from_numpy(layout.positions), torch.from_numpy(layout.groups[0].slots)
        )
        every = torch.arange(len(ids))
        hidden = self.decoder.step(ids, [mapping], self.memories, layout, every)
        for each in work:
            self.done[each.sequence] += len(each.tokens)
        logits = self.decoder.compute_logits(hidden)
        return list(torch.split(logits, [len(each.tokens) for each in work]))


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder

"""Tiny hybrids, made by the library whose answers are the reference, and what runs them: pages and
states of a few sequences, without an engine."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engines import mapped
from families import SMALL, WIDE
from waiting import limit

from kvline_server.kernels.attention import SlotMapping
from kvline_server.kernels.group import Alone, Group
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
MOE: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
}
NEMOTRON: dict[str, Any] = WIDE | {
    "layers_block_type": [LINEAR, "mlp", LINEAR, FULL, "moe", LINEAR, "moe"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 20,
    "chunk_size": 16,
    "time_step_min": 1e-9,  # which transformers clamps by in prompts alone
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 32,
}
GRANITE: dict[str, Any] = WIDE | {
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, FULL, LINEAR, LINEAR],
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 20,
    "mamba_chunk_size": 32,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 1.7,
    "shared_intermediate_size": 40,
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5Text", QWEN),
    "qwen3.5-moe": ("Qwen3_5MoeText", QWEN | MOE),
    "qwen3-next": ("Qwen3Next", QWEN | MOE),
    "nemotron-h": ("NemotronH", NEMOTRON),
    # Which ends on a mixer, and begins with another block.
    "nemotron-h-latent": (
        "NemotronH",
        NEMOTRON
        | {"layers_block_type": ["moe", FULL, "moe", "mlp", LINEAR], "moe_latent_size": 16},
    ),
    "nemotron-h-dense": (
        "NemotronH",
        NEMOTRON | {"layers_block_type": [LINEAR, "mlp", FULL, "mlp", "mlp", LINEAR]},
    ),
    "granite": ("GraniteMoeHybrid", GRANITE | {"num_local_experts": 0}),
    "granite-moe": (
        "GraniteMoeHybrid",
        GRANITE
        | {"num_local_experts": 5, "num_experts_per_tok": 2, "position_embedding_type": "rope"},
    ),
}


def build(name: str, **more: Any) -> torch.nn.Module:
    """A model of transformers, in float32: what a state holds shows long after, and no norm is
    without effect."""
    import transformers

    torch.manual_seed(7)
    architecture, extra = HYBRIDS[name]
    config = getattr(transformers, f"{architecture}Config")(**(SMALL | extra | more))
    kind = getattr(transformers, f"{architecture.removesuffix('Text')}ForCausalLM")
    made: torch.nn.Module = kind(config).float().eval()
    with torch.no_grad():
        for key, each in made.named_parameters():
            spread(key, each)
        for key, buffer in made.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
    return made


def spread(name: str, parameter: torch.Tensor) -> None:
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

    def inputs(self, work: Sequence[Work]) -> tuple[Layout, torch.Tensor, SlotMapping]:
        """With the token ids of all rows."""
        layout = self.layout(work)
        ids = torch.tensor([token for each in work for token in each.tokens])
        slots = torch.from_numpy(layout.groups[0].slots)
        return layout, ids, SlotMapping(torch.from_numpy(layout.positions), slots)

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> list[torch.Tensor]:
        """Logits of every row, by the order of the work, in which decodes are first."""
        layout, ids, mapping = self.inputs(work)
        every = torch.arange(len(ids))
        hidden = self.decoder.step(ids, [mapping], self.memories, layout, every)
        for each in work:
            self.done[each.sequence] += len(each.tokens)
        logits = self.decoder.compute_logits(hidden)
        return list(torch.split(logits, [len(each.tokens) for each in work]))


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


class Pair(Alone):
    """Two ranks, each a thread."""

    ranks = 2

    def __init__(self, rank: int, met: threading.Barrier, given: dict[int, torch.Tensor]) -> None:
        self.rank, self.met, self.given = rank, met, given

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.given[self.rank] = x
        self.met.wait()
        made = self.given[0] + self.given[1]
        self.met.wait()
        return made


def on_two_ranks(work: Callable[[Group], torch.Tensor]) -> list[torch.Tensor]:
    """What each of them makes."""
    met, given = threading.Barrier(2, timeout=limit(30)), dict[int, torch.Tensor]()
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(work, [Pair(rank, met, given) for rank in range(2)]))

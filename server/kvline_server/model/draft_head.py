"""A draft head of the kind that Qwen3.5 and Qwen3-Next have (multi-token prediction): one decoder
layer more, which predicts the token behind the next one.

It reads a token's embedding and the hidden state of the token before it, behind the model's last
norm; for a second draft that of its own last norm stands in for the model's. What attention keeps
of both is the entry of the token, at its position, so that an entry depends on no later token, as
the keys of pages demand (memory/pages.py). Where the hidden state before is not known, as before
the first token and behind a hit of the prefix cache, it is zeros. It shares the model's embedding
and LM head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from kvline_server.errors import ModelInvalid, ModelUnsupported
from kvline_server.kernels.experts import Given
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.projection import STORE, Join, Operand
from kvline_server.memory.groups import Memory
from kvline_server.model.attention import Attention
from kvline_server.model.blocks import norm
from kvline_server.model.config import ModelConfig
from kvline_server.model.layer import FEED_FORWARDS, Layer
from kvline_server.model.linear import Rows, Tensors, TensorSource, projection
from kvline_server.model.mixer import Place, Projected


def with_head(config: ModelConfig, source: TensorSource) -> ModelConfig:
    """The model with its draft head. The tensors decide: config.json may have a field of one that
    was left out of the files. Raises ModelUnsupported where no head of this architecture is run,
    ModelInvalid where the files have none."""
    if not config.drafts:
        raise ModelUnsupported(
            f"no draft head of {config.architecture} is run: those of Qwen3.5 and Qwen3-Next are"
        )
    if not source.count(config.drafts):
        raise ModelInvalid(
            f"no safetensors file has a tensor {config.drafts}*: this checkpoint is without its "
            "draft head, whatever config.json says; take one that has it"
        )
    return replace(config, draft_head=True)


@dataclass(frozen=True, slots=True)
class Fed:
    """Between the two halves of its layer."""

    residual: torch.Tensor  # [rows, hidden]
    projected: Projected


class DraftHead:
    def __init__(self, tensors: Tensors, config: ModelConfig) -> None:
        c, at = config, config.drafts
        self.embedding_norm = norm(tensors, c, at + "pre_fc_norm_embedding", c.hidden)
        self.hidden_norm = norm(tensors, c, at + "pre_fc_norm_hidden", c.hidden)
        every = [Rows(at + "fc", range(c.hidden), c.hidden)]  # on each rank
        self.join = projection(tensors, every, 2 * c.hidden)
        own = f"{at}layers.0."
        blocks = [FEED_FORWARDS[c.blocks[-1].kind](tensors, c, own)]
        self.layer = Layer(Attention(tensors, c, own), blocks)
        self.norm = norm(tensors, c, at + "norm", c.hidden)
        self.scale = c.residual_scale

    def feed(
        self,
        kernels: Kernels,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        memory: Memory,
        place: Place,
    ) -> Fed:
        """Writes the entries of tokens: all that later drafts need of them. `embedded` are theirs,
        `hidden` the states of the tokens before; both [rows, hidden]"""
        both = (embedded, self.embedding_norm), (hidden, self.hidden_norm)
        pair = torch.cat([kernels.rows.rms_norm(x, own) for x, own in both], dim=1)
        residual = kernels.gemms.project(Operand(pair), self.join, STORE).rows
        mixer = self.layer.mixer
        x = residual if mixer.before is None else kernels.rows.rms_norm(residual, mixer.before)
        return Fed(residual, mixer.project(kernels, Operand(x), memory, place))

    def run(
        self, kernels: Kernels, fed: Fed, memory: Memory, plan: Any, given: Given
    ) -> torch.Tensor:
        """Of rows whose entries were written, with attention's plan of the step: what the LM head
        predicts drafts from. -> [rows, hidden]"""
        mixer, (block,) = self.layer.mixer, self.layer.blocks
        made = mixer.run(kernels, fed.projected.inputs, memory, plan)
        then = Join(fed.residual, mixer.after, block.before, self.scale)
        x = mixer.finish(kernels, made, fed.projected.gate, then)
        return kernels.gemms.settle(block(kernels, x, fed.residual, self.norm, given))

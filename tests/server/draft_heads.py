"""Draft heads of tiny hybrids, composed from the layers of the library whose answers are the
reference: it ignores the heads' tensors itself."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hybrid_models import FULL, build, save, spread
from safetensors.torch import load_file, save_file

HEADED = ("qwen3.5", "qwen3.5-moe", "qwen3-next")


class Head(torch.nn.Module):
    """With the names that files have behind mtp."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        config = copy.deepcopy(model.config)
        config.layer_types = [FULL] * config.num_hidden_layers
        made = sys.modules[type(model).__module__]
        prefix = type(model).__name__.removesuffix("ForCausalLM")
        self._mask, self.config, self.model = made.create_causal_mask, config, [model]
        norms = getattr(made, f"{prefix}RMSNorm")
        width = config.hidden_size
        self.fc = torch.nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            norms(width, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.layers = torch.nn.ModuleList([getattr(made, f"{prefix}DecoderLayer")(config, 0)])

    def forward(self, tokens: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Hidden states behind its last norm, of whole sequences. [tokens], [tokens, hidden]"""
        (model,) = self.model
        embedded = model.model.embed_tokens(tokens)
        both = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(before)
        x = self.fc(torch.cat(both, dim=-1)).unsqueeze(0)
        positions = torch.arange(len(tokens)).unsqueeze(0)
        mask = self._mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
        )
        turned = model.model.rotary_emb(x, positions)
        made = self.layers[0](x, turned, attention_mask=mask, position_ids=positions)
        found: torch.Tensor = self.norm(made)[0]
        return found


class Reference:
    """A model with a head."""

    def __init__(self, name: str, **more: Any) -> None:
        self.name = name
        self.model: Any = build(name, **more)
        self.head = Head(self.model).float().eval()
        with torch.no_grad():
            for key, each in self.head.named_parameters():
                spread(key, each)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Of the head, behind each token of a whole prompt. -> [tokens, vocabulary]"""
        return self._logits(*self._fed(tokens))

    @torch.inference_mode()
    def behind(self, tokens: Sequence[int], drafts: Sequence[int]) -> torch.Tensor:
        """Of each draft behind all tokens: it goes on from the head's own hidden state, and from
        the draft before. -> logits [drafts, vocabulary]"""
        ids, before = self._fed(tokens)
        found: list[torch.Tensor] = []
        for draft in drafts:
            hidden = self.head(ids, before)
            found.append(self._lm_head(hidden[-1]))
            ids = torch.cat((ids, torch.tensor([draft])))
            before = torch.cat((before, hidden[-1:]))
        return torch.stack(found)

    def save(self, folder: Path) -> Path:
        """Experts one by one, as in published files of Qwen3-Next, or together."""
        save(self.model, folder)
        file = folder / "model.safetensors"
        own = {f"mtp.{name}": each.clone() for name, each in self.head.state_dict().items()}
        if self.name == "qwen3-next":
            own = dict(_apart(own))
        save_file(load_file(file) | own, file, metadata={"format": "pt"})
        return folder

    def _fed(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor(list(tokens))
        hidden = self.model.model(ids.unsqueeze(0)).last_hidden_state[0]
        return ids, torch.cat((torch.zeros(1, hidden.shape[1]), hidden[:-1]))

    def _logits(self, ids: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return self._lm_head(self.head(ids, before))

    def _lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.model.lm_head(hidden)
        return made


def _apart(tensors: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    found = []
    for name, each in tensors.items():
        at, _, kind = name.rpartition(".")
        if not at.endswith(".experts"):
            found.append((name, each))
            continue
        for expert, own in enumerate(each):
            names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            for part, rows in zip(names, own.chunk(len(names)), strict=True):
                found.append((f"{at}.{expert}.{part}.weight", rows.contiguous()))
    return found

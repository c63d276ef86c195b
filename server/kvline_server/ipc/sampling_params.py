"""How a request is sampled, as it travels between the processes. Imports no numpy: the parent reads
messages without it."""

from __future__ import annotations

import msgspec

MAX_BIASES = 300  # of a request's logit_bias


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """Reasoning ends, by the model's own mark, after so many tokens of it."""

    tokens: int
    end: int  # the mark's token
    begin: int | None = None  # the token behind which reasoning begins; None: it has begun


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """Validated by the HTTP process; the defaults turn a feature off."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives per output token; None: no logprobs
    prompt_logprobs: int | None = None  # alternatives per prompt token; None: no logprobs
    cache_salt: str = ""  # only requests with the same one share pages of the prefix cache
    grammar: bytes = b""  # key of the compiled one that the answer follows; empty: none
    thinking: ThinkingBudget | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether the logits of tokens so far are changed."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def has_masks(self) -> bool:
        """Whether only some tokens may be sampled, by those so far."""
        return bool(self.grammar) or self.thinking is not None

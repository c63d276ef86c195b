"""What grammars of requests may take: bytes, time and counts (docs/decisions/057)."""

from __future__ import annotations

from dataclasses import dataclass

from kvline_contract.launch import Device
from kvline_server.options.clients import LARGE_HOST

MIB = 1 << 20

MAX_BYTES = 256 << 10  # of a grammar's text
COMPILE_SECONDS = 1.5  # of CPU time, for a grammar and its first mask
MASK_SECONDS = 0.05  # of CPU time, for a mask: every request waits for the slowest one of a step
FILL_SECONDS = 0.8  # for all masks of a step, after which sequences without one end
STEP_SECONDS = 1.0  # that an engine waits for the masks of a step
HTTP_SECONDS = 10.0  # that a request waits for its grammar, behind those before it
STATE_BYTES = 1 << 10  # of a state of a lexer
MOST_STATES = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarBounds:
    """Of the processes that try grammars and fill masks; bytes are those beside the tokenizer,
    which all of them share."""

    memory: int = 1024 * MIB  # of compiled grammars and matchers
    trial: int = 256 * MIB  # of a grammar while it is tried
    trials: int = 4  # grammars that are tried at once
    threads: int = 8  # that fill masks

    @property
    def kept(self) -> int:
        """Bytes up to which grammars are kept. The rest is for one that is compiled, and for what
        grows while masks are filled."""
        return self.memory - self.trial

    @property
    def most(self) -> int:
        """Bytes from which on sequences end for others."""
        return self.memory - self.trial // 2

    @property
    def lexer_states(self) -> int:
        """Of a grammar: one alone may take half of what is kept."""
        return min(MOST_STATES, self.kept // 2 // STATE_BYTES)

    @property
    def reserved(self) -> int:
        return self.memory + self.trials * self.trial


# In a small container; on the CPU these bytes are reserved beside the KV cache.
SMALL = GrammarBounds(memory=96 * MIB, trial=32 * MIB, trials=1, threads=2)


def grammar_bounds(device: Device, memory: int | None) -> GrammarBounds:
    """In a container of so many bytes; None: no limit is known."""
    if device is Device.CPU or (memory is not None and memory < LARGE_HOST):
        return SMALL
    return GrammarBounds()

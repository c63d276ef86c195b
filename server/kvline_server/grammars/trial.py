"""Tries a grammar in a process of its own, which the kernel ends where it takes too long or too
much: then nothing is left of it. Forked from a process that has opened the tokenizer."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass

from kvline_server.errors import InvalidFrame
from kvline_server.grammars import heap, messages
from kvline_server.grammars.children import forked
from kvline_server.grammars.compiled import GrammarRefused, compiled, explore
from kvline_server.grammars.grammar import Grammar
from kvline_server.grammars.messages import Tried, encode
from kvline_server.grammars.vocabulary import Vocabulary
from kvline_server.ipc.frames import Received
from kvline_server.options.grammars import COMPILE_SECONDS, MIB, GrammarBounds

PATIENCE = 8.0  # seconds by the clock, for COMPILE_SECONDS of CPU time


@dataclass(slots=True)
class Trial:
    """One under way."""

    id: int
    pid: int
    pipe: int  # from which its answer is read
    began: float
    received: bytearray
    is_answered: bool = False

    @property
    def late(self) -> bool:
        return time.monotonic() - self.began > PATIENCE

    def read(self) -> bool:
        """What is there. -> whether it has ended"""
        data = os.read(self.pipe, 1 << 16)
        self.received += data
        return not data

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def answer(self) -> Tried | None:
        """Once, when it is there: the process gives back its memory before it ends."""
        if self.is_answered:
            return None
        received = Received()
        with suppress(InvalidFrame):
            received.add(bytes(self.received))
            if (body := received.take()) is not None:
                message = messages.decode(body)
                self.is_answered = isinstance(message, Tried)
                return message if isinstance(message, Tried) else None
        return None

    def end(self, bounds: GrammarBounds) -> Tried | None:
        """-> why it has not answered, if it has not"""
        os.close(self.pipe)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self.is_answered:
            return None
        if self.late:  # a busy node is no fault of a grammar
            return Tried(self.id, f"it was not compiled within {PATIENCE:g} s", later=True)
        if code == -signal.SIGKILL:  # by others
            return Tried(self.id, "the process that compiled it was killed", later=True)
        return Tried(self.id, _why(code, bounds))


def start(id: int, grammar: Grammar, vocabulary: Vocabulary, bounds: GrammarBounds) -> Trial:
    """Raises OSError where no process can be started."""
    pipe, answer = os.pipe()
    try:
        pid = forked(lambda: _run(id, grammar, vocabulary, bounds, answer), keep=(answer,))
    except OSError:
        os.close(pipe)
        raise
    finally:
        os.close(answer)
    return Trial(id, pid, pipe, time.monotonic(), bytearray())


def _run(
    id: int, grammar: Grammar, vocabulary: Vocabulary, bounds: GrammarBounds, answer: int
) -> None:
    """The process: its answer goes to `answer`."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # Rust writes about memory that it does not get
        os.dup2(null, stream)
    heap.limit(bounds.trial)
    signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)
    before = heap.used()
    try:
        matcher = compiled(grammar, vocabulary, bounds.lexer_states)
        tried = Tried(id, size=heap.used() - before)
        explore(matcher, vocabulary)
    except GrammarRefused as error:
        tried = Tried(id, str(error) or "llguidance does not say why")
    except MemoryError:
        tried = Tried(id, _too_large(bounds))
    signal.setitimer(signal.ITIMER_PROF, 0)
    os.write(answer, encode(tried))


def _why(code: int, bounds: GrammarBounds) -> str:
    if code == -signal.SIGPROF:
        return f"it takes more than {COMPILE_SECONDS:g} s to compile"
    if code == -signal.SIGABRT:  # Rust without memory
        return _too_large(bounds)
    return f"it ended the process that compiled it ({code})"


def _too_large(bounds: GrammarBounds) -> str:
    return f"it takes more than {bounds.trial // MIB} MiB to compile"

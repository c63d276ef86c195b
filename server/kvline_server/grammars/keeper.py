"""Keeps compiled grammars for the requests that use them, within the memory that they may take.

A grammar is tried in a process of its own first (trial.py), so only one that is known to compile,
and to take little, is compiled here: on a thread, while masks are filled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvline_server.grammars import heap
from kvline_server.grammars.cache import Cache, Entry, Lexer
from kvline_server.grammars.compiled import GrammarRefused, compiled
from kvline_server.grammars.grammar import Grammar
from kvline_server.grammars.messages import Advance, Begin, Filled, Tried
from kvline_server.grammars.sequences import Rows, Sequences
from kvline_server.grammars.vocabulary import Vocabulary
from kvline_server.options.grammars import GrammarBounds

FULL = "the grammars of running requests take all the memory that grammars may take"


class Later(Exception):
    """A grammar cannot be served now."""


Try = Callable[[Grammar], Awaitable[Tried]]  # raises Later


class Keeper:
    def __init__(self, vocabulary: Vocabulary, bounds: GrammarBounds, tried: Try) -> None:
        self.vocabulary, self.bounds, self.tried = vocabulary, bounds, tried
        self.cache = Cache()
        self.sequences = Sequences(vocabulary, bounds)
        self._compiling: dict[bytes, asyncio.Task[Entry]] = {}
        self._engine: object = None
        self._growing: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1)
        self._thread.submit(int).result()  # starts it: its stack is not what grammars take
        self._growth = heap.Growth()

    async def pin(self, grammar: Grammar) -> Entry:
        """A compiled grammar, which is kept until it is unpinned. Raises GrammarRefused, Later."""
        key = grammar.key()
        if reason := self.cache.why_refused(key):
            raise GrammarRefused(reason)
        entry = self.cache.get(key)
        if entry is None:
            task = self._compiling.get(key)
            if task is None:
                task = asyncio.create_task(self._compile(key, grammar))
                self._compiling[key] = task
                task.add_done_callback(lambda done: self._compiled(key, done))
            entry = await asyncio.shield(task)
        entry.pins += 1
        return entry

    def _compiled(self, key: bytes, done: asyncio.Task[Entry]) -> None:
        del self._compiling[key]
        done.exception()  # nobody may be left who waits for it

    async def _compile(self, key: bytes, grammar: Grammar) -> Entry:
        tried = await self.tried(grammar)
        if tried.reason:
            self.cache.refuse(key, tried.reason)
            raise GrammarRefused(tried.reason)
        if not self._has_room(tried.size):
            raise Later(FULL)
        entry = Entry(key, grammar, tried.size, [await self._lexer(grammar)])
        self.cache.add(entry)
        return entry

    async def _lexer(self, grammar: Grammar) -> Lexer:
        work = partial(compiled, grammar, self.vocabulary, self.bounds.lexer_states)
        return Lexer(await asyncio.get_running_loop().run_in_executor(self._thread, work))

    def _has_room(self, size: int) -> bool:
        """For so many bytes more. Drops grammars that nobody uses, those used last at last."""
        while self._growth.exceeds(self.bounds.kept - size):
            entry = self.cache.unused()
            if entry is None:
                return False
            self.cache.drop(entry)
            del entry
        return True

    def engage(self, engine: object) -> None:
        """Sequences are this connection's from here on: one before it has ended."""
        self._engine = engine
        self.sequences.clear()

    def leave(self, connection: object) -> None:
        if connection is self._engine:
            self.sequences.clear()

    def begin(self, asked: Begin) -> None:
        """One whose grammar is not kept fails in its first step."""
        entry = self.cache.get(asked.key)
        if entry is not None:
            self.sequences.begin(asked, entry)
            if entry.is_full(self.bounds.threads) and self._has_room(entry.size):
                self._grow(entry)

    def advance(self, message: Advance, rows: Rows) -> Filled:
        """A step of the engine's."""
        filled = self.sequences.fill(message.step, message.wanted, rows)
        if self._growth.exceeds(self.bounds.most):
            filled.failed += self._shed()
        return filled

    def _shed(self) -> list[tuple[int, str]]:
        """Ends sequences until what has grown since they began has room: those that follow the
        grammar of the one that began last, and so on. -> which, and why"""
        ended: list[tuple[int, str]] = []
        if self._has_room(0):
            return ended
        while self.sequences.begun and self._growth.exceeds(self.bounds.most):
            *_, last = self.sequences.begun.values()
            for sequence in list(self.sequences.begun.values()):
                if sequence.entry is last.entry:
                    self.sequences.end(sequence.id)
                    ended.append((sequence.id, FULL))
            self.cache.drop(last.entry)
            last.entry.lexers.clear()
            del last, sequence
        return ended

    def _grow(self, entry: Entry) -> None:
        """Makes another lexer of a grammar that many sequences follow."""

        async def grow() -> None:
            with contextlib.suppress(GrammarRefused):
                entry.lexers.append(await self._lexer(entry.grammar))
            entry.growing = False

        entry.growing = True
        task = asyncio.create_task(grow())
        self._growing.add(task)
        task.add_done_callback(self._growing.discard)

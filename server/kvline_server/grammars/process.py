"""`python -m kvline_server.grammars.process`: opens the tokenizer once, and forks the processes
that use it: one that keeps grammars and fills masks (service.py), and one for each grammar that is
tried (trial.py). So one that ends is replaced in milliseconds, with the tokenizer's memory shared.

Started by the parent, and ends with it. It has one thread and handles no grammar itself, so a fork
of it is sound, and no grammar ends it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvline_contract.launch import LaunchConfig
from kvline_server.errors import InvalidFrame, ServerError
from kvline_server.grammars import messages, service, trial
from kvline_server.grammars.children import end_with, forked
from kvline_server.grammars.messages import Alive, Tried, Try
from kvline_server.grammars.trial import Trial
from kvline_server.grammars.vocabulary import TokenizerUnsupported, Vocabulary
from kvline_server.ipc.frames import Received
from kvline_server.ipc.messages import Channel, GrammarsReady
from kvline_server.ipc.starvation import Quiet
from kvline_server.model.config import read_config
from kvline_server.options.arguments import GrammarArguments
from kvline_server.options.grammars import HTTP_SECONDS, GrammarBounds

POLL_SECONDS = 0.5
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0  # seconds before a process that ended is replaced
CALM_SECONDS = 60.0  # after which a process that ends did not end soon
MAX_WAITING, MAX_WAITING_BYTES = 256, 8 << 20  # grammars that wait to be tried, and their texts
NOT_TRIED = f"it was not tried within {HTTP_SECONDS:g} s"


class Waiting(NamedTuple):
    """A grammar that is not tried yet."""

    since: float
    bytes: int  # that it takes
    wanted: Try


class Trunk:
    """The process that forks the others."""

    def __init__(
        self,
        vocabulary: Vocabulary | None,
        unsupported: str,
        bounds: GrammarBounds,
        control: socket.socket,
        listener: socket.socket,
        rows: int,
        silent: float,
    ) -> None:
        """Without a vocabulary every grammar is refused as `unsupported`. A process that fills
        masks and has no pulse for `silent` seconds is replaced."""
        self.vocabulary, self.unsupported, self.bounds = vocabulary, unsupported, bounds
        self.control, self.listener, self.rows, self.silent = control, listener, rows, silent
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ)
        self.waiting: deque[Waiting] = deque()
        self.trials: dict[int, Trial] = {}  # by their pipes
        self.ended = False
        self.pause = FIRST_PAUSE
        self._start()

    def run(self) -> None:
        """Until the parent is gone."""
        while not self.ended:
            for key, _ in self.selector.select(POLL_SECONDS):
                if key.fileobj is self.control:
                    self.ended = True
                elif key.fileobj is self.socket:
                    self._hear()
                elif isinstance(key.fileobj, int):
                    self._read(key.fileobj)
            if not self.ended:
                self._tend()
        if self.pid:
            self._kill()

    def _start(self) -> None:
        """The process that fills masks. Raises OSError where none can be started."""
        ours, theirs = socket.socketpair()
        work, keep = self._serve, (theirs.fileno(), self.listener.fileno(), self.rows)
        try:
            self.pid = forked(lambda: work(theirs), keep)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.socket = ours
        self.received, self.heard_at = Received(), time.monotonic()
        self.began_at = self.heard_at
        self.quiet = Quiet(lambda: self.heard_at)
        self.selector.register(self.socket, selectors.EVENT_READ)

    def _serve(self, theirs: socket.socket) -> None:
        """The process itself."""
        known = self.vocabulary, self.unsupported, self.bounds
        asyncio.run(service.serve(*known, theirs, self.listener, self.rows))

    def _hear(self) -> None:
        try:
            data = self.socket.recv(1 << 18)
            self.received.add(data)
            while (body := self.received.take()) is not None:
                self._handle(messages.decode(body), len(body))
        except (OSError, InvalidFrame):
            data = b""
        if not data:
            self._replace()

    def _handle(self, message: messages.Message, size: int) -> None:
        self.heard_at = time.monotonic()
        if isinstance(message, Try):
            taken = sum(each.bytes for each in self.waiting)
            if len(self.waiting) < MAX_WAITING and taken + size <= MAX_WAITING_BYTES:
                self.waiting.append(Waiting(self.heard_at, size, message))
            else:
                self._answer(Tried(message.id, service.BUSY, later=True))
        elif not isinstance(message, Alive):
            raise InvalidFrame(f"{type(message).__name__}, which is nothing to be tried")

    def _tend(self) -> None:
        for running in [each for each in self.trials.values() if each.late]:
            running.kill()
        self.quiet.watch([self.pid])
        if self.quiet.seconds() > self.silent:
            self._replace()
        self._give_up()
        while self.waiting and len(self.trials) < self.bounds.trials:
            assert self.vocabulary is not None
            wanted = self.waiting.popleft().wanted
            try:
                made = trial.start(wanted.id, wanted.grammar, self.vocabulary, self.bounds)
            except OSError as error:
                why = f"no process could be started: {error.strerror}"
                self._answer(Tried(wanted.id, why, later=True))
                continue
            self.trials[made.pipe] = made
            self.selector.register(made.pipe, selectors.EVENT_READ)

    def _give_up(self) -> None:
        """Grammars that no request waits for any more: those of others are behind them."""
        while self.waiting and time.monotonic() - self.waiting[0].since > HTTP_SECONDS:
            self._answer(Tried(self.waiting.popleft().wanted.id, NOT_TRIED, later=True))

    def _read(self, pipe: int) -> None:
        running = self.trials.get(pipe)
        if running is None:  # it was ended since the selector named its pipe
            return
        ended, answer = running.read(), running.answer()
        if ended:
            self.selector.unregister(running.pipe)
            del self.trials[running.pipe]
            answer = running.end(self.bounds) or answer
        if answer is not None:
            self._answer(answer)

    def _answer(self, tried: Tried) -> None:
        with suppress(OSError):  # its end is heard of too
            self.socket.sendall(messages.encode(tried))

    def _replace(self) -> None:
        """Of the process that fills masks: what it kept is lost, and its clients see the end of
        their connections."""
        lived = time.monotonic() - self.began_at
        code = self._kill()
        print(f"the process that fills masks ended ({code})", file=sys.stderr, flush=True)
        if lived > CALM_SECONDS:
            self.pause = FIRST_PAUSE
        while not self.selector.select(self.pause):  # in which only the parent is left
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
            try:
                self._start()
                return
            except OSError as error:
                why = f"no process that fills masks could be started: {error.strerror}"
                print(why, file=sys.stderr, flush=True)
        self.ended = True

    def _kill(self) -> int:
        """All that it has forked. -> the exit code of the process that fills masks"""
        self.waiting.clear()
        for running in self.trials.values():
            running.kill()
            self.selector.unregister(running.pipe)
            running.end(self.bounds)
        self.trials.clear()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.selector.unregister(self.socket)
        self.socket.close()
        self.pid = 0
        return os.waitstatus_to_exitcode(status)


def opened(folder: Path) -> tuple[Vocabulary | None, str]:
    """Of a model. -> its vocabulary, or why it has none"""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None, "the model has no tokenizer.json"
    try:
        model = read_config(folder)
        return Vocabulary(file, model.vocabulary, model.eos_token_ids), ""
    except ServerError as error:  # HTTP and the engine end the start, and say why
        return None, str(error)
    except TokenizerUnsupported as error:
        return None, f"the model's tokenizer is not one of those that grammars know: {error}"


def main(argv: list[str]) -> int:
    parent = os.getppid()
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    arguments = GrammarArguments.parse(argv[0])
    launch = LaunchConfig.parse(arguments.options.config.read_bytes())
    vocabulary, unsupported = opened(Path(launch.model.path))
    gc.collect()
    gc.freeze()  # what is loaded stays in pages that forks share
    control = socket.socket(fileno=arguments.control_fd)
    trunk = Trunk(
        vocabulary,
        unsupported,
        arguments.bounds,
        control,
        socket.socket(fileno=arguments.listen_fd),
        arguments.rows_fd,
        arguments.options.timeouts.grammars,
    )
    Channel(control).send(GrammarsReady())
    trunk.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

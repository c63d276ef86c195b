"""Processes that render a model's chat template (template_process.py), and ends them.

Called from threads, which wait for an idle process. One that ends is replaced at once, unless it
ended because the template takes too long to compile.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from kvline_server.errors import InvalidFrame
from kvline_server.http.errors import NotRendered
from kvline_server.http.rendered import OK, unpacked
from kvline_server.ipc import frames

CPU_SECONDS = 1.0  # for one rendering; usual templates take milliseconds
COMPILING = 10  # times as many to compile it: 70 KB take half a second

Templates = tuple[str, str | None]  # the second for requests with tools; None: the first


@dataclass(frozen=True, slots=True)
class Known:
    """What a template is."""

    invalid: str = ""  # why it is
    documents: bool = False  # whether it reads them
    no_tools: str = ""  # why it takes none
    passing: bool = False  # invalid for a reason that may pass, as when the kernel ends a process


class Renderer:
    """One process, once it is started. Not for several threads at once."""

    def __init__(self, templates: Templates, memory: int, seconds: float) -> None:
        self._seconds, self._compiling = seconds, COMPILING * seconds
        given = {"templates": templates, "memory": memory, "seconds": seconds}
        self._first = json.dumps({**given, "compiling": self._compiling}).encode()
        self._greeted: Known | None = None
        self._replaced, self._ended = False, 0  # whether a process was, and how it ended
        self._invalid = ""  # what it sent instead of an answer
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._process is None:
            self._process = self._start()

    def known(self) -> Known:
        if self._greeted is None:
            self.start()
            answer = self._receive()
            if answer is None:
                reason = self._end(self._compiling)
                if self._ended == -signal.SIGPROF:
                    self._greeted = Known(invalid=reason)
                    return self._greeted
                self.start()
                return Known(invalid=reason, passing=True)
            self._greeted = Known(**json.loads(answer))
        return self._greeted

    def render(self, job: bytes) -> tuple[bool, bytes]:
        """-> whether it succeeded; the packed text, or what is wrong. Tries again where
        the process was ended by others."""
        done, text = self._render(job)
        if not done and self._replaced and self._ended != -signal.SIGPROF:
            done, text = self._render(job)
        return done, text

    def _render(self, job: bytes) -> tuple[bool, bytes]:
        self._replaced = False
        if invalid := self.known().invalid:
            return False, invalid.encode()
        answer: bytes | None = None
        with contextlib.suppress(OSError):
            assert self._process is not None and self._process.stdin is not None
            frames.write(self._process.stdin, job)
            answer = self._receive()
        if answer is None:
            reason = self._end(self._seconds)
            self.start()
            return False, reason.encode()
        return answer[:1] == OK, answer[1:]

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "kvline_server.http.template_process"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            frames.write(process.stdin, self._first)
        return process

    def _receive(self) -> bytes | None:
        """None where the process has ended, or is to be ended for what it sent."""
        assert self._process is not None and self._process.stdout is not None
        self._invalid = ""
        try:
            return frames.read(self._process.stdout)
        except InvalidFrame as error:
            self._invalid = f"sent {error}"
            return None

    def _end(self, seconds: float) -> str:
        """`seconds`: that it had. -> why the process has ended"""
        assert self._process is not None
        self.end()
        self._replaced, self._ended = True, self._process.returncode
        self._process = self._greeted = None
        if self._ended == -signal.SIGPROF:
            return f"took more than {seconds:g} s of CPU time"
        return self._invalid or f"ended its process ({self._ended})"


class Renderers:
    def __init__(
        self, name: str, templates: Templates, count: int, memory: int, seconds: float = CPU_SECONDS
    ) -> None:
        """`memory` and `seconds`: bytes and CPU time that one rendering may take."""
        self.title = f"the chat template {name!r}" if name != "default" else "the chat template"
        self._made = made = [Renderer(templates, memory, seconds) for _ in range(count)]
        made[0].start()  # the others when it is known that the template can be compiled
        self._idle: queue.SimpleQueue[Renderer] = queue.SimpleQueue()
        for renderer in made:
            self._idle.put(renderer)
        self._known: Known | None = None
        self._lock = threading.Lock()
        weakref.finalize(self, _end, made)

    def known(self) -> Known:
        with self._lock:
            known = self._known
            if known is None:
                with self._borrowed() as renderer:
                    known = renderer.known()
                self._known = None if known.passing else known
                for renderer in [] if known.invalid else self._made:
                    renderer.start()
            return known

    def render(self, job: bytes) -> tuple[str, bytes]:
        """-> the text, and its characters' origins (traced.py). Raises BadRequest with the
        template's error."""
        with self._borrowed() as renderer:
            done, answer = renderer.render(job)
        if not done:
            raise NotRendered(f"{self.title} {answer.decode()}", "messages")
        return unpacked(answer)

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[Renderer]:
        renderer = self._idle.get()
        try:
            yield renderer
        finally:
            self._idle.put(renderer)


def as_job(
    messages: list[dict[str, Any]],
    own: dict[str, Any],
    variables: dict[str, Any],
    continued: bool = False,
) -> bytes:
    """Of ChatTemplate.render."""
    job = {"messages": messages, "own": own, "variables": variables, "continued": continued}
    return to_json(job)


def _end(renderers: list[Renderer]) -> None:
    for renderer in renderers:
        renderer.end()

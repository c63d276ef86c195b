"""An HTTP process: serves the public port, alone or beside others, sends requests to the engine,
reports to the parent.

Imports no torch. The listener opens at once, so that a taken port ends the start early; requests
get a 503 until the engine is validated.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import math
import resource
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn

from kvline_contract.exits import ExitCode
from kvline_contract.launch import LaunchConfig
from kvline_contract.report import Effective
from kvline_contract.tracing import NoTracing, tracer
from kvline_server.errors import ConfigInvalid, EngineConnectionLost, InvalidFrame, ServerError
from kvline_server.grammars.compiler import Compiler
from kvline_server.http.access import Guard, Key
from kvline_server.http.admission import Admission
from kvline_server.http.app import create_app
from kvline_server.http.body import Bodies
from kvline_server.http.chat_tokens import ChatTokens
from kvline_server.http.connections import Connections
from kvline_server.http.engine_client import EngineClient
from kvline_server.http.errors import Unavailable
from kvline_server.http.generate import Generator, RequestLimits
from kvline_server.http.service import VERSION, Service
from kvline_server.http.tls import Certificate
from kvline_server.http.tokenizer_files import open_chat, open_tokens
from kvline_server.http.tokens import Tokens
from kvline_server.http.trace import Traces
from kvline_server.ipc import messages
from kvline_server.ipc.messages import COUNTS, Drain, EdgeBeat, Progress, Serve
from kvline_server.ipc.pixels import Places
from kvline_server.ipc.totals import Totals
from kvline_server.model.config import read_config
from kvline_server.options.arguments import HttpArguments

BEAT_SECONDS = 0.5
SHORT_BEAT_SECONDS = 0.05  # where the parent waits: for the start, and for what a drain ends
PARENT_SECONDS = 2.0
LAST_WORDS_SECONDS = 1.0  # for errors at the end of a drain
UNSENT_BYTES = 64 << 10
TCP_NOTSENT_LOWAT = 25  # Linux; socket has the name from Python 3.12
MOST_RENDERERS = 4  # processes for chat templates: 12 MiB each
MOST_FILES, OTHER_FILES = 1 << 16, 128
# Objects made and not freed before young ones are visited for cycles, of which answers leave none:
# at Python's 700 collections visited those of all open requests again and again.
YOUNG_OBJECTS = 10_000


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: the parent decides when to drain."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


class Edge:
    def __init__(self, arguments: HttpArguments, control: socket.socket) -> None:
        options = arguments.options
        self.control = control
        self.parent: asyncio.StreamWriter | None = None
        self.handover = socket.socket(fileno=arguments.handover_fd)
        launch = LaunchConfig.parse(options.config.read_bytes())
        edge, files = options.clients, _allow_files() - OTHER_FILES
        edge = replace(edge, connections=min(edge.connections, files))
        folder = Path(launch.model.path)
        model = read_config(folder)
        context = launch.engine.max_model_len or model.max_position
        tokens = open_tokens(folder, edge.longest_text(context))
        parser = launch.engine.tool_call_parser
        chat = open_chat(folder, tokens, min(edge.parsing, MOST_RENDERERS), parser)
        self.folder, self.pixels_fd = folder, arguments.pixels_fd
        self.warning = _not_served(tokens, chat) if arguments.index == 0 else ""
        self.totals = totals = Totals(arguments.totals_fd)
        ids = itertools.count(1 + arguments.index, arguments.processes)
        self.client = EngineClient(edge.unread_tokens, ids)
        self.connections = Connections(edge)
        self.service = Service(
            generator=Generator(self.client, tokens, Traces(_tracer()), chat),
            admission=Admission(
                max_held=edge.score_bytes, max_requests=edge.connections, totals=totals
            ),
            bodies=Bodies(edge, totals),
            limits=RequestLimits(
                launch.model.served_name,
                model.vocabulary,
                0,
                0,
                0,
                launch.engine.default_max_tokens,
                f"fp_{launch.revision or VERSION}",
            ),
            compiler=None if arguments.grammars is None else Compiler(str(arguments.grammars)),
            root=_repository(launch.model.source),
        )
        self.key = Key(options.key) if launch.require_api_key else None
        tls = Certificate(options.tls) if launch.require_tls else None
        self.certificate = tls
        app = create_app(self.service)
        self.server = Server(
            uvicorn.Config(
                app if self.key is None else Guard(app, self.key),
                ssl_context_factory=(lambda *_: tls.context) if tls else None,
                http=self.connections.make,  # type: ignore[arg-type]
                loop="uvloop",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=math.ceil(edge.idle),
                timeout_graceful_shutdown=1,
                backlog=1024,
            )
        )

    async def run(self, listener: socket.socket) -> int:
        reader, self.parent = await asyncio.open_connection(sock=self.control)
        if self.warning:
            self.parent.write(messages.encode(Progress(warning=self.warning)))
        serving = asyncio.create_task(self.server.serve(sockets=[listener]))
        works = [self._beat(), self.connections.sweep(), self._end_with_engine()]
        works += [self.certificate.watch()] if self.certificate else []
        others = [asyncio.create_task(work) for work in works]
        listening = asyncio.create_task(self._listen(reader))
        await asyncio.wait({serving, listening}, return_when=asyncio.FIRST_COMPLETED)
        self.server.should_exit = True
        await serving
        for task in others:
            task.cancel()
        if listening.done():
            error = listening.exception()
            if error is None:  # the parent is gone
                return int(ExitCode.DRAINED)
            return await self._report(InvalidFrame(f"the parent sent {error}"))
        self._tell_parent()
        if not self.client.lost.is_set():
            return int(ExitCode.DRAINED)
        return await self._report(EngineConnectionLost(self.client.why_lost))

    async def _report(self, error: ServerError) -> int:
        """Tells the parent why this process ends. -> its exit code"""
        assert self.parent is not None
        self.parent.write(messages.encode(Progress(failure=error.termination())))
        await self.parent.drain()
        return int(error.code)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Handles the parent's messages; ends when the parent does. Raises InvalidFrame."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                message = await messages.read(reader)
                if isinstance(message, Serve):
                    await self._open(message)
                elif isinstance(message, Drain):
                    asyncio.get_running_loop().create_task(self._drain(message.seconds))

    async def _open(self, message: Serve) -> None:
        _, (engine,), *_ = socket.recv_fds(self.handover, 1, 1)
        effective, admission = message.effective, self.service.admission
        await self.client.connect(socket.socket(fileno=engine), effective.page_size)
        if effective.max_images_per_request is not None:
            self._take_images(effective)
        admission.open(effective.max_running_requests, message.kv_tokens)
        self.service.limits = replace(
            self.service.limits,
            max_model_len=effective.max_model_len,
            max_top_logprobs=effective.max_top_logprobs,
            max_prompt_tokens=admission.max_tokens,
            max_sequence_tokens=message.sequence_tokens,
        )
        self._tell_parent()

    def _take_images(self, effective: Effective) -> None:
        # A server of text alone has no decoder in its memory.
        from kvline_server.http.image_store import Store
        from kvline_server.http.images import open_images

        if self.pixels_fd is None:
            raise InvalidFrame("settings for images, without memory for their pixels")
        store = Store(Places(self.pixels_fd), self.totals, self.service.bodies.limits)
        generator = self.service.generator
        generator.images = open_images(self.folder, generator.tokens, effective, store)

    async def _drain(self, seconds: float) -> None:
        """Answers get `Connection: close`. For `late` seconds requests are still accepted, because
        clients may have sent them before they noticed. Then the port and idle connections close,
        and requests under way have until the deadline, when they get an error. A connection whose
        answer had begun before takes one more request."""
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        self.connections.drain()
        self.service.admission.draining = True  # for /health
        late = min(clock() + self.connections.limits.late, end)
        while self.connections.open and clock() < late:
            await asyncio.sleep(0.05)
        self.server.config.timeout_graceful_shutdown = math.ceil(end - clock()) + 2
        self.server.should_exit = True
        while (self.service.admission.active or self.connections.owing()) and clock() < end:
            await asyncio.sleep(0.05)
        self.service.admission.ending = True
        self.client.end(Unavailable("this server shut down before the answer was complete"))
        end += LAST_WORDS_SECONDS
        while self._owes_answers() and clock() < end:
            await asyncio.sleep(0.05)
        self.connections.drop()  # clients that have not read even that, or are still sending

    async def _end_with_engine(self) -> None:
        """Tells the parent once every client has the error of its request: the parent, which sees
        the engine's exit, ends this process then. If it does not, the engine still runs but its
        connection is broken, and this process exits to report that."""
        clock = asyncio.get_running_loop().time
        await self.client.lost.wait()
        end = clock() + PARENT_SECONDS
        while self._owes_answers() and clock() < end:
            await asyncio.sleep(0.01)
        self._tell_parent()
        await asyncio.sleep(PARENT_SECONDS)
        self.server.should_exit = True

    def _owes_answers(self) -> bool:
        return bool(self.service.admission.active or self.connections.unanswered())

    async def _beat(self) -> None:
        assert self.parent is not None
        while not self.parent.is_closing():
            self._tell_parent()
            calm = self.server.started and not self.connections.draining
            await asyncio.sleep(BEAT_SECONDS if calm else SHORT_BEAT_SECONDS)

    def _tell_parent(self) -> None:
        beat = EdgeBeat(
            ready=self.server.started,
            connected=self.client.connected,
            unanswered=self.connections.unanswered() if self.client.lost.is_set() else 0,
            latencies=self.client.latencies,
            **{name: getattr(self.service.admission, name) for name in COUNTS},
        )
        assert self.parent is not None
        self.parent.write(messages.encode(beat))


def _repository(source: str) -> str:
    """ORG/NAME of hf://ORG/NAME@COMMIT; empty for a claim's or a folder's path."""
    kind, _, repository = source.partition("://")
    return repository.partition("@")[0] if kind == "hf" else ""


def _tracer() -> Any | None:
    try:
        return tracer("kvline-server")
    except NoTracing as error:
        raise ConfigInvalid(str(error)) from None


def main(argv: list[str]) -> int:
    import uvloop

    arguments = HttpArguments.parse(argv[0])
    control = socket.socket(fileno=arguments.control_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sends Drain
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # clients' mistakes are not logged
    try:
        edge = Edge(arguments, control)
    except ServerError as error:
        messages.Channel(control).send(Progress(failure=error.termination()))
        return int(error.code)
    listener = socket.socket(fileno=arguments.listen_fd)
    # Limits what the kernel buffers; else a client that reads nothing goes unnoticed for long.
    listener.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    gc.collect()
    gc.freeze()  # what is there stays: no later collection visits it
    gc.set_threshold(YOUNG_OBJECTS)
    return uvloop.run(edge.run(listener))


def _not_served(tokens: Tokens | None, chat: ChatTokens | None) -> str:
    """What the model's files do not serve; empty where nothing is amiss."""
    if tokens is None:
        return "the model has no tokenizer.json: prompts must be token ids, and chat is not served"
    if chat is None:
        return ""
    problem = chat.problem()
    return f"{problem}: chat is not served" if problem else chat.tool_problem()


def _allow_files() -> int:
    """Raises the limit of open files; each connection needs one. -> the limit"""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

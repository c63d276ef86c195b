"""The HTTP process: serves the public port, talks to the engine, tells the parent it is alive.

Imports no torch. The listener opens at once, so that a taken port ends the start early; requests
get a 503 until the parent says that the engine is validated.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn

from kvline_contract import codec
from kvline_contract.exits import ExitCode
from kvline_contract.launch import LaunchConfig
from kvline_contract.tracing import NoTracing, tracer
from kvline_server.engine import messages
from kvline_server.engine.messages import Drain, EdgeBeat, Serve
from kvline_server.errors import ConfigInvalid, ServerError
from kvline_server.http.access import Guard, Key
from kvline_server.http.admission import Admission
from kvline_server.http.app import Service, create_app, now
from kvline_server.http.engine_client import EngineClient
from kvline_server.http.generate import Generator, Limits
from kvline_server.http.tokens import Tokens
from kvline_server.http.trace import Traces
from kvline_server.model.config import read_config

BEAT_SECONDS = 0.5


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: the parent decides when to drain."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


class Edge:
    def __init__(self, arguments: argparse.Namespace, control: socket.socket) -> None:
        self.arguments = arguments
        self.control = control
        launch = LaunchConfig.parse(Path(arguments.config).read_bytes())
        folder = Path(launch.model.path)
        model = read_config(folder)
        tokens = Tokens(folder) if (folder / "tokenizer.json").is_file() else None
        self.client = EngineClient()
        self.service = Service(
            generator=Generator(self.client, tokens, Traces(_tracer())),
            admission=Admission(),
            limits=Limits(launch.model.served_name, model.vocabulary, 0, 0),
            started=now(),
        )
        self.key = Key(arguments.api_key_file) if launch.require_api_key else None
        self.stopping = asyncio.Event()

    async def run(self, listener: socket.socket) -> None:
        app = create_app(self.service)
        config = uvicorn.Config(
            app if self.key is None else Guard(app, self.key),
            http="httptools",
            loop="uvloop",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=1,
            backlog=1024,
        )
        server = Server(config)
        reader, writer = await asyncio.open_connection(sock=self.control)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        beating = asyncio.create_task(self._beat(writer, server))
        listening = asyncio.create_task(self._listen(reader))
        await asyncio.wait(
            {serving, listening, asyncio.create_task(self.stopping.wait())},
            return_when=asyncio.FIRST_COMPLETED,
        )
        server.should_exit = True
        await serving
        beating.cancel()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """The parent's orders; its end is ours."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                length = int.from_bytes(await reader.readexactly(4), "little")
                message = messages.decode(await reader.readexactly(length))
                if isinstance(message, Serve):
                    await self._open(message)
                elif isinstance(message, Drain):
                    asyncio.get_running_loop().create_task(self._drain(message.seconds))

    async def _open(self, message: Serve) -> None:
        await self.client.connect(self.arguments.socket)
        limits = self.service.limits
        self.service.limits = Limits(
            limits.served_name,
            limits.vocabulary,
            message.max_model_len,
            message.max_top_logprobs,
        )
        self.service.admission.open(message.max_running, message.max_model_len)

    async def _drain(self, seconds: float) -> None:
        self.service.admission.draining = True
        deadline = asyncio.get_running_loop().time() + seconds
        while self.service.admission.requests and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        self.stopping.set()

    async def _beat(self, writer: asyncio.StreamWriter, server: Server) -> None:
        while True:
            a = self.service.admission
            beat = EdgeBeat(
                ready=server.started,
                active=a.requests,
                received=a.received,
                finished=a.finished,
                refused=a.refused,
                aborted=a.aborted,
                failed=a.failed,
            )
            writer.write(messages.encode(beat))
            await asyncio.sleep(BEAT_SECONDS if server.started else 0.05)


def _tracer() -> Any | None:
    try:
        return tracer("kvline-server")
    except NoTracing as error:
        raise ConfigInvalid(str(error)) from None


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvline-http")
    parser.add_argument("--config", required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--listen-fd", type=int, required=True)
    parser.add_argument("--api-key-file", type=Path, required=True)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    import uvloop

    arguments = parse(argv)
    control = socket.socket(fileno=arguments.control_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent tells us
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        edge = Edge(arguments, control)
    except ServerError as error:
        body = codec.dumps(error.termination()).encode()
        messages.Channel(control).send(messages.Progress("failure", body))
        return int(error.code)
    listener = socket.socket(fileno=arguments.listen_fd)
    uvloop.run(edge.run(listener))
    return int(ExitCode.DRAINED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The engine process: loads and sizes the model, then runs the engine loop.

Started by the parent with sockets to the parent and to each HTTP process. The main thread
owns the engine; other threads only put messages into its inbox.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import NoReturn

from kvline_contract import names
from kvline_contract.exits import ExitCode
from kvline_contract.launch import LaunchConfig
from kvline_server.engine.engine import Engine, Output
from kvline_server.engine.request import Scores
from kvline_server.engine_process.images import pictures
from kvline_server.engine_process.listen import listen
from kvline_server.engine_process.outbox import Outbox
from kvline_server.engine_process.pulse import pulse
from kvline_server.engine_process.start import set_threads, start
from kvline_server.errors import (
    DeviceOutOfMemory,
    InvalidFrame,
    OutOfMemory,
    OutOfMemoryServing,
    ServerError,
    StepFailed,
)
from kvline_server.ipc import messages
from kvline_server.ipc.messages import (
    Beat,
    Channel,
    Delta,
    Deltas,
    PackedScores,
    Progress,
    PromptScores,
    Released,
)
from kvline_server.ipc.pixels import SharedPixels, shared_pixels
from kvline_server.memory import device_errors
from kvline_server.memory.pages import PAGE_SIZE
from kvline_server.options.arguments import EngineArguments
from kvline_server.parallel.link import Link

BEAT_SECONDS = 0.5
SCORES_BYTES = 1 << 20  # of prompt logprobs in one frame


class EngineProcess:
    def __init__(self, arguments: EngineArguments, parent: Channel) -> None:
        self.arguments = arguments
        self.parent = parent
        self.http = [Outbox(socket.socket(fileno=fd)) for fd in arguments.http_fds]
        others = enumerate(arguments.rank_fds, 1)
        self.links = [Link(socket.socket(fileno=fd), rank) for rank, fd in others]
        self.inbox: queue.SimpleQueue[tuple[Channel | None, messages.Message]] = queue.SimpleQueue()
        self.neighbours = threading.Event()
        self.clients: dict[int, Channel] = {}  # by sequence id, unique over the HTTP processes
        self.pixels: dict[Channel, SharedPixels] = {}
        if arguments.pixel_fds:
            shared = shared_pixels(arguments.pixel_fds)
            self.pixels.update(zip(self.http, shared, strict=True))
        self.readers: dict[int, Channel] = {}  # whose pixels sequences read, by their id
        self.beat_at = 0.0
        self.prompt_tokens = 0
        self.output_tokens = 0

    def size(self, launch: LaunchConfig) -> Engine:
        """Loads and profiles; returns an engine with a validated KV budget."""
        options = self.arguments.options
        engine, result = start(
            launch=launch,
            send=self.parent.send,
            attempts=options.state_dir / names.ATTEMPTS_FILE,
            record=options.record,
            wait_for_neighbours=self.neighbours.wait,
            memory=options.memory,
            root=self.arguments.root,
            http_processes=len(self.http),
            ranks=self.arguments.ranks,
            links=self.links,
            longest_step=options.timeouts.step,
            grammars=self.arguments.grammars,
        )
        self.parent.send(Progress(result=result))
        return engine

    def serve(self, engine: Engine) -> NoReturn:
        """The engine loop: steps while there is work, else waits for messages."""
        while True:
            self._take(engine)
            self._publish(engine.step())
            self._beat(engine)

    def _take(self, engine: Engine) -> None:
        idle = engine.idle
        while True:
            try:
                client, message = self.inbox.get(idle, BEAT_SECONDS if idle else None)
            except queue.Empty:
                return
            idle = False
            if isinstance(message, messages.Submit) and client is not None:
                self.clients[message.id] = client
                self.prompt_tokens += len(message.tokens)
                images = None
                if message.images:
                    images = pictures(message, self.pixels.get(client), engine.axes)
                    self.readers[message.id] = client
                engine.submit(message.id, message.tokens, message.params, images)
            elif isinstance(message, messages.Abort):
                self.clients.pop(message.id, None)
                engine.abort(message.id)
                self._release([message.id])

    def _publish(self, outputs: list[Output]) -> None:
        """One frame per client for all its requests, after frames of the prompt logprobs: those of
        a long prompt are larger than one frame may be."""
        frames: dict[Channel, list[Delta]] = {}
        ended: list[int] = []
        for output in outputs:
            self.output_tokens += len(output.tokens)
            client = self.clients.get(output.sequence.id)
            if client is None:
                continue
            if output.finish is not None:
                del self.clients[output.sequence.id]
                ended.append(output.sequence.id)
            if output.prompt_scores is not None:
                for part in parts(output.prompt_scores):
                    _send(client, PromptScores(output.sequence.id, part))
            frames.setdefault(client, []).append(_delta(output))
        for client, deltas in frames.items():
            _send(client, Deltas(deltas))
        self._release(ended)

    def _release(self, ids: list[int]) -> None:
        """Tells whose pixels they read that they no longer do: what is encoded now was copied."""
        for id in ids:
            if (client := self.readers.pop(id, None)) is not None:
                _send(client, Released([id]))

    def _beat(self, engine: Engine) -> None:
        now = time.monotonic()
        if now - self.beat_at < BEAT_SECONDS:
            return
        self.beat_at = now
        scheduler, caches, speculation = engine.scheduler, engine.caches, engine.speculation
        states = caches.states
        self.parent.send(
            Beat(
                busy=not engine.idle,
                steps=engine.progress,
                kv_tokens=caches.total * PAGE_SIZE,
                used_tokens=caches.used * PAGE_SIZE,
                evictable_tokens=caches.cached * PAGE_SIZE,
                waiting_prompt_tokens=sum(
                    caches.sequence_tokens(len(s.tokens)) for s in scheduler.waiting
                ),
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                preemptions=scheduler.preemptions,
                prompt_tokens=self.prompt_tokens,
                output_tokens=self.output_tokens,
                draft_tokens=speculation.drafted if speculation else 0,
                accepted_tokens=speculation.accepted if speculation else 0,
                failed_grammars=engine.masks.failed,
                state_slots=states.running if states else 0,
                snapshots=states.cached if states else 0,
                prefix_tokens=states.hit if states else 0,
                stateless_tokens=states.lost if states else 0,
            )
        )

    def listen(self) -> None:
        """Starts reading the parent's messages and requests; answers to these go back on the same
        sockets, without blocking a step."""
        listen(self.parent, "the parent", self._hear_parent, self.parent, ExitCode.ENGINE_DIED)
        for client in self.http:
            listen(client, "an HTTP process", partial(self._hear_http, client), self.parent)

    def _hear_parent(self, message: messages.Message) -> None:
        if isinstance(message, messages.NeighboursReady):
            self.neighbours.set()

    def _hear_http(self, client: Outbox, message: messages.Message) -> None:
        if not isinstance(message, messages.Submit | messages.Abort):
            raise InvalidFrame(f"{type(message).__name__}, which is no request")
        self.inbox.put((client, message))


def _send(client: Channel, message: messages.Message) -> None:
    with contextlib.suppress(OSError):  # the HTTP process is gone; the parent ends the pod
        client.send(message)


def _delta(output: Output) -> Delta:
    return Delta(
        output.sequence.id,
        output.tokens,
        output.finish,
        None if output.scores is None else pack(output.scores),
        cached=output.sequence.cached,
        waited_ms=int(1000 * (output.sequence.waited or 0)),
        reason=output.reason,
    )


def parts(scores: Scores) -> Iterator[PackedScores]:
    """All of them, in order, SCORES_BYTES at most in each."""
    count, top = scores.top_ids.shape
    rows = max(1, SCORES_BYTES // (4 * (3 + 2 * top)))
    return (pack(scores.rows(start, start + rows)) for start in range(0, count, rows))


def pack(scores: Scores) -> PackedScores:
    return PackedScores(
        count=len(scores.tokens),
        top=scores.top_ids.shape[1],
        tokens=scores.tokens.tobytes(),
        values=scores.values.tobytes(),
        ranks=scores.ranks.tobytes(),
        top_ids=scores.top_ids.tobytes(),
        top_values=scores.top_values.tobytes(),
    )


def main(arguments: EngineArguments, launch: LaunchConfig) -> int:
    parent = Channel(socket.socket(fileno=arguments.control_fd))
    set_threads(arguments.options, launch)
    process = EngineProcess(arguments, parent)
    process.listen()
    if arguments.ranks is not None:
        threading.Thread(target=pulse, args=(parent,), daemon=True).start()
    return run(process, launch)


def run(process: EngineProcess, launch: LaunchConfig) -> int:
    """Sizes and serves; returns the exit code."""
    refused: type[ServerError] = OutOfMemory  # outside sizing, which has its own diagnosis
    try:
        with device_errors.translated("start"):
            engine = process.size(launch)
        refused = OutOfMemoryServing
        with device_errors.translated("serve"):
            process.serve(engine)
    except StepFailed as error:
        process.parent.send(messages.StepFailed(str(error)))
        return int(refused.code)
    except DeviceOutOfMemory as error:
        failure = refused(f"the device refused memory: {error}").termination()
    except ServerError as error:
        failure = error.termination()
    process.parent.send(Progress(failure=failure))
    return failure.code

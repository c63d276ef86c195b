"""A rank other than 0: does what rank 0 says (ranks.py) until rank 0 ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np

from kvline_server.errors import DeviceFailure, DeviceOutOfMemory, RankLost, StepFailed
from kvline_server.ipc.messages import Answer, Call, Encode, EncodeLayers, Message, Run, Sample
from kvline_server.ipc.pixels import SharedPixels
from kvline_server.kernels.group import Group
from kvline_server.memory import device_errors
from kvline_server.parallel.executor import Local
from kvline_server.parallel.link import Link
from kvline_server.parallel.wire import Steps
from kvline_server.worker.encoder import Encoder, Given
from kvline_server.worker.step import InFlight
from kvline_server.worker.worker import Forward

IDLE_SECONDS = 0.5  # until the last step's errors are read
SEND_SECONDS = 300.0


class Follower:
    def __init__(
        self,
        local: Local,
        group: Group,
        link: Link,
        steps: Steps,
        pixels: Sequence[SharedPixels] = (),
    ) -> None:
        """`link`: to rank 0; `pixels` of each HTTP process, where images are served."""
        self._local = local
        self._group = group
        self._link = link
        self._steps = steps
        self._pixels = pixels
        self._held = ExitStack()
        self._begun: tuple[int, Forward] | None = None  # the buffer of a step to be sampled, and it
        self._last: InFlight | None = None  # whose errors nobody has seen yet

    def serve(self) -> None:
        """Until rank 0 ends. Raises StepFailed or DeviceFailure where a step fails, and
        InvalidFrame."""
        while True:
            try:
                message = self._link.receive(IDLE_SECONDS)
            except RankLost:
                return
            if message is None:
                self._check()
            elif self._begun is not None:
                self._sample(*self._begun, message)
            elif isinstance(message, Run) and message.samples:
                self._run(message.buffer)
            elif isinstance(message, Run):
                self._forward(message.buffer)
            elif isinstance(message, EncodeLayers):
                self._encode(message.layers)
            elif isinstance(message, Encode):
                self._answer("encode", partial(self._begin, message))
            elif isinstance(message, Call):
                self._last = None  # rank 0 has its results
                self._answer(message.name, partial(self._do, message))
            else:
                raise self._link.unexpected(message)

    def _run(self, buffer: int) -> None:
        with self._in_step():
            self._last = self._local.worker.launch(self._steps.read(buffer), read=False)
        self._steps.has_read(self._group.rank - 1)

    def _forward(self, buffer: int) -> None:
        with self._in_step():
            self._begun = buffer, self._local.worker.forward(self._steps.read(buffer))

    def _sample(self, buffer: int, forward: Forward, message: Message) -> None:
        """Of a step that has begun, once its constraints are there."""
        if not isinstance(message, Sample):
            raise self._link.unexpected(message)
        with self._in_step():
            constraints = self._steps.constraints(buffer, message.at)
            self._last, self._begun = forward.sample(constraints, read=False), None
        self._steps.has_read(self._group.rank - 1)

    def _encode(self, layers: int) -> None:
        """Of a pass that has begun."""
        with self._in_step():
            self._encoder.run(layers)

    def _check(self) -> None:
        """Errors of a device surface where somebody waits for it."""
        if self._last is not None:
            with self._in_step():
                self._last.wait()
            self._last = None

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        try:
            yield
        except DeviceOutOfMemory as error:
            raise StepFailed(f"rank {self._group.rank}: {error}") from error

    def _answer(self, name: str, do: Callable[[], list[int]]) -> None:
        try:
            with device_errors.translated(name), self._group.apart():
                answer = Answer(do())
        except DeviceOutOfMemory as error:
            answer = Answer(text=str(error), failed="memory")
        except DeviceFailure as error:
            answer = Answer(text=str(error), failed="device")
        self._link.send(answer, SEND_SECONDS)

    def _do(self, call: Call) -> list[int]:
        local, numbers = self._local, call.numbers
        match call.name:
            case "tune":
                known = {(a, b, c): kernel for a, b, c, kernel in call.choices or ()}
                return [int((local.tune(numbers[0], known) or {}) == known)]
            case "warm_up":
                local.warm_up(numbers[0])
            case "capture":
                return [int(local.capture(numbers[0], numbers[1]))]
            case "rehearse":
                self._rehearse(numbers[0])
            case "resize":
                local.resize(tuple(numbers))
            case "usage":
                (usage,) = local.usage()
                return [usage.limit, usage.used, usage.now, usage.peak, usage.kv, usage.files]
            case "settle":
                local.settle()
            case "reset_peak":
                local.reset_peak()
            case "keep_peak":
                return [int(local.keep_peak(bool(numbers[0])))]
            case "hold":
                self._held.enter_context(local.held(numbers[0]))
            case "release":
                self._held.close()
            case _:
                raise AssertionError(call.name)
        return []

    @property
    def _encoder(self) -> Encoder:
        assert self._local.encoder is not None, "rank 0 has one too"
        return self._local.encoder

    def _begin(self, call: Encode) -> list[int]:
        """-> the places of images whose pixels are wrong"""
        images = [
            Given(i.tokens, i.digest, self._pixels[i.process].view(i.offset, i.height, i.width))
            for i in call.images
        ]
        return self._encoder.begin(images, np.frombuffer(call.rows, np.int64))

    def _rehearse(self, buffer: int) -> None:
        try:
            self._local.worker.rehearse(self._steps.read(buffer))
        finally:
            self._steps.has_read(self._group.rank - 1)

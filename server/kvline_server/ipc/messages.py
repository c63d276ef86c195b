"""Messages between the server's processes: tagged msgpack structs in frames, never pickle.

HTTP sends Submit and Abort to the engine and gets Deltas back; both report to the parent. Rank 0 of
several sends Call, Run and Encode to the others. Arrays are sent as bytes.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Literal

import msgspec

from kvline_contract.report import (
    Attempt,
    Current,
    Effective,
    Provenance,
    Result,
    Stage,
    State,
    Termination,
)
from kvline_server.ipc import frames
from kvline_server.ipc.codec import Codec
from kvline_server.ipc.histogram import Latencies
from kvline_server.ipc.sampling_params import SamplingParams


class SentImage(msgspec.Struct, array_like=True):
    """Where a prompt has the tokens of an image, and the shared memory its pixels (pixels.py)."""

    start: int  # of its first token, in the prompt
    rows: int  # of tokens
    columns: int
    digest: bytes  # of the pixels and their shape
    offset: int  # in the memory, which has 3 bytes for each pixel
    height: int  # in pixels
    width: int

    @property
    def tokens(self) -> int:
        return self.rows * self.columns


class Submit(msgspec.Struct, tag="submit", array_like=True):
    id: int
    tokens: list[int]
    params: SamplingParams
    images: list[SentImage] = []  # in the order of their tokens


class Abort(msgspec.Struct, tag="abort", array_like=True):
    id: int


class Released(msgspec.Struct, tag="released", array_like=True):
    """Engine to HTTP: it no longer reads the pixels of these sequences' images."""

    ids: list[int]


class PackedScores(msgspec.Struct, array_like=True):
    """Logprobs of `count` consecutive tokens, `top` alternatives each."""

    count: int
    top: int
    tokens: bytes  # int32 [count]
    values: bytes  # float32 [count]
    ranks: bytes  # int32 [count]
    top_ids: bytes  # int32 [count, top]
    top_values: bytes  # float32 [count, top]

    def row(self, index: int) -> PackedScores:
        """Of one of the tokens."""
        if self.count == 1:
            return self
        one = slice(4 * index, 4 * index + 4)
        best = slice(4 * index * self.top, 4 * (index + 1) * self.top)
        single = (self.tokens[one], self.values[one], self.ranks[one])
        return PackedScores(1, self.top, *single, self.top_ids[best], self.top_values[best])


# Of a sequence that the engine failed: memory that both share was given to another's image.
WRONG_PIXELS = "the pixels of its image were no longer in memory when they were to be encoded"


class Delta(msgspec.Struct, array_like=True):
    """What a sequence gained in a step: one token or more, none where it failed."""

    id: int
    tokens: list[int]
    finish: str | None = None  # after the last of them
    scores: PackedScores | None = None  # of each token
    prompt_scores: list[PackedScores] = []  # as messages of their own until they are received
    cached: int = 0
    waited_ms: int = 0  # in the queue, before its first step
    reason: str = ""  # WRONG_PIXELS, or why its grammar could not be followed, where it failed so


class PromptScores(msgspec.Struct, tag="prompt-scores", array_like=True):
    """Some of a prompt's logprobs, in order; all of them come before its first delta."""

    id: int
    scores: PackedScores


class Deltas(msgspec.Struct, tag="deltas", array_like=True):
    """New tokens of one or more sequences, in one frame."""

    items: list[Delta]


class Beat(msgspec.Struct, tag="beat", array_like=True):
    """The engine's pulse, sent from its main loop: a hung step sends none."""

    busy: bool
    steps: int
    kv_tokens: int = 0
    used_tokens: int = 0
    evictable_tokens: int = 0
    waiting_prompt_tokens: int = 0  # of the KV cache, that they will take
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    draft_tokens: int = 0  # that steps had, and of these the accepted ones
    accepted_tokens: int = 0
    failed_grammars: int = 0  # sequences that ended as their grammar could not be followed
    # Of recurrent states: slots for running sequences, snapshots that are kept, prompt tokens that
    # one has saved, and those whose pages were there and whose state was not. 0 without any.
    state_slots: int = 0
    snapshots: int = 0
    prefix_tokens: int = 0
    stateless_tokens: int = 0


class EdgeBeat(msgspec.Struct, tag="edge", array_like=True):
    """An HTTP process's pulse, sent from its event loop."""

    ready: bool
    active: int
    connected: bool = False  # to the engine
    # Connections whose answer is not complete, or not sent to its end; 0 while the engine runs.
    unanswered: int = 0
    received: int = 0
    finished: int = 0
    refused: int = 0
    aborted: int = 0
    failed: int = 0
    rejected: int = 0  # sequences answered 429
    ended: int = 0  # admitted sequences that have ended
    drained: int = 0  # requests finished during the drain
    cut: int = 0  # requests whose answer the drain's end has cut off
    latencies: Latencies = msgspec.field(default_factory=Latencies)


# What admission counts, and what is summed over the HTTP processes.
COUNTS = tuple(
    name
    for name in EdgeBeat.__struct_fields__
    if name not in ("ready", "connected", "unanswered", "latencies")
)


class Progress(msgspec.Struct, tag="progress", array_like=True):
    """One update of the sizing report."""

    state: State | None = None
    stage: Stage | None = None
    effective: Effective | None = None
    attempt: Attempt | None = None
    provenance: Provenance | None = None
    result: Result | None = None
    failure: Termination | None = None
    warning: str | None = None
    current: Current | None = None
    probed_ms: int | None = None  # that the longest step of a probe took


SendProgress = Callable[[Progress], None]


class Pulse(msgspec.Struct, tag="pulse", array_like=True):
    """A rank's, where there are several: its process runs, whatever its main thread waits for."""


class StepFailed(msgspec.Struct, tag="step-failed", array_like=True):
    """Rank to parent: errors.StepFailed. A smaller size may do."""

    text: str


Choice = tuple[int, int, int, int]  # rows, out, in, kernel: an item of kernels.tuning.Choices


class Call(msgspec.Struct, tag="call", array_like=True):
    """Rank 0 to another: the method of its executor to call, for an Answer."""

    name: str
    numbers: list[int] = []
    choices: list[Choice] | None = None


class Run(msgspec.Struct, tag="run", array_like=True):
    """Rank 0 to another: launch the step in this buffer, or where it `samples` nothing yet, its
    forward pass. It is not answered."""

    buffer: int
    samples: bool = True


class Sample(msgspec.Struct, tag="sample", array_like=True):
    """Rank 0 to another, after a Run that samples nothing: launch the rest of its step, with the
    constraints at this place of its buffer. It is not answered."""

    at: int


class EncodedImage(msgspec.Struct, array_like=True):
    """An image for the encoder, and where its pixels are (pixels.Place)."""

    tokens: int
    digest: bytes
    process: int
    offset: int
    height: int  # in pixels
    width: int


class Encode(msgspec.Struct, tag="encode", array_like=True):
    """Rank 0 to another, for an Answer: begin a pass of these images, of which each rank encodes
    its share."""

    images: list[EncodedImage]
    rows: bytes  # int64, of the encoder's cache, for all tokens


class EncodeLayers(msgspec.Struct, tag="encode-layers", array_like=True):
    """Rank 0 to another: go on by so many layers with the pass, or with 0 to its end. It is not
    answered."""

    layers: int


class Answer(msgspec.Struct, tag="answer", array_like=True):
    """A rank's, to a Call or Encode."""

    numbers: list[int] = []
    text: str = ""  # why there is no result
    failed: Literal["", "memory", "device"] = ""


class RankLoaded(msgspec.Struct, tag="rank-loaded", array_like=True, kw_only=True):
    """A rank's to rank 0, once its part of the model is loaded: its process, figures in bytes, and
    what must be the same on all."""

    pid: int
    limit: int
    free_before: int  # before it met the others and loaded its weights
    collectives: int  # that the exchange with the others takes of its GPU
    encoder: int = 0  # that the largest passes of images take
    pace: int = 1  # of a pass: tokens times layers a second
    device: str
    kernels: str
    fingerprint: str


class Drain(msgspec.Struct, tag="drain", array_like=True):
    """Parent to HTTP: finish the requests under way within `seconds`, then exit."""

    seconds: float


class Serve(msgspec.Struct, tag="serve", array_like=True):
    """Parent to HTTP: the engine is validated; its socket follows on the handover socket."""

    effective: Effective
    kv_tokens: int
    sequence_tokens: int | None  # of these, that a sequence takes at most; None: one a token


class NeighboursReady(msgspec.Struct, tag="neighbours", array_like=True):
    """Parent to engine: every other process has its memory; measure now."""


class GrammarsReady(msgspec.Struct, tag="grammars", array_like=True):
    """The process of grammars to the parent: it has opened the tokenizer, and serves."""


Message = (
    Submit
    | Abort
    | Released
    | PromptScores
    | Deltas
    | Beat
    | EdgeBeat
    | Progress
    | Pulse
    | StepFailed
    | Call
    | Run
    | Sample
    | Encode
    | EncodeLayers
    | Answer
    | RankLoaded
    | Drain
    | Serve
    | NeighboursReady
    | GrammarsReady
)

_codec: Codec[Message] = Codec(Message)
encode, decode = _codec.encode, _codec.decode


async def read(reader: asyncio.StreamReader) -> Message:
    """The next message. Raises IncompleteReadError at the end of the stream, and InvalidFrame."""
    return decode(await frames.receive(reader))


class Channel:
    """A stream socket that carries messages; `send` may be called from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Raises OSError when the other side is gone."""
        with self._lock:
            self.connection.sendall(encode(message))

    def receive(self) -> Iterator[Message]:
        """Messages until the other side closes, or the connection breaks. Raises InvalidFrame."""
        with suppress(OSError), self.connection.makefile("rb") as stream:
            while (body := frames.read(stream)) is not None:
                yield decode(body)

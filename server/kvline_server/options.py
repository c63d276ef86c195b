"""What a server's parent is told: paths, ports, time limits. Frozen; tests shorten the limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvline_contract import names

KEY_FILE = Path(names.ACCESS_DIR) / names.ACCESS_FILE
TLS_FOLDER = Path(names.TLS_DIR)


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds."""

    stage: float = 300.0  # a stage without progress ends the start
    liveness: float = 60.0  # without a step while busy, or without an event-loop beat
    drain: float = 120.0  # where the launch names none; preStop + drain + exit 5 < grace
    poll: float = 0.1
    gate: float = 1.0


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """What clients of the API port may take; seconds, bytes and counts."""

    connections: int = 4096
    idle: float = 75.0  # between requests, and before the first
    head: float = 10.0
    head_bytes: int = 32 << 10
    headers: int = 100
    body: float = 30.0
    body_pause: float = 10.0  # between two parts of a body
    body_bytes: int = 32 << 20  # of all bodies that are being read
    pipeline: int = 8  # requests that wait behind one on their connection
    stall: float = 30.0  # a client that does not read its answer
    unread_tokens: int = 1000  # of an answer that its client does not read
    linger: float = 2.0  # for the rest of a request that was refused
    linger_bytes: int = 1 << 20
    late: float = 5.0  # of a drain: for what idle connections may still ask
    sweep: float = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    config: Path
    state_dir: Path
    gate: Path | None = None  # None: run by hand, always open
    record: Path | None = None
    key: Path = KEY_FILE  # read where the launch asks for a key
    tls: Path = TLS_FOLDER  # likewise, with tls.crt and tls.key
    host: str = "0.0.0.0"  # noqa: S104 - a pod's ports are its interface
    port: int = 8000
    internal_port: int = 8001
    memory: int | None = None
    threads: int | None = None
    termination_log: Path | None = None
    drain: int | None = None  # seconds, before what the launch and the limits say
    by_hand: bool = False  # from flags: messages name those
    limits: Limits = field(default_factory=Limits)
    edge: EdgeLimits = field(default_factory=EdgeLimits)

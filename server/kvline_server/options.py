"""What a server's parent is told: paths, ports, time limits. Frozen; tests shorten the limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvline_contract import names

KEY_FILE = Path(names.ACCESS_DIR) / names.ACCESS_FILE


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds."""

    stage: float = 300.0  # a stage without progress ends the start
    liveness: float = 60.0  # without a step while busy, or without an event-loop beat
    drain: float = 45.0  # preStop 15 + drain 45 + exit 5 < grace 70
    poll: float = 0.1
    gate: float = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    config: Path
    state_dir: Path
    gate: Path | None = None  # None: run by hand, always open
    record: Path | None = None
    key: Path = KEY_FILE  # read where the launch asks for a key
    host: str = "0.0.0.0"  # noqa: S104 - a pod's ports are its interface
    port: int = 8000
    internal_port: int = 8001
    memory: int | None = None
    threads: int | None = None
    termination_log: Path | None = None
    limits: Limits = field(default_factory=Limits)

    @property
    def socket(self) -> Path:
        """Where the engine listens for the HTTP process."""
        return self.state_dir / "engine.sock"

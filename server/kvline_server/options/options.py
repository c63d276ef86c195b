"""Options of a server: paths, ports, timeouts and limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvline_contract import names
from kvline_server.options.clients import ClientLimits
from kvline_server.options.timeouts import Timeouts

KEY_FILE = Path(names.ACCESS_DIR) / names.ACCESS_FILE
TLS_FOLDER = Path(names.TLS_DIR)


@dataclass(frozen=True, slots=True)
class Options:
    config: Path
    state_dir: Path
    gate: Path | None = None  # None: no gate, always open
    record: Path | None = None
    key: Path = KEY_FILE  # read if the launch requires a key
    tls: Path = TLS_FOLDER  # tls.crt and tls.key; read if the launch requires TLS
    host: str = "::"  # both families: a pod's ports are its interface
    port: int = 8000
    internal_port: int = 8001
    memory: int | None = None
    threads: int | None = None
    termination_log: Path | None = None
    http_processes: int | None = None  # None: as many as the pod's CPUs allow
    drain: int | None = None  # seconds; overrides the launch and the limits
    from_flags: bool = False  # started with flags, not a launch file: messages name flags
    timeouts: Timeouts = field(default_factory=Timeouts)
    clients: ClientLimits = field(default_factory=ClientLimits)

"""What the parent says in the log, and at its end."""

from __future__ import annotations

import sys
from pathlib import Path

from kvline_contract.report import Termination
from kvline_server.options.flags import with_flag_names


def log(text: str) -> None:
    print(f"kvline-server: {text}", file=sys.stderr, flush=True)


def leave(failure: Termination, from_flags: bool, file: Path | None) -> int:
    """Leaves the reason in the log and the termination message. -> the exit code"""
    log(f"{failure.name}: {with_flag_names(failure.message) if from_flags else failure.message}")
    if file is not None:
        try:
            file.write_text(failure.dumps())
        except OSError as failed:
            log(f"termination message not written: {failed}")
    return failure.code

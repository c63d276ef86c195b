"""Files out of a Go module, checked against its sum."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import golang
from errors import ClusterError


def folder(module: str, checksum: str, say: Callable[[str], None]) -> Path:
    """Where the module (path@version) lies; fetched once. Raises ClusterError."""
    command = [golang.ensure(say), "mod", "download", "-json", module]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    about = json.loads(done.stdout or "{}")
    if done.returncode or about.get("Sum") != checksum:
        why = about.get("Error") or done.stderr[-800:] or f"its sum is {about.get('Sum')}"
        raise ClusterError(f"{module} is not usable: {why}")
    return Path(about["Dir"])

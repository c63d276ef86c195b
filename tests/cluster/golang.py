"""A Go that can build Kubernetes: the machine's, or the pinned one from the Go module proxy.

Go's own releases are modules too (golang.org/toolchain), so any older go can fetch them through the
proxy it is set up for, checked against the public checksum database and against the sum below.
Source: go.dev/doc/toolchain.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import tools
from errors import ClusterError
from paths import CACHE

NEEDED = (1, 26, 6)  # of containerd
PINNED = "go1.26.6"
SUM = "h1:owmNw4SPM9h46FGOeGJVUWzFEEDSmO6g7gAtWoXp28s="
MODULE = f"golang.org/toolchain@v0.0.1-{PINNED}.linux-amd64"


def ensure(say: Callable[[str], None]) -> str:
    """The go command to build with."""
    fetched = CACHE / "tools" / PINNED
    for go in (shutil.which("go"), str(fetched / "bin" / "go")):
        if go and Path(go).is_file() and _version(go) >= NEEDED:
            return go
    started = time.monotonic()
    _fetch(fetched, say)
    say(f"fetched {PINNED} ({time.monotonic() - started:.0f} s)")
    return str(fetched / "bin" / "go")


def _version(go: str) -> tuple[int, ...]:
    text = subprocess.run([go, "version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"go(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part or 0) for part in found.groups()) if found else (0,)


def download(go: str, module: str, checksum: str, **environment: str) -> Path:
    """The folder of a module (path@version), checked against its sum. Raises ClusterError."""
    done = subprocess.run(
        [go, "mod", "download", "-modcacherw", "-json", module],
        cwd="/",
        env={**os.environ, "GOFLAGS": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    about = json.loads(done.stdout or "{}")
    if done.returncode or about.get("Sum") != checksum:
        why = about.get("Error") or done.stderr[-800:] or f"its sum is {about.get('Sum')}"
        raise ClusterError(f"{module} is not usable: {why}")
    return Path(about["Dir"])


def _fetch(target: Path, say: Callable[[str], None]) -> None:
    tools.ensure_packages(say, {"go": "golang-go"})
    cache = target.with_name(f".{PINNED}")
    cache.mkdir(parents=True, exist_ok=True)
    folder = download("go", MODULE, SUM, GOMODCACHE=str(cache), GOTOOLCHAIN="local")
    for program in (*folder.glob("bin/*"), *folder.glob("pkg/tool/**/*")):
        program.chmod(0o755)  # modules carry no execute bits
    folder.rename(target)
    shutil.rmtree(cache)

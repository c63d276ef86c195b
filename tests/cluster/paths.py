"""Where the local cluster keeps things: a cache outside the working tree, for demo and tests."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("KVLINE_CACHE", Path.home() / ".cache" / "kvline"))
BIN = CACHE / "bin"
CLUSTERS = CACHE / "clusters"
GO = Path(__file__).parent / "go"

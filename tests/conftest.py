"""Shared by all tests: where the cluster's modules are found."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / name) for name in ("cluster", "server")]

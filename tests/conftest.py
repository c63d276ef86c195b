"""Shared by all tests: where the cluster's modules are found, and which faults a run had."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [
    str(Path(__file__).parent / name) for name in ("cluster", "server", "operator", ".")
]

import catalogue  # noqa: E402


def pytest_configure(config: Any) -> None:
    catalogue.configure(config)

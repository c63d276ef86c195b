"""The GPU story's modules, which demo/ has."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "demo"))

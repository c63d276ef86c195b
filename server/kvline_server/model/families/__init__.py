"""One file per architecture, from config.json to a ModelConfig: a new dense one is a new file here.

Each has ARCHITECTURE, its name in config.json, and `read`. They import no torch.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any


@functools.cache
def known() -> dict[str, Callable[[Any], Any]]:
    """From an architecture's name to its `read`, which makes a ModelConfig of Fields."""
    modules = (
        importlib.import_module(f"{__name__}.{found.name}")
        for found in pkgutil.iter_modules(__path__)
    )
    return {module.ARCHITECTURE: module.read for module in modules}

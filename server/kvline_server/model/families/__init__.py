"""One file per architecture, from config.json to a ModelConfig: a new dense one is a new file here.

Each has ARCHITECTURE and MODEL_TYPE, its names in config.json, and `read`, which makes a
ModelConfig of Fields. They import no torch.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from types import ModuleType


@functools.cache
def known() -> dict[str, ModuleType]:
    """From an architecture's name to its file."""
    modules = (
        importlib.import_module(f"{__name__}.{found.name}")
        for found in pkgutil.iter_modules(__path__)
    )
    return {module.ARCHITECTURE: module for module in modules}

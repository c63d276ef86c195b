"""One file per architecture, from config.json to a ModelConfig: a new dense one is a new file here.

Each has ARCHITECTURE and MODEL_TYPE, its names in config.json, and `read`, which makes a
ModelConfig of Fields; and BESIDE (model/towers.py) where there are checkpoints of its model with
towers. They import no torch.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from types import ModuleType

from kvline_server.model.towers import Beside


@functools.cache
def known() -> dict[str, ModuleType]:
    """From an architecture's name to its file."""
    modules = (
        importlib.import_module(f"{__name__}.{found.name}")
        for found in pkgutil.iter_modules(__path__)
    )
    found = {module.ARCHITECTURE: module for module in modules}
    towered = {beside(module): module for module in found.values()}
    return found | {beside.architecture: module for beside, module in towered.items() if beside}


def beside(family: ModuleType) -> Beside | None:
    """Of its checkpoints with towers, where there are any."""
    made: Beside | None = getattr(family, "BESIDE", None)
    return made

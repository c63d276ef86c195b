"""The previous version's operator and server, from this clone's history."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from errors import ClusterError
from paths import ROOT

# Of the API group kvline.dev, with a chart, verdicts, and an annotation for each decision.
COMMIT = "7fc0ac7a875d"
# The last commit that knew version 1 of the sizing report alone.
REPORT_1 = "ca5c733dd5c1"
SCRIPT = (
    "import build, json; made = build.build(lambda _: None); "
    "print(json.dumps({i.component: i.name for i in made}))"
)


def unpack(folder: Path, commit: str = COMMIT) -> bool:
    """Its tree, in `folder`; false where this clone's history does not reach back to it."""
    packed = subprocess.run(
        ["git", "archive", commit], cwd=ROOT, capture_output=True, check=False
    ).stdout
    if packed:
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            tar.extractall(folder, filter="data")
    return bool(packed)


def as_of_group(tree: Path, group: str) -> None:
    """The tree as if its API group had had this name: for what does not depend on the name."""
    names = tree / "server" / "kvline_contract" / "names.py"
    text = names.read_text()
    for before in ('GROUP = "kvline.dev"', 'CRD_TITLE = "kvline.dev schema "'):
        assert before in text
        text = text.replace(before, before.replace("kvline.dev", group))
    names.write_text(text)


def images(tree: Path) -> dict[str, str]:
    """The name of each component's image, built by the tree's own code where the store has none."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tree / "tests" / "cluster",
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ClusterError(f"the images of {COMMIT} failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def build(say: Callable[[str], None]) -> None:
    """Builds its images ahead, so that no test waits for them."""
    with tempfile.TemporaryDirectory() as folder:
        if unpack(Path(folder)):
            images(Path(folder))
            say(f"the images of {COMMIT} are there")

"""Building the clusters' images after an earlier build was interrupted."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import build
import pytest

pytestmark = pytest.mark.integration


@pytest.mark.skipif(os.geteuid() != 0, reason="buildah's mounts need root")
def test_a_build_that_was_cut_off_does_not_keep_layers_from_being_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image store after a build on a full disk: one of its containers is still mounted."""
    store = ["--root", f"{tmp_path}/root", "--runroot", f"{tmp_path}/run"]
    buildah = ["buildah", *store, "--storage-driver", "overlay"]
    monkeypatch.setattr(build, "BUILDAH", buildah)

    def run(*words: str) -> str:
        return subprocess.run([*buildah, *words], check=True, capture_output=True, text=True).stdout

    container = run("from", "scratch").strip()
    (tmp_path / "file").write_text("a layer's")
    run("add", container, str(tmp_path / "file"), "/")
    run("commit", container, "layer")
    run("mount", container)
    layers = tmp_path / "root" / "overlay"
    with pytest.raises(OSError) as refused:
        os.link(next(layers.glob("*/diff/file")), tmp_path / "link")
    assert refused.value.errno == errno.EXDEV
    build.release()
    os.link(next(layers.glob("*/diff/file")), tmp_path / "link")

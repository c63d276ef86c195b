"""What the README says to apply, in a namespace that the demo has not prepared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import settings
from playground import ROOT, Space

pytestmark = pytest.mark.integration


def test_the_demo_s_cluster_has_a_volume_for_a_claim_of_any_namespace(
    space: Space, until: Callable[..., Any], tmp_path: Path
) -> None:
    kubectl = space.cluster.kubectl
    space.cluster.spare_volumes(2, tmp_path)
    try:
        space.kubectl("apply", "-f", str(ROOT / "demo" / "claim.yaml"))
        space.kubectl("apply", "-f", str(ROOT / "manifests" / "samples" / "chat.yaml"))
        until(lambda: (space.get("pvc", "models") or {})["status"].get("phase") == "Bound", 30)
        chat = space.get("kvl", "chat")
        assert chat is not None and chat["spec"]["model"]["source"].startswith("pvc://models/")
    finally:  # other tests count on claims that nothing binds
        kubectl("delete", "storageclass", settings.STORAGE_CLASS)
        kubectl("delete", "pv", "kvline-spare-1", "kvline-spare-2", "--wait=false")

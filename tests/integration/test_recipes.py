"""Recipes for other autoscalers, checked with their schemas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import crd
import golang
import pytest

pytestmark = pytest.mark.integration

RECIPES = Path(__file__).resolve().parents[2] / "monitoring" / "recipes"
KEDA = "github.com/kedacore/keda/v2@v2.21.0"
SUM = "h1:R6z2HZvstK4RLUMxroNACzBj74xGxt3kG59b5Xc+Xps="


@pytest.fixture
def keda(cluster: Any) -> Iterator[None]:
    """KEDA's CRD of a ScaledObject in the API server."""
    folder = golang.download(golang.ensure(print), KEDA, SUM)
    file = folder / "config/crd/bases/keda.sh_scaledobjects.yaml"
    crd.define(cluster.kubectl, file)
    yield
    cluster.kubectl("delete", "-f", str(file))


def test_keda_s_scaled_object_is_one_and_aims_at_a_service(keda: None, space: Any) -> None:
    file = str(RECIPES / "keda.yaml")
    space.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", file)
    wrong = (RECIPES / "keda.yaml").read_text().replace("maxReplicaCount", "maxReplicas")
    refused = space.kubectl(
        "apply", "--dry-run=server", "--validate=strict", "-f", "-", input=wrong, check=False
    )
    assert "maxReplicas" in refused.stderr, "the schema is asked"

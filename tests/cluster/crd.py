"""A CustomResourceDefinition, applied and served."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Protocol

from errors import ClusterError, NotWithin
from paths import ROOT
from programs import limit

FILE = ROOT / "manifests" / "crd.yaml"
SECONDS = 30


class Kubectl(Protocol):
    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]: ...


def define(kubectl: Kubectl, file: Path = FILE) -> None:
    """Raises NotWithin when the API server does not serve it in time.

    A new definition has `conditions: null` until the API server has filled them in, and
    `kubectl wait` takes that for an error: so the condition is polled instead.
    """
    kubectl("apply", "--server-side", "-f", str(file))
    end = time.monotonic() + limit(SECONDS)
    while not _is_established(kubectl, file):
        if time.monotonic() > end:
            raise NotWithin(f"{file.name}: not Established after {limit(SECONDS):.0f} s")
        time.sleep(0.1)


def undefine(kubectl: Kubectl, name: str) -> None:
    """Deletes it, and returns once kubectl has it no longer in its cache, from which it would
    resolve a short name for minutes. Raises NotWithin when the API server serves it for too long.
    """
    kubectl("delete", "crd", name, "--ignore-not-found")
    plural, _, group = name.partition(".")
    end = time.monotonic() + limit(SECONDS)
    # Without --cached it is read, and the cache written, anew.
    while plural in kubectl("api-resources", f"--api-group={group}", "-o", "name").stdout:
        if time.monotonic() > end:
            raise NotWithin(f"{name}: served {limit(SECONDS):.0f} s after its deletion")
        time.sleep(0.5)


def _is_established(kubectl: Kubectl, file: Path) -> bool:
    established = "jsonpath={.status.conditions[?(@.type=='Established')].status}"
    try:
        return kubectl("get", "-f", str(file), "-o", established).stdout == "True"
    except ClusterError:  # no conditions yet
        return False

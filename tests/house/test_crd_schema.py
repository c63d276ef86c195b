"""The CRD's number follows its fields: an operator tells an older definition by it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from kvline_contract.names import CRD_SCHEMA, CRD_TITLE

ROOT = Path(__file__).resolve().parents[2]
DIGEST = "c7c4744c1848"  # of the fields of schema CRD_SCHEMA


def fields(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Each field and its type; descriptions may change."""
    yield f"{path} {schema.get('type')} {schema.get('enum')}"
    for name, body in schema.get("properties", {}).items():
        yield from fields(body, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from fields(schema[key], f"{path}[]")


def test_new_fields_raise_the_schema_s_number() -> None:
    crd = yaml.safe_load((ROOT / "manifests" / "crd.yaml").read_text())
    (version,) = crd["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    assert schema["title"] == f"{CRD_TITLE}{CRD_SCHEMA}"
    digest = hashlib.sha256("\n".join(sorted(fields(schema))).encode()).hexdigest()[:12]
    assert digest == DIGEST, (
        "the fields changed: raise CRD_SCHEMA in server/kvline_contract/names.py and the title in "
        f"manifests/crd.yaml once a release, and write {digest} here"
    )

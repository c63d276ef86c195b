"""Writes docs/api.md from manifests/crd.yaml, so that the page cannot say what the API does not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# The API

Generated from `manifests/crd.yaml` by `make api`. Group `kvline.dev`, version `v1alpha1`, kind
`InferenceService`, short name `kvl`. `kubectl explain kvl.spec` shows the same.
"""


def main() -> int:
    crd = yaml.safe_load((ROOT / "manifests" / "crd.yaml").read_text())
    version = crd["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]["properties"]
    lines = [HEAD, "## Columns", "", "| column | path | wide only |", "|---|---|---|"]
    for column in version["additionalPrinterColumns"]:
        wide = "yes" if column.get("priority") else ""
        path = column["jsonPath"].replace("|", "\\|")
        lines.append(f"| {column['name'].upper()} | `{path}` | {wide} |")
    for part in ("spec", "status"):
        lines += ["", f"## {part}", "", schema[part].get("description", ""), ""]
        lines += ["| field | type | bounds | meaning |", "|---|---|---|---|"]
        lines += rows(schema[part], part)
        lines += ["", *rules(schema[part], part)]
    text = "\n".join(lines).rstrip() + "\n"
    target = ROOT / "docs" / "api.md"
    if sys.argv[1:] == ["--check"]:
        return 0 if target.read_text() == text else 1
    target.write_text(text)
    return 0


def rows(schema: dict[str, Any], path: str) -> list[str]:
    out = []
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        where = f"{path}.{name}"
        star = " (required)" if name in required else ""
        meaning = field.get("description", "").replace("|", "\\|")
        out.append(f"| `{where}`{star} | {field['type']} | {bounds(field)} | {meaning} |")
        out += rows(field, where)
        if field["type"] == "array":
            out += rows(field["items"], f"{where}[]")
    return out


def bounds(field: dict[str, Any]) -> str:
    parts = []
    if "enum" in field:
        parts.append(", ".join(map(str, field["enum"])))
    if "minimum" in field or "maximum" in field:
        parts.append(f"{field.get('minimum', '')} to {field.get('maximum', '')}")
    for key, word in (
        ("maxLength", "characters"),
        ("maxItems", "items"),
        ("maxProperties", "keys"),
    ):
        if key in field:
            parts.append(f"at most {field[key]} {word}")
    if "default" in field:
        parts.append(f"default {field['default']}")
    return "; ".join(parts)


def rules(schema: dict[str, Any], path: str) -> list[str]:
    out = [f"- `{path}`: {r['message']}" for r in schema.get("x-kubernetes-validations", [])]
    for name, field in schema.get("properties", {}).items():
        out += rules(field, f"{path}.{name}")
    return out


if __name__ == "__main__":
    sys.exit(main())

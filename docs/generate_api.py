"""Writes docs/api.md from manifests/crd.yaml, and the reasons in docs/operations.md from the
operator's own words, so that no page says what the software does not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from kvline_operator.report.advice import ADVICE

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# The API

Generated from `manifests/crd.yaml` by `make api`. Group `serving.kvline.dev`, version `v1alpha1`,
kind `InferenceService`, short name `kvl`. `kubectl explain kvl.spec` shows the same.
"""


BEGIN, END = "<!-- reasons: written by make api -->\n", "<!-- end -->\n"


def main() -> int:
    pages = {ROOT / "docs" / "api.md": api(), ROOT / "docs" / "operations.md": operations()}
    stale = [path for path, text in pages.items() if path.read_text() != text]
    if sys.argv[1:] == ["--check"]:
        return 1 if stale else 0
    for path in stale:
        path.write_text(pages[path])
    return 0


def operations() -> str:
    """The page with its table of reasons made anew; the rest is written by hand."""
    before, _, rest = (ROOT / "docs" / "operations.md").read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    lines = ["| condition, reason | what happened | what to do |", "|---|---|---|"]
    for item in ADVICE:
        reasons = ", ".join(item.reasons)
        lines.append(f"| {item.condition} / {reasons} | {item.happened} | {item.do} |")
    return before + BEGIN + "\n".join(lines) + "\n" + END + after


def api() -> str:
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
    return "\n".join(lines).rstrip() + "\n"


def rows(schema: dict[str, Any], path: str) -> list[str]:
    out = []
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        where = f"{path}.{name}"
        star = " (required)" if name in required else ""
        meaning = field.get("description", "").replace("|", "\\|")
        out.append(f"| `{where}`{star} | {kind(field)} | {bounds(field)} | {meaning} |")
        if meaning.startswith("As a pod's"):
            continue  # Kubernetes documents its fields
        out += rows(field, where)
        if kind(field) == "array":
            out += rows(field["items"], f"{where}[]")
    return out


def kind(field: dict[str, Any]) -> str:
    return "quantity" if field.get("x-kubernetes-int-or-string") else str(field["type"])


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

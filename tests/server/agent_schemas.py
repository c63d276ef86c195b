"""Ten tools as coding agents send them: 68 kB, most of it long descriptions, and schemas as Zod and
hand-written ones are."""

from __future__ import annotations

import random
from typing import Any

from kvline_server.formats.tools import Tool

LONG = 975  # words of the longest descriptions
DRAFT = "https://json-schema.org/draft/2020-12/schema"
TEXT = (
    'the file path must be absolute, not relative; use `grep` with "quotes" and {braces}, never '
    "cd <dir> && cmd | tail -n 5\\n output over 30000 signs is cut — don't guess: read it "
    "first, then edit; e.g. src/main.ts:42 (line, column) [optional] 100% café"
)
WORDS = TEXT.split(" ")


def words(count: int, seed: str) -> str:
    """Lines and lists, in the signs that descriptions have."""
    chosen, out = random.Random(seed), list[str]()
    for number in range(count):
        out.append(chosen.choice(WORDS))
        if number % 12 == 11:
            out.append("\n-" if chosen.random() < 0.5 else "\n\n")
    return " ".join(out)


def text(name: str, count: int = 20, **more: Any) -> dict[str, Any]:
    return {"type": "string", "description": words(count, name), **more}


def tool(name: str, required: str, properties: dict[str, Any], **more: Any) -> Tool:
    schema = {"type": "object", "properties": properties, "required": required.split()}
    return Tool(name, {**schema, **more}, strict=True)


ZOD: dict[str, Any] = {"additionalProperties": False, "$schema": DRAFT}
OFFSET = {"type": "integer", "minimum": 0, "maximum": 2**53 - 1, "description": "a line"}
ENTRY = {
    "type": "object",
    "properties": {
        "content": text("todo", minLength=1),
        "status": {"type": "string", "enum": ["pending", "in_progress", "completed", "cancelled"]},
        "priority": {"type": "string", "enum": ["high", "medium", "low"]},
        "id": text("todo id"),
    },
    "required": ["content", "status", "priority", "id"],
    "additionalProperties": False,
}
EDIT = {
    "type": "object",
    "properties": {
        "old_string": text("old"),
        "new_string": text("new"),
        "replace_all": {"type": "boolean", "default": False},
    },
    "required": ["old_string", "new_string"],
}

AGENT_TOOLS = (
    tool(
        "bash",
        "command description",
        {
            "command": text("command", LONG),
            "timeout": {"type": "number", "exclusiveMinimum": 0, "description": "milliseconds"},
            "workdir": text("workdir"),
            "description": text("description", 400),
        },
        **ZOD,
    ),
    tool(
        "read",
        "filePath",
        {"filePath": text("read", LONG), "offset": OFFSET, "limit": OFFSET},
        **ZOD,
    ),
    tool(
        "write", "filePath content", {"filePath": text("write", LONG), "content": text("c")}, **ZOD
    ),
    tool(
        "edit",
        "filePath edits",
        {
            "filePath": text("edit", LONG),
            "edits": {"type": "array", "items": EDIT, "minItems": 1},
        },
        **ZOD,
    ),
    tool("glob", "pattern", {"pattern": text("glob", LONG), "path": text("path")}),
    tool(
        "grep_search",
        "pattern",
        {
            "pattern": text("grep", LONG),
            "path": text("path"),
            "include": text("include"),
            "maxResults": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100},
            "outputMode": {"enum": ["content", "files_with_matches", "count"]},
        },
    ),
    tool(
        "list",
        "path",
        {
            "path": text("list", LONG),
            "ignore": {"type": "array", "items": text("ignore")},
        },
        **ZOD,
    ),
    tool(
        "task",
        "description prompt subagent_type",
        {
            "description": text("short"),
            "prompt": text("task", LONG),
            "subagent_type": {"anyOf": [{"enum": ["general", "explore"]}, {"type": "string"}]},
            "task_id": {"anyOf": [text("resume"), {"type": "null"}]},
        },
        **ZOD,
    ),
    tool(
        "todowrite",
        "todos",
        {"todos": {"type": "array", "items": ENTRY, "description": words(LONG, "t")}},
        **ZOD,
    ),
    tool(
        "webfetch",
        "url format",
        {
            "url": text("url", LONG),
            "format": {"type": "string", "enum": ["text", "markdown", "html"]},
            "headers": {"type": "object", "additionalProperties": {"type": "string"}},
            "timeout": {"type": ["integer", "null"], "maximum": 120},
        },
    ),
)

"""How a client's cases are asked for: a name a line on the standard input, an answer a line on the
standard output; an empty line asks for all names. Runs in the client's own environment.

Outputs of the server are chosen by a text in the prompt, tests/clients/outputs.py.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

URL, KEY = sys.argv[1:3]
V1 = f"{URL}/v1"
MODEL = "tiny"
TEXT, CALL, CALLS = "Hello. forced:text", "Weather? forced:call", "Weather? forced:calls"
REASONING, OBJECT = "Weather? forced:reasoning", "As JSON. forced:json"
FREE = "Weather? forced:thought"  # then the model itself answers, as a grammar lets it
TOO_LONG = "weather " * 70_000
CITIES = ["Paris", "Rome"]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "of a city", "parameters": PARAMETERS}
TOOL: Any = {"type": "function", "function": FUNCTION}
RESULT = "sunny"


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def failure(call: Callable[[], object]) -> dict[str, Any]:
    """How the client reports what the server refuses."""
    try:
        got = call()
    except Exception as error:
        status, code = getattr(error, "status_code", None), getattr(error, "code", None)
        return {"error": type(error).__name__, "status": status, "code": code}
    raise AssertionError(f"no error: {got!r}")


def calls(
    whole: Callable[[str], object], streamed: Callable[[str], object]
) -> dict[str, Callable[[], object]]:
    """The cases of one call and of several, by what a client makes of a prompt's answer."""
    return {
        "tools": lambda: whole(CALL),
        "tools_stream": lambda: streamed(CALL),
        "parallel": lambda: whole(CALLS),
        "parallel_stream": lambda: streamed(CALLS),
    }


def answer(cases: Mapping[str, Callable[[], object]]) -> None:
    """Until the input ends. What a client prints goes to the standard error."""
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for line in sys.stdin:
            name = line.strip()
            try:
                found: dict[str, Any] = {"value": cases[name]() if name else list(cases)}
            except BaseException:
                found = {"failure": traceback.format_exc(limit=-6)}
            out.write(json.dumps(found) + "\n")
            out.flush()

"""Renders one chat template, in a process that can be ended: an endless template takes its second
of CPU time and no more of chat, and one that fills the memory gets an error.

Frames on stdin and stdout (ipc/frames.py), JSON or text. The first gives the template, and the
one for requests with tools where there is another; its answer says whether it is valid. Each later
one is a conversation, answered with OK, the text and its characters' origins (traced.py), or with
FAILED and a text. Imports no more than jinja2: its memory is beside the KV cache.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

from kvline_server.http.rendered import FAILED, OK, packed
from kvline_server.http.template import ChatTemplate, TemplateFailed
from kvline_server.http.traced import origins
from kvline_server.ipc import frames

# Bytes that compiling may take: about 550 for a character of a template were measured.
COMPILING, COMPILING_PER_CHARACTER = 16 << 20, 1 << 10


def main() -> int:
    source, out = sys.stdin.buffer, sys.stdout.buffer
    given = json.loads(frames.read(source) or "{}")
    if not given:
        return 0
    plain, with_tools = given["templates"]
    # jinja2 computes constants while it compiles.
    _limit_memory(COMPILING + COMPILING_PER_CHARACTER * len(plain + (with_tools or "")))
    _limit_time(given["compiling"])
    templates, known = _compiled(plain, with_tools)
    _limit_time(0)
    _limit_memory(given["memory"])
    frames.write(out, json.dumps(known).encode())
    while "invalid" not in known and (job := frames.read(source)) is not None:
        _limit_time(given["seconds"])
        answer = _render(templates, job)
        _limit_time(0)
        del job
        frames.write(out, answer)
        del answer
    return 0


def _compiled(
    plain: str, with_tools: str | None
) -> tuple[dict[bool, ChatTemplate], dict[str, Any]]:
    """-> the template by whether there are tools; what is known of them (renderers.py)"""
    try:
        template = ChatTemplate(plain)
    except TemplateFailed as error:
        return {}, {"invalid": str(error)}
    templates = {False: template, True: template}
    known: dict[str, Any] = {"documents": "documents" in template.reads}
    try:
        if with_tools is not None:
            templates[True] = ChatTemplate(with_tools)
    except TemplateFailed as error:
        return templates, {**known, "no_tools": f"'tool_use' {error}"}
    if "tools" not in templates[True].reads:
        known["no_tools"] = "does not read them"
    return templates, known


def _render(templates: dict[bool, ChatTemplate], job: bytes) -> bytes:
    try:
        given = json.loads(job)
        tools = given["variables"]["tools"] or []
        text = _rendered(templates[bool(tools)], given, tools)
        return OK + packed(text, origins(text))
    except TemplateFailed as error:
        return FAILED + str(error).encode("utf-8", "replace")
    except UnicodeEncodeError:
        return FAILED + b"wrote half of a surrogate pair"
    except MemoryError:
        return FAILED + b"took more memory than it may"


def _rendered(template: ChatTemplate, given: dict[str, Any], tools: list[dict[str, Any]]) -> str:
    """Once more with descriptions where a tool has none; the first failure is the one that counts.
    Raises TemplateFailed."""
    try:
        return template.render(**given)
    except TemplateFailed as failed:
        if _described(tools):
            with suppress(TemplateFailed):
                return template.render(**given)
        raise failed from None


def _described(tools: list[dict[str, Any]]) -> bool:
    """Gives an empty description to each that has none, in its place behind the name; whether there
    was one. Some templates cannot do without, such as gpt-oss'."""
    bare = [each for each in tools if "description" not in each["function"]]
    for each in bare:
        name = each["function"]["name"]
        each["function"] = {"name": name, "description": "", **each["function"]}
    return bool(bare)


def _limit_time(seconds: float) -> None:
    """The kernel ends this process after so much CPU time, whatever it does; 0: no limit. CPU time,
    because a busy node is no fault of a template."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_memory(growth: int) -> None:
    """`growth`: bytes beside what is used now."""
    with open("/proc/self/status", encoding="ascii") as status:
        used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + growth, hard))


if __name__ == "__main__":
    sys.exit(main())

"""Renders one chat template, in a process that can be ended: an endless template takes its second
of CPU time and no more of chat, and one that fills the memory gets an error.

Frames on stdin and stdout (ipc/frames.py), JSON or text. The first gives the template; its
answer says whether it is valid. Each later one is a conversation, answered with OK, the text and
its characters' origins (traced.py), or with FAILED and a text. Imports no more
than jinja2: its memory is beside the KV cache.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
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
    # jinja2 computes constants while it compiles.
    _limit_memory(COMPILING + COMPILING_PER_CHARACTER * len(given["template"]))
    _limit_time(given["compiling"])
    try:
        template = ChatTemplate(given["template"])
        known: dict[str, Any] = {"documents": "documents" in template.reads}
    except TemplateFailed as error:
        known = {"invalid": str(error)}
    _limit_time(0)
    _limit_memory(given["memory"])
    frames.write(out, json.dumps(known).encode())
    while "invalid" not in known and (job := frames.read(source)) is not None:
        _limit_time(given["seconds"])
        answer = _render(template, job)
        _limit_time(0)
        del job
        frames.write(out, answer)
        del answer
    return 0


def _render(template: ChatTemplate, job: bytes) -> bytes:
    try:
        text = template.render(**json.loads(job))
        return OK + packed(text, origins(text))
    except TemplateFailed as error:
        return FAILED + str(error).encode("utf-8", "replace")
    except UnicodeEncodeError:
        return FAILED + b"wrote half of a surrogate pair"
    except MemoryError:
        return FAILED + b"took more memory than it may"


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

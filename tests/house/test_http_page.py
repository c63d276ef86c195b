"""docs/api-http.md names every field of the protocol, and lists the neutral values as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pydantic import BaseModel

from kvline_server.http.neutral import CHAT, COMPLETION, EVERY
from kvline_server.http.protocol.anthropic import MessagesRequest
from kvline_server.http.protocol.chat import ChatRequest
from kvline_server.http.protocol.completions import CompletionRequest
from kvline_server.http.protocol.responses import ResponsesRequest
from kvline_server.http.protocol.tokenize import Detokenize, TokenizeChat, TokenizeText

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api-http.md"


def test_every_field_is_on_the_page() -> None:
    named = set(re.findall(r"`([a-z_]+)`", PAGE.read_text().partition("## What is not built")[0]))
    kinds: list[type[BaseModel]] = [CompletionRequest, ChatRequest, ResponsesRequest]
    kinds += [MessagesRequest, TokenizeText, TokenizeChat, Detokenize]
    assert not {name for kind in kinds for name in kind.model_fields} - named


def test_neutral_values_are_listed_as_they_are() -> None:
    expected = []
    for name in sorted({*COMPLETION, *CHAT}):
        routes = [("", EVERY)] if name in EVERY else [("completions", COMPLETION), ("chat", CHAT)]
        taken = [
            " or ".join(f"`{json.dumps(v)}`" for v in table[name])
            + (f" ({route})" if route else "")
            for route, table in routes
            if name in table
        ]
        expected.append(f"| `{name}` | {', '.join(taken)} |")
    assert "\n".join(expected) in PAGE.read_text()

"""Errors of a translated request by the fields that its client sent."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from kvline_server.http.errors import BadRequest, NoGrammar

_TOOL = re.compile(r"tools\[(\d+)\](?:\.function)?(.*)")
_PART = r"\.tool_calls\[\d+\]|\.content\[\d+\]\.image_url"
_MESSAGE = re.compile(rf"(messages\[\d+\])(?:{_PART})?")
_WHOLE = ("messages", "prompt")  # what comes from no item of the client's
Field = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Fields:
    """Of another API: which of its fields one of the chat's comes from."""

    names: Mapping[str, str]  # by the chat's
    parameters: str  # of a tool
    tools: list[str]  # by the chat's index: some were left out, or in groups
    items: Mapping[str, str]  # by the chat's message, and by a call or an image in one

    def of(self, param: str, /) -> str:
        found = _TOOL.fullmatch(param)
        if found and int(found[1]) < len(self.tools):
            rest = found[2]
            if rest.startswith(".parameters"):
                rest = f".{self.parameters}{rest.removeprefix('.parameters')}"
            return self.tools[int(found[1])] + rest
        if found := _MESSAGE.match(param):
            return self.items.get(found[0]) or self.items.get(found[1], self.names["messages"])
        for name, own in self.names.items():
            rest = param.removeprefix(name)
            if param.startswith(name) and rest[:1] in ("", ".", "["):
                return own if name in _WHOLE else own + rest
        return param


@contextmanager
def named(field: Field) -> Iterator[None]:
    """Errors within name the client's field."""
    try:
        yield
    except (BadRequest, NoGrammar) as error:
        if error.param is None or (own := field(error.param)) == error.param:
            raise
        message = error.message
        if message.startswith(error.param):
            message = own + message.removeprefix(error.param)
        raise type(error)(message, own, error.code) from None

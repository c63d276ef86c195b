"""Errors of a translated request by the fields that its client sent."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from kvline_server.http.errors import BadRequest, NoGrammar

_TOOL = re.compile(r"tools\[(\d+)\](?:\.function)?(.*)")
_WHOLE = ("messages", "prompt")  # items of one are not those of the other
Field = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Fields:
    """Of another API: which of its fields one of the chat's comes from."""

    names: Mapping[str, str]  # by the chat's
    parameters: str  # of a tool
    tools: list[str]  # by the chat's index: some were left out, or in groups

    def of(self, param: str, /) -> str:
        found = _TOOL.fullmatch(param)
        if found and int(found[1]) < len(self.tools):
            rest = found[2]
            if rest.startswith(".parameters"):
                rest = f".{self.parameters}{rest.removeprefix('.parameters')}"
            return self.tools[int(found[1])] + rest
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

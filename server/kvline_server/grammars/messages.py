"""Messages of the grammar processes: tagged msgpack structs in frames.

HTTP sends Compile and Release, and gets Compiled or Refused. The engine sends Attach, Begin, End
and Advance, and gets Attached and Filled; masks are in memory that it shares. The process that
fills masks has grammars tried by the one that started it: Try, Tried.
"""

from __future__ import annotations

import msgspec

from kvline_server.grammars.grammar import Grammar
from kvline_server.ipc.codec import Codec


class Compile(msgspec.Struct, tag="compile", array_like=True):
    """The grammar is kept until its Release, or the connection's end."""

    id: int
    grammar: Grammar


class Release(msgspec.Struct, tag="release", array_like=True):
    """Ends one Compile of it."""

    key: bytes


class Compiled(msgspec.Struct, tag="compiled", array_like=True):
    id: int
    key: bytes


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """The grammar cannot be served; or not now, where it may be `later`."""

    id: int
    reason: str
    later: bool = False


class Attach(msgspec.Struct, tag="attach", array_like=True):
    """The engine's first message; `rows` of masks are in the memory that it shares."""

    rows: int


class Attached(msgspec.Struct, tag="attached", array_like=True):
    words: int  # of a row; a mask is in the first of them


class Begin(msgspec.Struct, tag="begin", array_like=True):
    """A sequence, whose text follows the grammar."""

    sequence: int
    key: bytes


class End(msgspec.Struct, tag="end", array_like=True):
    sequence: int


class Wanted(msgspec.Struct, array_like=True):
    """The mask of a sequence's next token, and of those behind each of its drafts."""

    sequence: int
    tokens: list[int]  # that it gained since the last time
    drafts: list[int]
    row: int  # of the first mask; the others follow


class Advance(msgspec.Struct, tag="advance", array_like=True):
    """A step, for a Filled."""

    step: int
    wanted: list[Wanted]


class Filled(msgspec.Struct, tag="filled", array_like=True):
    """Every row that was wanted is filled; those of failed sequences allow everything."""

    step: int
    finished: list[int]  # sequences that nothing but an end token may follow
    failed: list[tuple[int, str]]  # and why


class Try(msgspec.Struct, tag="try", array_like=True):
    id: int
    grammar: Grammar


class Tried(msgspec.Struct, tag="tried", array_like=True):
    id: int
    reason: str = ""  # why it is refused; empty where it is not
    size: int = 0  # bytes that it takes
    later: bool = False  # another time it may be served


class Alive(msgspec.Struct, tag="alive", array_like=True):
    """A pulse of the process that fills masks."""


Message = (
    Compile
    | Release
    | Compiled
    | Refused
    | Attach
    | Attached
    | Begin
    | End
    | Advance
    | Filled
    | Try
    | Tried
    | Alive
)

_codec: Codec[Message] = Codec(Message)
encode, decode = _codec.encode, _codec.decode

"""Writes a stub: a shared library that gives symbols and does nothing.

Data is zero, but for the description of a C++ class, which must name it: pybind11 reads the names
when torch registers classes. A C function of CUDA returns `cudaErrorNoDevice`, or that in words
where it returns a text. Any other function is C++ that nothing reaches without a device: an illegal
instruction ends the process there. x86-64 only.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kvline_image.elf import (
    DYNAMIC,
    GLOBAL,
    HASH,
    LOAD,
    NEEDED,
    PAGE,
    SONAME,
    STRTAB,
    SYMTAB,
    VERSYM,
    X86_64,
    Symbol,
)

RELA, RELASZ, RELAENT, STRSZ, SYMENT = 7, 8, 9, 10, 11
VERDEF, VERDEFNUM, GNU_STACK = 0x6FFFFFFC, 0x6FFFFFFD, 0x6474E551
OBJECT, FUNCTION = 1, 2
R_64, R_RELATIVE = 1, 8
READ, WRITE, EXECUTE = 4, 2, 1
SYMBOL, MOVED = "<IBBHQQ", "<QQq"  # entries of their tables
HEADERS = 64 + 4 * 56
TAGS = 13
OBJECT_SIZE = 512  # enough for a table of 64 virtual functions

NO_DEVICE = 100
ERROR = b"\xb8" + struct.pack("<I", NO_DEVICE) + b"\xc3"  # mov eax, 100; ret
ILLEGAL = b"\x0f\x0b"  # ud2
TEXTS = ("GetErrorName", "GetErrorString")
VARIABLES = frozenset(["_ZN4c10d15get_gil_checkerEv"])  # called at import: sets what it returns
TEXT = b"no device: this image does not have the library\0"
# The description of a C++ class begins with a pointer to this and one to the class's name.
CLASS, CXX = "_ZTVN10__cxxabiv117__class_type_infoE", "libstdc++.so.6"


class Part:
    """Bytes one after the other, from an address on; an offset in the file is an address here."""

    def __init__(self, start: int) -> None:
        self.start, self.data = start, b""

    @property
    def end(self) -> int:
        return self.start + len(self.data)

    def add(self, data: bytes) -> int:
        at = self.end
        self.data += data + bytes(-len(data) % 16)
        return at


class Strings:
    def __init__(self) -> None:
        self.data = b"\0"

    def add(self, text: str) -> int:
        self.data += text.encode() + b"\0"
        return len(self.data) - len(text.encode()) - 1


def stub(library: str, symbols: Sequence[Symbol]) -> bytes:
    """A library of that name with these symbols: first what may be written, then all else."""
    written = Part(HEADERS)
    dynamic = written.add(bytes(16 * (TAGS + 1)))
    data = {s.name: written.add(bytes(OBJECT_SIZE)) for s in symbols if _has_data(s)}
    fixed = Part(-(-written.end // PAGE) * PAGE)
    text = fixed.add(TEXT)
    at = {s.name: data[s.name] if s.kind == OBJECT else 0 for s in symbols}
    for s in symbols:
        if s.kind != OBJECT:
            at[s.name] = fixed.add(_code(s.name, data.get(s.name, text) - fixed.end))

    strings = Strings()
    versions = sorted({s.version for s in symbols if s.version})
    of = [versions.index(s.version) + 2 if s.version else 1 for s in symbols]
    table = struct.pack(SYMBOL, 0, 0, 0, 0, 0, 0)
    table += struct.pack(SYMBOL, strings.add(CLASS), GLOBAL << 4 | OBJECT, 0, 0, 0, 0)
    for s in symbols:
        kind, size = (OBJECT, OBJECT_SIZE) if s.kind == OBJECT else (FUNCTION, 0)
        table += struct.pack(
            SYMBOL, strings.add(s.name), GLOBAL << 4 | kind, 0, 1, at[s.name], size
        )
    tags = [(SONAME, strings.add(library)), (NEEDED, strings.add(CXX))]
    tags += [(HASH, fixed.add(_hash_table(["", CLASS, *at]))), (SYMTAB, fixed.add(table))]
    tags += [(VERSYM, fixed.add(struct.pack(f"<{2 + len(of)}H", 0, 0, *of)))]
    tags += [(VERDEF, fixed.add(_versions([library, *versions], strings)))]
    tags += [(VERDEFNUM, 1 + len(versions))]
    classes = {name: strings.add(name[4:]) for name in data if name.startswith("_ZTI")}
    tags += [(STRSZ, len(strings.data)), (STRTAB, fixed.add(strings.data))]
    moved = b""
    for name, called in classes.items():
        moved += struct.pack(MOVED, data[name], 1 << 32 | R_64, 16)
        moved += struct.pack(MOVED, data[name] + 8, R_RELATIVE, tags[-1][1] + called)
    tags += [(RELA, fixed.add(moved)), (RELASZ, len(moved)), (RELAENT, struct.calcsize(MOVED))]
    tags += [(SYMENT, struct.calcsize(SYMBOL))]
    return _file(written, fixed, dynamic, tags)


def _has_data(symbol: Symbol) -> bool:
    return symbol.kind == OBJECT or symbol.name in VARIABLES


def _code(name: str, data: int) -> bytes:
    """`data` is where what it returns lies, counted from the function's first byte."""
    if name in VARIABLES or name.endswith(TEXTS):
        return b"\x48\x8d\x05" + struct.pack("<i", data - 7) + b"\xc3"  # lea rax, [rip + ...]; ret
    return ILLEGAL if name.startswith("_Z") else ERROR


def _hash(name: str) -> int:
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        value = (value ^ (value & 0xF0000000) >> 24) & 0x0FFFFFFF
    return value


def _hash_table(names: list[str]) -> bytes:
    """As many buckets as names; the first symbol is the empty one that every table begins with."""
    count = len(names)
    buckets, chains = [0] * count, [0] * count
    for i, name in enumerate(names[1:], 1):
        bucket = _hash(name) % count
        chains[i], buckets[bucket] = buckets[bucket], i
    return struct.pack(f"<{2 + 2 * count}I", count, count, *buckets, *chains)


def _versions(names: list[str], strings: Strings) -> bytes:
    """The library's own name as the first, as linkers do."""
    found = b""
    for i, name in enumerate(names, 1):
        following = 28 if i < len(names) else 0
        found += struct.pack("<HHHHIII", 1, i == 1, i, 1, _hash(name), 20, following)
        found += struct.pack("<II", strings.add(name), 0)
    return found


def _file(written: Part, fixed: Part, dynamic: int, tags: list[tuple[int, int]]) -> bytes:
    assert len(tags) == TAGS
    named = b"".join(struct.pack("<QQ", *tag) for tag in tags)
    segments = [
        (LOAD, READ | WRITE, 0, written.end, PAGE),
        (LOAD, READ | EXECUTE, fixed.start, len(fixed.data), PAGE),
        (DYNAMIC, READ | WRITE, dynamic, len(named) + 16, 8),
        (GNU_STACK, READ | WRITE, 0, 0, 16),
    ]
    start = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    start += struct.pack(
        "<HHIQQQIHHHHHH", 3, X86_64, 1, 0, 64, 0, 0, 64, 56, len(segments), 0, 0, 0
    )
    for kind, flags, at, size, align in segments:
        start += struct.pack("<IIQQQQQQ", kind, flags, at, at, at, size, size, align)
    start += named + written.data[len(named) :]
    return start.ljust(fixed.start, b"\0") + fixed.data

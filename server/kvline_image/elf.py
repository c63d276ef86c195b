"""What a shared library in the ELF format takes from others and gives to them.

`read` finds what the loader reads, by the program headers alone: what a library is called, which
others it names, which symbols it takes and gives. `strip` makes a file smaller. x86-64 only.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

X86_64 = 62
LOAD, DYNAMIC = 1, 2  # types of segments
NEEDED, HASH, STRTAB, SYMTAB, SONAME = 1, 4, 5, 6, 14  # tags of the dynamic section
GNU_HASH, VERSYM, VERNEED = 0x6FFFFEF5, 0x6FFFFFF0, 0x6FFFFFFE
PAGE = 4096
GLOBAL = 1  # a symbol's binding


@dataclass(frozen=True, slots=True, order=True)
class Symbol:
    name: str
    kind: int
    version: str = ""
    library: str = ""  # the one that has this version


@dataclass(frozen=True, slots=True)
class Library:
    name: str
    needs: tuple[str, ...]
    takes: frozenset[Symbol]  # those that must be found: weak ones may be missing
    gives: frozenset[str]


class _File:
    """A library's bytes, read at the addresses that they are mapped to."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        start, count = struct.unpack_from("<Q", data, 32)[0], struct.unpack_from("<H", data, 56)[0]
        self.headers = [struct.unpack_from("<IIQQQQQQ", data, start + 56 * i) for i in range(count)]
        self.tags: dict[int, int] = {}
        self.needed: list[int] = []
        at, size = next((h[2], h[5]) for h in self.headers if h[0] == DYNAMIC)
        for tag, value in struct.iter_unpack("<QQ", data[at : at + size]):
            if tag == 0:
                break
            if tag == NEEDED:
                self.needed.append(value)
            self.tags[tag] = value

    def unpack(self, form: str, address: int) -> tuple[int, ...]:
        return struct.unpack_from("<" + form, self._data, self._offset(address))

    def string(self, at: int) -> str:
        start = self._offset(self.tags[STRTAB]) + at
        return self._data[start : self._data.find(b"\0", start)].decode()

    def _offset(self, address: int) -> int:
        for kind, _, offset, start, _, size, _, _ in self.headers:
            if kind == LOAD and start <= address < start + size:
                return int(offset + address - start)
        raise ValueError(f"address {address:#x} is not in the file")

    def symbols(self) -> Iterator[tuple[int, int, int, int]]:
        """Name, info, section and version of each."""
        count, table = self._count(), self.tags[SYMTAB]
        rows = struct.iter_unpack("<IBBHQQ", self._bytes(table, 24 * count))
        versions = self.tags.get(VERSYM)
        of = self.unpack(f"{count}H", versions) if versions else (1,) * count
        for i, (name, info, _, section, _, _) in enumerate(rows):
            yield name, info, section, of[i] & 0x7FFF

    def _bytes(self, address: int, size: int) -> bytes:
        start = self._offset(address)
        return self._data[start : start + size]

    def _count(self) -> int:
        if HASH in self.tags:
            return self.unpack("II", self.tags[HASH])[1]
        at = self.tags[GNU_HASH]
        buckets, first, words, _ = self.unpack("IIII", at)
        chains = at + 16 + 8 * words + 4 * buckets
        last = max(self.unpack(f"{buckets}I", at + 16 + 8 * words))
        if last < first:
            return first
        while not self.unpack("I", chains + 4 * (last - first))[0] & 1:
            last += 1
        return last + 1

    def wanted_versions(self) -> dict[int, tuple[str, str]]:
        """Index of a version -> its name, and the library that has it."""
        found, at = {}, self.tags.get(VERNEED, 0)
        while at:
            _, count, library, first, following = self.unpack("HHIII", at)
            entry = at + first
            for _ in range(count):
                _, _, index, version, after = self.unpack("IHHII", entry)
                found[index] = self.string(version), self.string(library)
                entry += after
            at = at + following if following else 0
        return found


def is_library(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(20)
    return start[:6] == b"\x7fELF\x02\x01" and start[16] == 3 and start[18] == X86_64


def read(path: Path) -> Library:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        elf = _File(data)
        versions = elf.wanted_versions()
        takes, gives = set(), set()
        for name, info, section, version in elf.symbols():
            if section:
                gives.add(elf.string(name))
            elif info >> 4 == GLOBAL:
                takes.add(Symbol(elf.string(name), info & 15, *versions.get(version, ())))
        own = elf.string(elf.tags[SONAME]) if SONAME in elf.tags else path.name
        needs = tuple(elf.string(at) for at in elf.needed)
        return Library(own, needs, frozenset(takes), frozenset(gives))


def strip(path: Path) -> None:
    """Takes out the tables that only debuggers read. They lie before the last segment, which then
    moves up in the file; where it is mapped to stays the same."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        headers = _File(data).headers
        *_, before, last = (h for h in headers if h[0] == LOAD)
        end, start, address = before[2] + before[5], last[2], last[3]
        moved = start - (end + (address - end) % PAGE)
        if moved < PAGE:
            return
        kept = bytearray(data[: start - moved])
        kept += data[start : start + last[5]]
    at = struct.unpack_from("<Q", kept, 32)[0]
    for i, header in enumerate(headers):
        if header[2] >= start:
            struct.pack_into("<Q", kept, at + 56 * i + 8, header[2] - moved)
    struct.pack_into("<Q", kept, 40, 0)  # no table of sections; how long it is and its names
    struct.pack_into("<HH", kept, 60, 0, 0)
    mode = path.stat().st_mode
    path.unlink()  # it may be a link to a package manager's copy
    path.write_bytes(kept)
    path.chmod(mode)

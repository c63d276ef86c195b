"""Dataclasses in memory that processes share: their numbers, then their arrays, which are read in
place. What is written follows from how the fields are declared.

A field is an array of a named type (`NDArray[np.int64]`, one axis), an int or an IntEnum, a
dataclass, a dataclass that may be missing (`StateLayout | None`), or a tuple of any number of one
of these (`tuple[LogitsEdits, ...]`).
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from operator import attrgetter
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    Generic,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

WORD = 8  # bytes of a number, and of an array's entry at most; arrays begin at a multiple of it


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


T = TypeVar("T", bound=_Dataclass)


class _Parts:
    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.arrays: list[tuple[np.dtype[Any], np.ndarray]] = []


class _Reader:
    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        count = int(np.frombuffer(memory, np.int64, 1)[0])
        self.numbers = iter(np.frombuffer(memory, np.int64, count, WORD).tolist())
        self.at = WORD * (1 + count)  # of the next array


class _Field(Protocol):
    """`put` and `take` are called in the same order."""

    def put(self, value: Any, into: _Parts) -> None: ...

    def take(self, source: _Reader) -> Any: ...

    def size(self, most: int) -> int:
        """Bytes of the largest value with up to `most` entries in each array and empty tuples."""


class _Number:
    def __init__(self, kind: type[int]) -> None:
        self._kind = kind

    def put(self, value: int, into: _Parts) -> None:
        into.numbers.append(value)

    def take(self, source: _Reader) -> int:
        return self._kind(next(source.numbers))

    def size(self, most: int) -> int:
        return WORD


class _Array:
    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype, self._itemsize = dtype, dtype.itemsize

    def put(self, value: np.ndarray, into: _Parts) -> None:
        into.numbers.append(len(value))
        into.arrays.append((self._dtype, value))

    def take(self, source: _Reader) -> np.ndarray:
        count, at = next(source.numbers), source.at
        source.at = at + _aligned(count * self._itemsize)
        return np.frombuffer(source.memory, self._dtype, count, at)

    def size(self, most: int) -> int:
        return WORD + _aligned(most * self._itemsize)


class _Tuple:
    def __init__(self, items: _Field) -> None:
        self._items = items

    def put(self, value: tuple[Any, ...], into: _Parts) -> None:
        into.numbers.append(len(value))
        for item in value:
            self._items.put(item, into)

    def take(self, source: _Reader) -> tuple[Any, ...]:
        return tuple([self._items.take(source) for _ in range(next(source.numbers))])

    def size(self, most: int) -> int:
        return WORD


class _Optional:
    def __init__(self, item: _Field) -> None:
        self._item = item

    def put(self, value: Any, into: _Parts) -> None:
        into.numbers.append(value is not None)
        if value is not None:
            self._item.put(value, into)

    def take(self, source: _Reader) -> Any:
        return self._item.take(source) if next(source.numbers) else None

    def size(self, most: int) -> int:
        return WORD + self._item.size(most)


class Record(Generic[T]):
    """How a dataclass is written and read. Raises TypeError where a field is declared as anything
    else than the above, as an array without its type."""

    def __init__(self, of: type[T]) -> None:
        hints = get_type_hints(of)
        names = [field.name for field in fields(of)]
        self._fields = [_field(hints[name], f"{of.__name__}.{name}") for name in names]
        self._make, self._values = of, attrgetter(*names)

    def write(self, into: memoryview, value: T) -> int:
        """-> the bytes that it takes, a multiple of WORD. Raises ValueError where there is no
        room."""
        found = _Parts()
        self.put(value, found)
        head = np.frombuffer(into, np.int64, 1 + len(found.numbers))
        head[:] = [len(found.numbers), *found.numbers]
        at = head.nbytes
        for dtype, array in found.arrays:
            np.frombuffer(into, dtype, len(array), at)[:] = array
            at += _aligned(len(array) * dtype.itemsize)
        return at

    def read(self, source: memoryview) -> T:
        """The arrays are those of the memory."""
        return self.take(_Reader(source))

    def put(self, value: T, into: _Parts) -> None:
        for field, each in zip(self._fields, self._values(value), strict=True):
            field.put(each, into)

    def take(self, source: _Reader) -> T:
        return self._make(*[field.take(source) for field in self._fields])

    def size(self, most: int) -> int:
        return WORD + sum(field.size(most) for field in self._fields)


def _aligned(size: int) -> int:
    """Bytes of an array, so that the next one is aligned."""
    return -(-size // WORD) * WORD


def _field(declared: Any, name: str) -> _Field:
    origin, given = get_origin(declared), get_args(declared)
    if hasattr(origin, "__value__"):  # numpy 2.5's NDArray is an alias of Python 3.12's kind
        return _field(origin.__value__[given], name)
    if origin is np.ndarray:
        (kind,) = get_args(given[1])
        if isinstance(kind, type) and issubclass(kind, np.number):
            return _Array(np.dtype(kind))
    if origin is tuple and given[1:] == (...,):
        return _Tuple(_field(given[0], name))
    if origin in (Union, UnionType) and given[1:] == (NoneType,):
        return _Optional(_field(given[0], name))
    if isinstance(declared, type) and issubclass(declared, int):
        return _Number(declared)
    if isinstance(declared, type) and is_dataclass(declared):
        return Record(declared)
    raise TypeError(f"{name} is declared as {declared}: not an array of a named type, nor a number")

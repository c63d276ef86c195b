"""A file's format, size and orientation by its header, and the file without what is no pixels.

The decoder never sees comments, profiles, thumbnails and EXIF. It would keep and parse them: of a
JPEG's empty segments Pillow 13 holds 34 times their bytes, of a GIF's comments 45 times, and
earlier ones more of EXIF. This reads as much of a file as is in front of its pixels, and copies it
once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvline_server.images.bounds import Bounds, ImageRefused

Format = Literal["PNG", "JPEG", "WEBP", "GIF"]
MAX_BLOCKS = (
    10_000  # segments or chunks of a file: usual ones have tens, and a few thousand at most
)
# Of a JPEG: each is a pass over all pixels for a few bytes, 10 ms of 16 million. Usual are 10.
MAX_SCANS = 64
MAX_ENTRIES = 1_000  # of an EXIF directory that are read
ORIENTATION = 0x0112

_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_PIXELS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_SIZES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # JPEG's SOF markers
_ALONE = {0x00, 0x01, *range(0xD0, 0xD8), 0xFF}  # JPEG's markers without a segment, and none
_NO_PIXELS = {*range(0xE1, 0xF0), 0xFE} - {0xEE}  # APP14 says which colours they are


@dataclass(frozen=True, slots=True)
class Container:
    """A file whose header was read, and nothing decoded."""

    format: Format
    width: int  # pixels, as they are stored
    height: int
    orientation: int  # EXIF's, 1 to 8: how the stored pixels are turned to be seen
    data: bytes  # the file, with what is needed to decode it
    # Bytes a pixel of a JPEG's that its decoder keeps where it is progressive.
    coefficients: int = 0

    @property
    def upright(self) -> tuple[int, int]:
        """Height and width in pixels, as the image is seen: those of 5 to 8 lie on their side."""
        size = (self.height, self.width)
        return size if self.orientation < 5 else size[::-1]


def opened(data: bytes, bounds: Bounds) -> Container:
    """A PNG, JPEG, WebP or GIF within the bounds. Raises ImageRefused for any other."""
    bounds.check_bytes(len(data))
    for starts, read in _READERS:
        if starts(data):
            container = read(data)
            bounds.check_pixels(container.width, container.height)
            return container
    raise ImageRefused(
        f"expected a PNG, JPEG, WebP or GIF, got a file that begins with {data[:8].hex(' ')}"
    )


def _png(data: bytes) -> Container:
    """Chunks: a length, a name, that many bytes, a checksum. The first is IHDR."""
    if data[12:16] != b"IHDR" or len(data) < 33:
        raise _cut("PNG")
    view = memoryview(data)
    kept, exif, at, count = [view[:8]], b"", 8, 0
    while at < len(data):
        if (count := count + 1) > MAX_BLOCKS:
            raise _crowded("PNG", "chunks")
        name, end = data[at + 4 : at + 8], at + 12 + _big(data[at : at + 4])
        if name in _PNG_PIXELS:
            kept.append(view[at:end])  # as much of it as there is: the decoder refuses the rest
        elif name == b"eXIf" and not exif:
            exif = data[at + 8 : end - 4]
        if name == b"IEND":
            break
        at = end
    return Container(
        "PNG", _big(data[16:20]), _big(data[20:24]), _orientation(exif), b"".join(kept)
    )


def _jpeg(data: bytes) -> Container:
    """Segments: a marker, a length that counts itself, that many bytes; then scans."""
    view = memoryview(data)
    kept, exif, at, size, count, coefficients = [view[:2]], b"", 2, (0, 0), 0, 0
    while True:
        if (count := count + 1) > MAX_BLOCKS:
            raise _crowded("JPEG", "segments")
        at = data.find(b"\xff", at)  # a decoder skips what is between two segments
        if at < 0 or at + 4 > len(data) or data[at + 1] == 0xD9:
            raise _cut("JPEG")
        marker, end = data[at + 1], at + 2 + _big(data[at + 2 : at + 4])
        if marker == 0xDA:
            break
        if marker in _ALONE:
            at += 1 if marker == 0xFF else 2  # any number of 0xFF may be in front of a marker
            continue
        if marker in _SIZES:
            size = _big(data[at + 7 : at + 9]), _big(data[at + 5 : at + 7])
            coefficients = max(coefficients, _coefficients(data[at + 9 : end]))
        if marker == 0xE1 and not exif and data[at + 4 : at + 10] == b"Exif\0\0":
            exif = data[at + 10 : end]
        if marker not in _NO_PIXELS:
            kept.append(view[at:end])
        at = end
    scans = data.count(b"\xff\xda", at)
    if scans > MAX_SCANS:
        raise _crowded("JPEG", "scans")
    data = b"".join([*kept, view[at:]])
    return Container("JPEG", *size, _orientation(exif), data, coefficients)


def _gif(data: bytes) -> Container:
    """A screen, its palette, extensions, of which one says what is transparent, and images."""
    width, height, flags = _little(data[6:8]), _little(data[8:10]), data[10:11]
    if len(data) < 13:
        raise _cut("GIF")
    at = 13 + _palette(flags[0])
    kept, control, count = [data[:at]], b"", 0
    while data[at : at + 1] == b"!":
        label, start = data[at + 1 : at + 2], at
        at, length = at + 2, 1
        while length:  # of 0 is the last block of an extension
            if (count := count + 1) > MAX_BLOCKS:
                raise _crowded("GIF", "blocks")
            length = _little(data[at : at + 1])
            at += 1 + length
        if label == b"\xf9":
            control = data[start:at]
    if data[at : at + 1] != b"," or len(data) < at + 10:
        raise _cut("GIF")
    left, top, wide, high = (_little(data[n : n + 2]) for n in range(at + 1, at + 9, 2))
    kept += [control, data[at:]]
    return Container("GIF", max(width, left + wide), max(height, top + high), 1, b"".join(kept))


def _webp(data: bytes) -> Container:
    """Chunks of RIFF: a name, a length, that many bytes and one more where they are odd."""
    name, body = data[12:16], data[20:30]
    if len(body) < 10:
        raise _cut("WebP")
    if name == b"VP8X":
        width, height = _little(body[4:7]) + 1, _little(body[7:10]) + 1
    elif name == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
        width, height = _little(body[6:8]) & 0x3FFF, _little(body[8:10]) & 0x3FFF
    elif name == b"VP8L" and body[0] == 0x2F:
        bits = _little(body[1:5])
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    else:
        raise ImageRefused("expected a WebP of VP8, VP8L or VP8X, got another; convert the image")
    at, count, exif = 12, 0, b""
    while name == b"VP8X" and at < len(data) and not exif:
        if (count := count + 1) > MAX_BLOCKS:
            raise _crowded("WebP", "chunks")
        length = _little(data[at + 4 : at + 8])
        if data[at : at + 4] == b"EXIF":
            exif = data[at + 8 : at + 8 + length]
        at += 8 + length + length % 2
    return Container("WEBP", width, height, _orientation(exif), data)


_READERS: tuple[tuple[Callable[[bytes], bool], Callable[[bytes], Container]], ...] = (
    (lambda data: data.startswith(_PNG), _png),
    (lambda data: data.startswith(b"\xff\xd8\xff"), _jpeg),
    (lambda data: data.startswith((b"GIF87a", b"GIF89a")), _gif),
    (lambda data: data.startswith(b"RIFF") and data[8:12] == b"WEBP", _webp),
)


def _orientation(exif: bytes) -> int:
    """Of the first directory of EXIF; 1, as it is stored, where there is none or it is broken."""
    exif = exif.removeprefix(b"Exif\0\0")
    number = {b"II*\0": _little, b"MM\0*": _big}.get(exif[:4])
    if number is None:
        return 1
    start = number(exif[4:8])
    for n in range(min(number(exif[start : start + 2]), MAX_ENTRIES)):
        entry = exif[start + 2 + 12 * n : start + 14 + 12 * n]
        if number(entry[:2]) == ORIENTATION:
            value = number(entry[8:10] if number(entry[2:4]) == 3 else entry[8:12])
            return value if 1 <= value <= 8 else 1
    return 1


def _coefficients(colours: bytes) -> int:
    """Bytes a pixel of a JPEG's coefficients, 2 each: how many colours, and of each three bytes,
    the second of which is how often it is sampled across and down."""
    sampled = [(each >> 4, each & 15) for each in colours[2 : 3 * _little(colours[:1]) + 1 : 3]]
    most = max((a for a, _ in sampled), default=0) * max((d for _, d in sampled), default=0)
    return -(-2 * sum(a * d for a, d in sampled) // max(1, most))


def _palette(flags: int) -> int:
    """Bytes of a GIF's palette."""
    return 3 * 2 ** ((flags & 7) + 1) if flags & 0x80 else 0


def _big(number: bytes) -> int:
    return int.from_bytes(number, "big")


def _little(number: bytes) -> int:
    return int.from_bytes(number, "little")


def _cut(which: str) -> ImageRefused:
    return ImageRefused(f"expected a whole {which}, got one that ends before its pixels")


def _crowded(which: str, what: str) -> ImageRefused:
    most = MAX_SCANS if what == "scans" else MAX_BLOCKS
    return ImageRefused(
        f"expected a {which} of at most {most} {what}, got one of more; save the image again"
    )

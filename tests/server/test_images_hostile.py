"""Files that were made to harm: mutated ones give pixels or a refusal and nothing else, and none
takes more memory or time than its header and its bytes let one expect.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
import re
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np
import pytest
from http_process import http_process
from image_files import (
    chunk,
    faded,
    gemma,
    gradient,
    noise,
    png,
    processor,
    saved,
    seen,
    text,
    turned,
)
from PIL import Image

from kvline_contract.launch import Device
from kvline_server.images.bounds import Bounds, ImageRefused
from kvline_server.images.container import MAX_BLOCKS, MAX_SCANS, Container, opened
from kvline_server.images.pixels import pixels, work_bytes
from kvline_server.images.processor import Processor
from kvline_server.options.clients import ClientLimits

# In service decode.py ignores them; pytest makes errors of all, which would hide what follows one.
pytestmark = pytest.mark.filterwarnings(r"ignore:::PIL\.")
MUTATED = 2_000
BOUNDS = Bounds(file_bytes=4 << 20, pixels=250_000)


def peak_of(work: Callable[[], object]) -> int:
    """Bytes of this process beyond what it holds, at most, while it works; without those of files,
    which the kernel drops where others need the memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    most, files = _resident()
    work()
    most_after, files_after = _resident()
    return most_after - max(files, files_after) - (most - files)


def _resident() -> tuple[int, int]:
    """-> the most bytes of this process, and those of files now"""
    status = Path("/proc/self/status").read_text()
    found = {k: int(v) << 10 for k, v in re.findall(r"(VmHWM|RssFile):\s+(\d+)", status)}
    return found["VmHWM"], found["RssFile"]


def test_pages_of_files_that_the_kernel_drops_are_no_work(tmp_path: Path) -> None:
    """As it does while other tests fill its cache of files."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(8 << 20))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE])
        assert peak_of(lambda: mapped.madvise(mmap.MADV_DONTNEED)) < 1 << 20


def samples() -> list[bytes]:
    """Small ones of every format, mode and extra that a decoder has code for."""
    grey, palette = noise(40, 30).convert("L"), noise(60, 40).quantize(16)
    frames = {"save_all": True, "append_images": [gradient(50, 41), noise(50, 41)]}
    return [
        saved(text(120, 60), "PNG"),
        saved(faded(noise(40, 30)), "PNG", exif=turned(6)),
        saved(palette, "PNG", transparency=bytes(range(16))),
        saved(grey, "PNG", transparency=3),
        png(9, 5, rows=bytes(19 * 5), depth=16),
        saved(gradient(80, 60), "JPEG", exif=turned(5), comment=b"x" * 99),
        saved(gradient(80, 60), "JPEG", progressive=True, icc_profile=bytes(500)),
        saved(gradient(40, 30).convert("CMYK"), "JPEG"),
        saved(grey, "JPEG", restart_marker_rows=1),
        saved(noise(40, 30), "WEBP", exif=turned(8)),
        saved(faded(noise(40, 30)), "WEBP", lossless=True),
        saved(faded(gradient(40, 30)), "WEBP", quality=50),
        saved(gradient(50, 41), "WEBP", **frames),
        saved(palette, "GIF", transparency=3, comment=b"a comment"),
        saved(gradient(50, 41), "GIF", **frames),
        saved(gradient(50, 41), "PNG", **frames),
    ]


def mutated(data: bytes, drawn: random.Random) -> bytes:
    """With bytes changed, most of them where headers are; cut, doubled or swapped in places."""
    made = bytearray(data)
    for _ in range(drawn.choice((1, 1, 2, 4, 16))):
        at = int(len(made) * drawn.random() ** drawn.choice((1, 4)))
        kind = drawn.randrange(6)
        if kind == 0:
            made[at : at + 1] = bytes([drawn.randrange(256)])
        elif kind == 1:
            made[at : at + 4] = drawn.choice((b"\xff" * 4, bytes(4), b"\0\0\xff\xff", b"\x7f\xff"))
        elif kind == 2 and at < len(made):
            made[at] ^= 1 << drawn.randrange(8)
        elif kind == 3:
            del made[at : at + drawn.choice((1, 4, 50))]
        elif kind == 4:
            made[at:at] = made[at // 2 : at // 2 + drawn.choice((1, 12, 60))]
        elif drawn.random() < 0.2:
            del made[at:]
    return bytes(made) or b"\0"


def with_checksums(data: bytes) -> bytes:
    """A PNG whose chunks' checksums are right again, so that a decoder goes on behind them."""
    kept, at = [data[:8]], 8
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        kept.append(chunk(data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    return b"".join(kept)


def test_a_mutated_file_gives_pixels_or_a_refusal_in_bounded_memory() -> None:
    drawn, files, ours = random.Random(39), samples(), processor(shortest=1024).within(1024)
    served = 0

    def play() -> None:
        nonlocal served
        for n in range(MUTATED):
            data = mutated(files[n % len(files)], drawn)
            if data.startswith(b"\x89PNG") and n % 2:
                data = with_checksums(data)
            try:
                found = pixels(opened(data, BOUNDS), ours)
            except ImageRefused as refused:
                assert 10 < len(str(refused)) < 400
                continue
            assert found.values.shape == (found.grid.rows * 16, found.grid.columns * 16, 3)
            served += 1

    for data in files:
        pixels(opened(data, BOUNDS), ours)
    assert peak_of(play) < 16 * BOUNDS.pixels + (12 << 20)
    assert MUTATED * 0.15 < served < MUTATED * 0.85


def many(what: bytes, total: int) -> bytes:
    return what * (total // len(what))


def exif_of_overlapping_entries(size: int) -> bytes:
    """Each of its entries is nearly all of it: a reader of all holds entries times bytes."""
    entries = min(65_535, size // 12 - 2)
    body = b"".join(struct.pack("<HHII", n + 1, 7, size - 64, 8) for n in range(entries))
    return (b"II*\0" + struct.pack("<IH", 8, entries) + body).ljust(size, b"\0")


def jpeg_segments(*segments: tuple[int, bytes]) -> bytes:
    """In front of the others of a whole JPEG."""
    whole = saved(gradient(64, 64), "JPEG")
    made = b"".join(struct.pack(">BBH", 255, m, len(data) + 2) + data for m, data in segments)
    return whole[:2] + made + whole[2:]


def gif_comments(block: bytes, total: int) -> bytes:
    whole = saved(gradient(64, 64).quantize(4), "GIF")
    at = 13 + 3 * 2 ** ((whole[10] & 7) + 1)  # behind its palette
    return whole[:at] + b"!\xfe" + many(bytes([len(block)]) + block, total) + b"\0" + whole[at:]


def gray_chunks(total: int) -> tuple[bytes, ...]:
    return tuple(chunk(b"prIv", b"") for _ in range(total // 12))


MEGA = 1 << 20
WHOLE = zlib.compress(bytes(30 * MEGA), 9)
ROWS = b"".join(b"\0" + bytes(64) for _ in range(64))
# Each is within the bounds, and of a size that a client may send.
HARMLESS: dict[str, Callable[[], bytes]] = {
    "EXIF of overlapping entries": lambda: jpeg_segments(
        (0xE1, b"Exif\0\0" + exif_of_overlapping_entries(65_000))
    ),
    "the same in a PNG": lambda: png(
        64, 64, chunk(b"eXIf", exif_of_overlapping_entries(3 * MEGA)), rows=ROWS
    ),
    "many EXIF segments": lambda: jpeg_segments(*[(0xE1, b"Exif\0\0" + bytes(65_000))] * 60),
    "a text that grows": lambda: png(64, 64, chunk(b"zTXt", b"a\0\0" + WHOLE), rows=ROWS),
    "a profile that grows": lambda: png(64, 64, chunk(b"iCCP", b"a\0\0" + WHOLE), rows=ROWS),
    "pixels that go on": lambda: png(64, 64, rows=bytes(60 * MEGA)),
}
REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "a PNG's chunks": (lambda: png(64, 64, *gray_chunks(3 * MEGA), rows=ROWS), "10000 chunks"),
    "a JPEG's segments": (
        lambda: jpeg_segments(*[(0xED, b"")] * (3 * MEGA // 4)),
        "10000 segments",
    ),
    "0xFF before a marker": (
        lambda: b"\xff\xd8" + bytes([255]) * (3 * MEGA),
        "10000 segments",
    ),
    "a GIF's blocks": (lambda: gif_comments(b"x", 3 * MEGA), "10000 blocks"),
    "a GIF's extensions": (lambda: b"GIF89a" + bytes(7) + many(b"!\xfe\0", MEGA), "10000 blocks"),
    "pixels of a PNG": (lambda: png(60_000, 60_000, rows=bytes(MEGA)), "250000 pixels"),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_a_reader_of_metadata_falls_for_is_served(name: str) -> None:
    data = HARMLESS[name]()
    assert len(data) < BOUNDS.file_bytes
    begun = time.process_time()
    peak = peak_of(lambda: seen(data, BOUNDS))
    assert peak < 3 * len(data) + (4 << 20)
    assert time.process_time() - begun < 0.5


@pytest.mark.parametrize("name", REFUSED)
def test_a_crowd_is_refused_before_it_is_read(name: str) -> None:
    make, named = REFUSED[name]
    data = make()
    assert len(data) < BOUNDS.file_bytes

    def play() -> None:
        with pytest.raises(ImageRefused, match=named):
            seen(data, BOUNDS)

    begun = time.process_time()
    assert peak_of(play) < len(data) + (4 << 20)
    assert time.process_time() - begun < 0.5


def test_scans_of_a_jpeg_are_bounded() -> None:
    """Each is a pass over all pixels, and takes a few bytes."""
    whole = saved(gradient(64, 64), "JPEG", progressive=True)
    last = whole.rindex(b"\xff\xda")
    scans = whole.count(b"\xff\xda")
    assert 5 < scans < MAX_SCANS // 2
    repeated = whole[:last] + whole[last:-2] * (MAX_SCANS - scans + 1) + whole[-2:]
    assert repeated.count(b"\xff\xda") == MAX_SCANS
    opened(repeated, BOUNDS)
    with pytest.raises(ImageRefused, match=f"at most {MAX_SCANS} scans"):
        opened(whole[:last] + whole[last:-2] * MAX_SCANS + whole[-2:], BOUNDS)


def test_coefficients_of_a_jpeg_are_those_of_its_samples() -> None:
    """And a header that is cut has none, rather than an error of ours."""
    for image, subsampling, expected in (
        (noise(32, 32), 0, 6),
        (noise(32, 32), 1, 4),
        (noise(32, 32), 2, 3),
        (noise(32, 32).convert("L"), 0, 2),
        (noise(32, 32).convert("CMYK"), 0, 8),
    ):
        data = saved(image, "JPEG", subsampling=subsampling)
        assert opened(data, BOUNDS).coefficients == expected
    start, scan = b"\xff\xd8\xff\xc0\0\7\x08\0\x10\0\x10", b"\xff\xda\0\2"
    assert opened(start + scan, BOUNDS).coefficients == 0


def test_a_usual_file_is_far_from_the_bounds() -> None:
    """Of 24 million pixels with chunks as small as encoders write them."""
    assert MAX_BLOCKS > 24_000_000 * 3 // 8192
    data = saved(noise(500, 400), "PNG")
    small = b"".join(chunk(b"IDAT", data[n : n + 99]) for n in range(41, len(data) - 16, 99))
    assert len(small) > 99 * 100 and opened(data[:33] + small + data[-12:], BOUNDS)


def large(width: int, height: int) -> dict[str, Callable[[], bytes]]:
    """Of each format that which takes the most, and what is usual."""
    image = noise(width // 8, height // 8).resize((width, height))
    full = {"progressive": True, "subsampling": 0, "exif": turned(6)}
    return {
        "PNG": lambda: saved(image, "PNG", compress_level=1),
        "PNG, grey, turned": lambda: saved(image.convert("L"), "PNG", exif=turned(6)),
        "PNG with alpha": lambda: saved(faded(image), "PNG", compress_level=1),
        "PNG of 16 bits": lambda: saved(
            Image.fromarray(np.asarray(image)[..., 0].astype(np.uint16) * 257), "PNG"
        ),
        "JPEG, progressive, turned": lambda: saved(image, "JPEG", **full),
        "JPEG, turned": lambda: saved(image, "JPEG", exif=turned(6)),
        "JPEG, grey, turned": lambda: saved(image.convert("L"), "JPEG", exif=turned(6)),
        "CMYK, progressive, turned": lambda: saved(image.convert("CMYK"), "JPEG", **full),
        "WebP with alpha, turned": lambda: saved(
            faded(image), "WEBP", method=0, lossless=True, exif=turned(6)
        ),
        "WebP, turned": lambda: saved(image, "WEBP", method=0, exif=turned(6)),
        "GIF": lambda: saved(image.quantize(64, Image.Quantize.FASTOCTREE), "GIF"),
        "GIF, transparent": lambda: saved(
            image.quantize(64, Image.Quantize.FASTOCTREE), "GIF", transparency=3
        ),
    }


@pytest.mark.parametrize("name", large(8, 8))
@pytest.mark.parametrize(
    ("width", "height", "patches"),
    [(1400, 1400, 4096), (200, 200, 16_384), (7000, 250, 1024), (250, 7000, 1024)],
)
def test_work_is_within_the_bytes_that_are_reserved_for_it(
    alone: Pool, name: str, width: int, height: int, patches: int
) -> None:
    """And not so far below that the reservation keeps others waiting for nothing."""
    file = opened(large(width, height)[name](), Bounds(file_bytes=1 << 30))
    peak, reserved = alone.apply(worked, (file, processor(shortest=patches * 200).within(patches)))
    assert reserved / 4 < peak < reserved


@pytest.fixture(scope="module")
def alone() -> Iterator[Pool]:
    """In a worker of the tests what decoding takes depends on the gaps that others left."""
    with http_process() as pool:
        yield pool


def worked(file: Container, ours: Processor) -> tuple[int, int]:
    """-> the bytes that decoding takes, and those that are reserved for it"""
    found = pixels(file, ours)
    held: list[object] = []
    # What decoders keep from the first run is theirs for good, and no work's.
    peak = peak_of(lambda: held.append(pixels(file, ours)))
    assert found.values.nbytes < peak
    return peak, work_bytes(file, ours)


@pytest.mark.parametrize("options", [{}, {"progressive": True}], ids=["usual", "progressive"])
def test_a_phone_s_photo_is_decoded_on_a_cpu(alone: Pool, options: dict[str, bool]) -> None:
    """Of 12 million pixels, on their side, in about as large a file as is taken there."""
    limits = ClientLimits().on(Device.CPU)
    drawn = noise(504, 378).resize((4032, 3024))
    data = saved(drawn, "JPEG", quality=78, exif=turned(6), **options)
    assert limits.image_file_bytes() * 2 // 3 < len(data) <= limits.image_file_bytes()
    peak, reserved = alone.apply(worked, (opened(data, Bounds()), processor().within(1024)))
    assert peak < reserved <= limits.decode_bytes


@pytest.mark.parametrize("size", [(40, 20_000), (20_000, 40)], ids=["tall", "wide"])
def test_a_narrow_image_is_counted_as_it_is_between_two_directions(
    alone: Pool, size: tuple[int, int]
) -> None:
    """Gemma's are resized to one size, first in one direction, of which a long side is kept."""
    peak, reserved = alone.apply(
        worked, (opened(saved(gradient(*size), "JPEG"), Bounds()), gemma())
    )
    assert peak < reserved

"""From the URL of a part to upright pixels: what is taken, and what each refusal says."""

from __future__ import annotations

import base64
import io
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from image_files import chunk, faded, gradient, noise, png, processor, saved, seen, text, turned
from PIL import Image, ImageOps

from kvline_server.images.bounds import Bounds, ImageRefused
from kvline_server.images.container import opened
from kvline_server.images.decode import decoded
from kvline_server.images.digests import digest, file_digest
from kvline_server.images.pixels import pixels
from kvline_server.images.url import file_bytes, image_bytes

SMALL = Bounds(file_bytes=300, pixels=10_000)


def inline(data: bytes, head: str = "data:image/png;base64,") -> str:
    return head + base64.b64encode(data).decode()


@pytest.mark.parametrize(
    "head",
    [
        "data:image/png;base64,",
        "DATA:Image/JPEG;Base64,",
        "data:image/jpg;base64,",
        "data:image/webp;name=a.webp;base64,",
        "data:image/gif; base64,",
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 299, 300])
def test_a_data_url_is_the_file_in_it(head: str, size: int) -> None:
    assert image_bytes(inline(b"x" * size, head), SMALL) == b"x" * size


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("https://example.com/a.png", "this server fetches nothing from addresses"),
        ("HTTP://169.254.169.254/latest", "have a proxy inline it"),
        ("file:///etc/passwd", "expected a URL such as data:image/png;base64,"),
        ("iVBORw0KGgo=", "expected a URL such as data:image/png;base64,"),
        ("", "expected a URL such as data:image/png;base64,"),
        ("data:image/png,abc", "got one without ;base64"),
        ("data:" + "x" * 5000, "got one without ;base64"),
        ("data:;base64,AAAA", "expected image/png, image/jpeg, image/webp or image/gif, got ''"),
        ("data:image/svg+xml;base64,AAAA", "got 'image/svg+xml'; convert the image"),
        ("data:image/png;base64,", "expected an image, got 0 bytes"),
        ("data:image/png;base64,AAA", "expected base64 of the whole file"),
        ("data:image/png;base64,AA\nAA", "no blanks or line breaks"),
        ("data:image/png;base64,A-_A", "expected base64 of the whole file"),
        ("data:image/png;base64,AAAé", "expected base64 of the whole file"),
        (inline(b"x" * 301), "expected a file of at most 300 bytes, got 301"),
    ],
)
def test_another_url_is_refused_with_what_to_send(url: str, named: str) -> None:
    with pytest.raises(ImageRefused) as refused:
        image_bytes(url, SMALL)
    assert named in str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_long_text_is_refused_by_its_length() -> None:
    """Which is no base64: it was not read."""
    with pytest.raises(ImageRefused, match="at most 300 bytes, got 3000000"):
        file_bytes("!" * 4_000_000, "image/png", SMALL)


def test_as_many_images_as_are_bounded() -> None:
    Bounds(images=2).check_count(2)
    with pytest.raises(ImageRefused, match="at most 2 images in a request, got 3"):
        Bounds(images=2).check_count(3)


@pytest.mark.parametrize("draw", [noise, gradient, text])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("GIF", {}),
        ("JPEG", {"quality": 95}),
        ("JPEG", {"progressive": True, "subsampling": 0}),
        ("WEBP", {}),
    ],
)
def test_a_picture_is_itself_in_each_format(
    draw: Callable[[int, int], Image.Image], kind: str, options: dict[str, Any]
) -> None:
    """As Pillow decodes the file by itself; and without loss, as it was drawn."""
    image = draw(61, 47)
    data = saved(image, kind, **options)
    found = seen(data)
    assert np.array_equal(found, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    if kind == "PNG" or options.get("lossless"):
        assert np.array_equal(found, np.asarray(image))


def over_white(image: Image.Image) -> Image.Image:
    """As transformers' processors do it, without their bands."""
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image).convert("RGB")


CLEAR = {"transparency": 3}
PALETTE = noise(40, 600).quantize(16)
MODES: dict[str, tuple[Image.Image, str, dict[str, Any]]] = {
    "grey": (noise(40, 30).convert("L"), "PNG", {}),
    "black and white": (noise(40, 30).convert("1"), "PNG", {}),
    "palette": (PALETTE, "PNG", {}),
    "palette with one clear colour": (PALETTE, "PNG", CLEAR),
    "palette with an alpha": (PALETTE, "PNG", {"transparency": bytes(range(0, 256, 16))}),
    "clear in a GIF": (PALETTE, "GIF", CLEAR),
    "grey with one clear": (noise(40, 30).convert("L"), "PNG", CLEAR),
    "colours with one clear": (
        Image.new("RGB", (9, 9), "red"),
        "PNG",
        {"transparency": (255, 0, 0)},
    ),
    "alpha": (faded(noise(40, 600)), "PNG", {}),
    "grey and alpha": (faded(noise(40, 30)).convert("LA"), "PNG", {}),
    "alpha in a WebP": (faded(noise(40, 600)), "WEBP", {"lossless": True, "exact": True}),
    "CMYK": (gradient(40, 30).convert("CMYK"), "JPEG", {"quality": 95}),
    "grey in a JPEG": (gradient(40, 30).convert("L"), "JPEG", {}),
}


@pytest.mark.parametrize("name", MODES)
def test_a_mode_is_red_green_and_blue_and_what_is_clear_is_white(name: str) -> None:
    image, kind, options = MODES[name]
    data = saved(image, kind, **options)
    file = Image.open(io.BytesIO(data))
    file.load()
    clear = "A" in file.getbands() or "transparency" in file.info
    assert clear == ("clear" in name or "alpha" in name)
    expected = over_white(file) if clear else file.convert("RGB")
    assert np.array_equal(seen(data), np.asarray(expected))


def test_16_bits_are_their_upper_8() -> None:
    """Pillow alone makes white of all above 255; a value that is clear is white."""
    values = np.arange(0, 65536, 257, dtype=">u2").reshape(16, 16)
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    expected = (values >> 8).astype(np.uint8)
    found = seen(png(16, 16, rows=rows, depth=16))
    assert np.array_equal(found, np.repeat(expected[..., None], 3, -1))
    clear = seen(png(16, 16, chunk(b"tRNS", struct.pack(">H", 257 * 7)), rows=rows, depth=16))
    assert (clear[0, 7] == 255).all() and (clear[0, 8] == 8).all()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_a_picture_is_turned_as_exif_says(kind: str, orientation: int) -> None:
    data = saved(gradient(64, 24), kind, exif=turned(orientation))
    file = Image.open(io.BytesIO(data))
    expected = np.asarray(ImageOps.exif_transpose(file).convert("RGB"))
    assert np.array_equal(seen(data), expected)
    assert opened(data, Bounds()).upright == expected.shape[:2]


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_an_animation_is_its_first_frame(kind: str) -> None:
    frames = [gradient(33, 21), noise(33, 21, 1), noise(33, 21, 2)]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=40, **options)
    assert getattr(Image.open(io.BytesIO(data)), "n_frames", 1) == 3
    first = seen(saved(frames[0], kind, **options))
    assert np.array_equal(seen(data), first)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "expected an image, got 0 bytes"),
        (b"BM" + bytes(50), "expected a PNG, JPEG, WebP or GIF, got a file that begins with 42 4d"),
        (b"<svg xmlns=", "expected a PNG, JPEG, WebP or GIF"),
        (b"\x89PNG\r\n\x1a\n", "expected a whole PNG"),
        (b"\xff\xd8\xff", "expected a whole JPEG"),
        (b"\xff\xd8\xff\xd9", "expected a whole JPEG"),
        (b"GIF89a", "expected a whole GIF"),
        (b"GIF89a" + bytes(6) + b"\0;", "expected a whole GIF"),
        (b"RIFF\0\0\0\0WEBP", "expected a whole WebP"),
        (b"RIFF\0\0\0\0WEBPVP8Z" + bytes(30), "expected a WebP of VP8, VP8L or VP8X"),
        (png(0, 5), "expected pixels, got an image of 0 x 5"),
        (png(5, 5), "expected a whole PNG, got one that does not decode"),
        (png(101, 100), "expected at most 10000 pixels, got 101 x 100"),
        (png(2**31 - 1, 2**31 - 1), "expected at most 10000 pixels"),
    ],
)
def test_what_is_no_picture_is_refused_with_why(data: bytes, named: str) -> None:
    with pytest.raises(ImageRefused) as refused:
        seen(data, SMALL)
    assert named in str(refused.value)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_pixels_are_bounded_by_the_header(kind: str) -> None:
    data = saved(Image.new("RGB", (200, 51)), kind)
    with pytest.raises(ImageRefused, match="expected at most 10000 pixels, got 200 x 51"):
        opened(data, Bounds(pixels=10_000))
    assert opened(data, Bounds(pixels=10_200)).upright == (51, 200)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_file_that_was_cut_is_refused(kind: str) -> None:
    data = saved(noise(64, 64), kind)
    for size in (len(data) // 2, len(data) * 9 // 10):
        with pytest.raises(ImageRefused, match="expected a whole"):
            seen(data[:size])


@pytest.mark.parametrize("error", [KeyError("x"), struct.error("x"), EOFError(), MemoryError()])
def test_whatever_a_decoder_raises_is_a_refusal(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 400,000 mutated files all errors were OSError and ValueError: others are stood in for."""

    def fail(*_: object) -> None:
        raise error

    file = opened(saved(gradient(9, 9), "PNG"), Bounds())
    monkeypatch.setattr(Image.Image, "getbands", fail)
    with pytest.raises(ImageRefused, match="expected a whole PNG, got one that does not decode"):
        decoded(file)


def test_a_digest_is_of_values_and_shape() -> None:
    values = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    changed = values.copy()
    changed[3, 3, 2] ^= 1
    different = {digest(each) for each in (values, changed, values.reshape(2, 8, 3))}
    assert len(different) == 3 and all(len(each) == 32 for each in different)
    assert digest(values.copy()) == digest(values)


def test_one_picture_in_two_formats_has_one_digest_and_two_of_files() -> None:
    image = gradient(100, 60)
    files = [saved(image, "PNG"), saved(image, "WEBP", lossless=True)]
    found = [pixels(opened(data, Bounds()), processor()) for data in files]
    assert found[0].digest == found[1].digest == digest(found[0].values)
    assert found[0].values.flags.c_contiguous and found[0].values.dtype == np.uint8
    assert file_digest(files[0], processor()) != file_digest(files[1], processor())
    assert file_digest(files[0], processor()) != file_digest(files[0], processor().detailed("low"))
    assert file_digest(files[0], processor()) == file_digest(bytes(files[0]), processor())


def test_the_package_imports_no_torch() -> None:
    names = "bounds, container, decode, pixels, positions, processor, url"
    code = f"import sys; from kvline_server.images import {names};"
    code += "from kvline_server.model.vision import preprocessor;print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

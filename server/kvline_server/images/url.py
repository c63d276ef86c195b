"""From the `url` of an OpenAI `image_url` part to the bytes of a file.

Only `data:` URLs: a server that fetches addresses that clients name reaches with its own rights
what they cannot, in its cluster and at its cloud. A proxy can fetch and inline them.
"""

from __future__ import annotations

import binascii

from kvline_server.images.bounds import Bounds, ImageRefused

# What the file is its first bytes say: clients name the wrong one of these. image/jpg is no type,
# and is sent.
MEDIA_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")
EXPECTED = "expected a URL such as data:image/png;base64,iVBORw0..."
MAX_HEAD = 200  # characters before the comma


def image_bytes(url: str, bounds: Bounds) -> bytes:
    """The file in a `data:` URL. Raises ImageRefused for any other."""
    scheme, colon, rest = url[: MAX_HEAD + 8].partition(":")
    if not colon or scheme.lower() != "data":
        if scheme.lower() in ("http", "https"):
            raise ImageRefused(
                f"{EXPECTED}, got one of {scheme.lower()}: this server fetches nothing from "
                "addresses that clients name, as it would reach for them what they cannot; send "
                "the file itself, or have a proxy inline it"
            )
        raise ImageRefused(f"{EXPECTED}, got {url[:40]!r}")
    head, comma, _ = rest.partition(",")
    media_type, *parameters = [part.strip().lower() for part in head.split(";")]
    if not comma or "base64" not in parameters:
        raise ImageRefused(f"{EXPECTED}, got one without ;base64, after {head[:40]!r}")
    return file_bytes(url[len("data:") + len(head) + 1 :], media_type, bounds)


def file_bytes(text: str, media_type: str, bounds: Bounds) -> bytes:
    """The file that `text` is in base64. Raises ImageRefused for other text, other media types, and
    a file that is empty or too large, by the length of the text."""
    if media_type not in MEDIA_TYPES:
        served = "image/png, image/jpeg, image/webp or image/gif"
        raise ImageRefused(f"expected {served}, got {media_type[:40]!r}; convert the image")
    bounds.check_bytes((len(text) + 3) // 4 * 3 - text[-2:].count("="))
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:  # of a character beyond ASCII too
        raise ImageRefused(
            f"expected base64 of the whole file (A-Z a-z 0-9 + / and = at its end, no blanks or "
            f"line breaks), got other text: {str(error).lower()}"
        ) from None

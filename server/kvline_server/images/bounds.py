"""What a picture of a request may be, and the error of one that is more, or none."""

from __future__ import annotations

from dataclasses import dataclass


class ImageRefused(ValueError):
    """The client's fault: the message says what was expected and what to do. Who catches it adds
    which part of the request it is."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Each is checked before what it bounds is decoded, or allocated."""

    file_bytes: int = 20 << 20  # of a file, as base64 is longer by a third
    pixels: int = 50_000_000  # by the file's header: 8064 x 6048 of a phone fit
    images: int = 8  # of a request
    patches: int = 16_384  # of an image, resized: the vision encoder's rows

    def check_count(self, images: int) -> None:
        """Raises ImageRefused where a request has more than `images`."""
        if images > self.images:
            raise ImageRefused(
                f"expected at most {self.images} images in a request, got {images}; send fewer, or "
                "raise engine.maxImagesPerRequest"
            )

    def check_bytes(self, size: int) -> None:
        """Raises ImageRefused for a file of so many bytes."""
        if not size:
            raise ImageRefused("expected an image, got 0 bytes; send the whole file")
        if size > self.file_bytes:
            raise ImageRefused(
                f"expected a file of at most {self.file_bytes} bytes, got {size}; send a smaller "
                "image, or as JPEG"
            )

    def check_pixels(self, width: int, height: int) -> None:
        """Raises ImageRefused for a file whose header says so many."""
        if not width or not height:
            raise ImageRefused(f"expected pixels, got an image of {width} x {height}")
        if width * height > self.pixels:
            raise ImageRefused(
                f"expected at most {self.pixels} pixels, got {width} x {height}; scale the image "
                "down before it is sent"
            )

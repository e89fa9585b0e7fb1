"""From the bytes of a picture to a PIL image, or to an array of its pixels.

JPEGs become arrays by simplejpeg where it is installed, which is libjpeg-turbo without a PIL image
in between. It is asked for the transform and the upsampling that PIL has, so the pixels are PIL's.
What it does not do, or not without a warning, is left to PIL.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""Of the many that PIL knows: some others start programs."""
PICTURE_STARTS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"II*\0", b"MM\0*")
"""What pictures begin with. A RIFF file may be WebP or a sound, so its column needs a name."""
_JPEG_START = b"\xff\xd8\xff"
_JPEG_COLORS = ("YCbCr", "Gray", "RGB")
"""Others are turned into RGB by formulas of PIL's own."""


def decode_image(value: Any) -> Any:
    """Return a PIL image in RGB. Hugging Face stores pictures in tables as `{"bytes": …}`."""
    data = _get_bytes(value)
    return value if data is None else _decode_by_pil(data)


def decode_pixels(value: Any) -> Any:
    """Return the pixels of a picture as an array of uint8, (height, width, 3), in RGB.

        def crop(sample):
            x, y = random.randrange(32), random.randrange(32)
            return sample["jpg"][y : y + 224, x : x + 224], sample["cls"]

        echelon.data.open("data/*.tar", decode={"jpg": echelon.data.decode_pixels}, transform=crop)

    They are the pixels that PIL's image has. JPEGs take about half of the time that PIL and its
    conversion to an array take.
    """
    data = _get_bytes(value)
    if data is None:
        return value
    pixels = try_decode_jpeg(data) if data.startswith(_JPEG_START) else None
    return np.array(_decode_by_pil(data)) if pixels is None else pixels


def _get_bytes(value: Any) -> bytes | None:
    """Return the bytes of a picture; None for a value that is none, such as a null of a table."""
    data = value.get("bytes") if isinstance(value, Mapping) else value
    if isinstance(data, bytes):
        return data
    if isinstance(value, Mapping) and value.get("path"):
        raise ValueError(f"the table has its path only, {value['path']!r}, and not its bytes")
    return None


def _decode_by_pil(data: bytes) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
    except UnidentifiedImageError as error:  # whose text has the address of an object
        raise ValueError("it is not a picture of a known format") from error
    image.load()  # else the pixels are read where they are first used, and errors are raised there
    return image if image.mode == "RGB" else image.convert("RGB")


def try_decode_jpeg(data: bytes) -> NDArray[np.uint8] | None:
    """Return the pixels of a JPEG; None for one that PIL is to be asked about, such as a damaged
    one, or one so large that PIL may refuse it."""
    if (modules := _import_decoders()) is None:
        return None
    simplejpeg, pil_image = modules
    try:
        height, width, color, _ = simplejpeg.decode_jpeg_header(data)
        limit = pil_image.MAX_IMAGE_PIXELS
        if color not in _JPEG_COLORS or (limit is not None and height * width > limit):
            return None
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(data)
    except ValueError:  # also for a mere warning of libjpeg's
        return None
    return pixels


@cache
def _import_decoders() -> tuple[Any, Any] | None:
    """Return simplejpeg and PIL.Image, where both are installed: an import that finds its module
    loaded costs half a microsecond, in every picture."""
    try:
        import simplejpeg
        from PIL import Image
    except ImportError:
        return None
    return simplejpeg, Image

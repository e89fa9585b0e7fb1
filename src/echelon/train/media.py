"""Texts, images and histograms beside the numbers of a run, as a user gives them. What becomes of
them in metrics.jsonl is in `tracking.media_records`."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.runs.run_folder import Run
from echelon.tracking.media_records import PNG_COLOR_TYPES, quote_media_name
from echelon.utils.files import replace_file

_GRID_GAP = 2
_MAX_BINS = 512
"""As many as wandb takes."""
_MAX_TEXT_BYTES = 1 << 19
"""Readers of metrics.jsonl take lines of twice as many bytes."""

Array = npt.NDArray[Any]


class MediaError(ValueError):
    """A value that cannot be shown, and what to give instead."""

    def __init__(self, what: str, do: str) -> None:
        super().__init__(what)
        self.what, self.do = what, do


class Image:
    """An image for session.log; several of one size are shown as a grid.

        session.log(samples=echelon.Image(generator(noise)))

    `pixels` is a tensor or an array of shape (H, W), (C, H, W) or (H, W, C), with 1, 3 or 4
    channels; a batch of images has one more dimension in front. Floats are from 0 to 1, and are
    clipped there; bytes (uint8) are from 0 to 255.
    """

    def __init__(self, pixels: Any) -> None:
        self.pixels = pixels

    def render_pixels(self) -> Array:
        """Return bytes of shape (H, W, C), of a batch those of the grid; raises MediaError."""
        batch = _arrange_batch(_make_bytes(_make_array(self.pixels)))
        return _join_grid(batch)


class Histogram:
    """A histogram for session.log, of the values of a tensor or an array.

    session.log(weights=echelon.Histogram(model.fc.weight))
    """

    def __init__(self, values: Any, bins: int = 64) -> None:
        self.values, self.bins = values, bins

    def count_values(self) -> dict[str, list[float]]:
        """Return the edges of the bins and how many values are in each; raises MediaError."""
        if not 1 <= self.bins <= _MAX_BINS:
            raise MediaError(
                f"a histogram with bins={self.bins}", f"give a number from 1 to {_MAX_BINS}"
            )
        values = _make_array(self.values)
        if values.dtype.kind not in "fiub" or not values.size:
            raise MediaError(
                f"a histogram of {values.size} values of {values.dtype}", "give numbers"
            )
        values = values.astype(np.float64).ravel()
        if bad := int((~np.isfinite(values)).sum()):
            raise MediaError(
                f"a histogram of {values.size} values, of which {bad} are not finite",
                "look for the step that made them, or leave them out: x[x.isfinite()]",
            )
        counts, edges = np.histogram(values, self.bins)
        # Six digits place a bin, and keep lines short for those who read the end of the file.
        return {"bins": [float(f"{e:.6g}") for e in edges], "counts": counts.tolist()}


Media = str | Image | Histogram


def encode_media(run: Run, name: str, step: int, value: Media) -> Any:
    """Return a value as a line of metrics has it; an image is written into the run's folder.
    Raises MediaError, or OSError where the image cannot be written."""
    if isinstance(value, Histogram):
        return value.count_values()
    if isinstance(value, Image):
        pixels = value.render_pixels()
        run.media_folder.mkdir(exist_ok=True)
        path = run.media_folder / f"{quote_media_name(name)}-{step:09d}.png"
        with replace_file(path) as temporary:
            temporary.write_bytes(encode_png(pixels))
        return {"image": str(path.relative_to(run.folder))}
    if len(json.dumps(value)) > _MAX_TEXT_BYTES:
        raise MediaError(
            f"a text of {len(value):,} characters",
            "log a part of it, or write it into a file in session.folder",
        )
    return value


# --- pixels ---


def _make_array(value: Any) -> Array:
    """Return a tensor or anything like an array as an array. torch need not be imported for it."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    return np.asarray(value)


def _make_bytes(pixels: Array) -> Array:
    if pixels.dtype.kind == "f":
        if bad := int((~np.isfinite(pixels)).sum()):
            raise MediaError(
                f"an image of which {bad} of {pixels.size} values are not finite",
                "look for the step that made them, or replace them: torch.nan_to_num(x)",
            )
        rounded: Array = np.rint(pixels.clip(0, 1) * 255).astype(np.uint8)
        return rounded
    if pixels.dtype.kind == "b":
        return pixels.astype(np.uint8) * 255
    if pixels.dtype != np.uint8:
        raise MediaError(
            f"an image of {pixels.dtype}", "give floats from 0 to 1, or uint8 from 0 to 255"
        )
    return pixels


def _arrange_batch(pixels: Array) -> Array:
    """Return pixels as (N, H, W, C). Where two layouts fit, the channels are first, as in torch."""
    shape = pixels.shape
    if len(shape) == 2:
        pixels = pixels[None, :, :, None]
    elif len(shape) == 3 and shape[0] in PNG_COLOR_TYPES:
        pixels = pixels.transpose(1, 2, 0)[None]
    elif len(shape) == 3 and shape[2] in PNG_COLOR_TYPES:
        pixels = pixels[None]
    elif len(shape) == 4 and shape[1] in PNG_COLOR_TYPES:
        pixels = pixels.transpose(0, 2, 3, 1)
    if pixels.ndim != 4 or pixels.shape[3] not in PNG_COLOR_TYPES or not pixels.size:
        raise MediaError(
            f"an image of shape {shape}",
            "give (H, W), (C, H, W) or (H, W, C) with 1, 3 or 4 channels, or a batch of these",
        )
    return pixels


def _join_grid(batch: Array) -> Array:
    """Return images side by side in rows, with a black gap between them."""
    count, height, width, channels = batch.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    high, wide = height + _GRID_GAP, width + _GRID_GAP
    grid = np.zeros((rows * high - _GRID_GAP, columns * wide - _GRID_GAP, channels), np.uint8)
    for number, image in enumerate(batch):
        top, left = number // columns * high, number % columns * wide
        grid[top : top + height, left : left + width] = image
    return grid


# --- files ---


def encode_png(pixels: Array) -> bytes:
    """Return bytes of shape (H, W, C) as a PNG file."""
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, PNG_COLOR_TYPES[channels], 0, 0, 0)
    unfiltered = np.zeros((height, 1), np.uint8)  # each row begins with the number of its filter
    rows = np.hstack([unfiltered, pixels.reshape(height, width * channels)])
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_encode_chunks(chunks))


def _encode_chunks(chunks: tuple[tuple[bytes, bytes], ...]) -> Iterator[bytes]:
    for kind, data in chunks:
        checksum = zlib.crc32(kind + data)
        yield struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

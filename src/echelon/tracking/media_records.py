"""Texts, images and histograms as lines of metrics.jsonl have them, for those who read the lines:

a text       "a sentence"
an image     {"image": "media/NAME-000000010.png"}, in the folder of the run
a histogram  {"bins": [0.0, 0.5, 1.0], "counts": [7, 3]}
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import urllib.parse
from pathlib import Path
from typing import Any

from echelon.runs.run_folder import Run

PNG_COLOR_TYPES = {1: 0, 3: 2, 4: 6}
"""By the number of channels: gray, RGB, RGBA."""
_MAX_FILE_NAME = 100


def quote_media_name(name: str) -> str:
    """Return the name of a metric as part of a file name; no two names have the same."""
    # Hidden files in the folder are half written ones, so no name may begin with a dot.
    quoted = urllib.parse.quote(name, safe="").replace(".", "%2E")
    if len(quoted) <= _MAX_FILE_NAME:
        return quoted
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def remove_media_after(run: Run, step: int) -> None:
    """Remove the images after a step that a run continues from, and what a kill left half done."""
    with contextlib.suppress(OSError):
        for path in list(run.media_folder.glob("*.png")):
            number = path.stem.rpartition("-")[2]
            if path.name.startswith(".") or (number.isdigit() and int(number) > step):
                path.unlink(missing_ok=True)


def find_image(run: Run, value: Any) -> Path | None:
    """Return the file of an image that a line has; None if the value is none, or its file is
    gone."""
    if not isinstance(value, dict) or not isinstance(value.get("image"), str):
        return None
    path = run.media_folder / Path(value["image"]).name
    return path if path.is_file() else None


def is_histogram(value: Any) -> bool:
    """Return whether a value of a line is a histogram."""
    return isinstance(value, dict) and "bins" in value and "counts" in value


def read_png_size(data: bytes) -> tuple[int, int, int]:
    """Return the width, the height and the number of channels of a PNG file of ours."""
    width, height, _, color_type = struct.unpack(">IIBB", data[16:26])
    return width, height, next(c for c, number in PNG_COLOR_TYPES.items() if number == color_type)

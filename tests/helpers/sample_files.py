"""Small files of samples: pictures in folders, tar shards, lines of JSON."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image


def make_jpeg(width: int, height: int, seed: int = 0) -> bytes:
    """A picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def write_photos(folder: Path, *classes: str, each: int = 3) -> Path:
    """A folder for each class."""
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(each):
            picture = make_jpeg(16 + i, 12, seed=100 * number + i)
            (folder / name / f"{i:02}.jpg").write_bytes(picture)
    return folder


def write_shard(file: Path, samples: int, prefix: str = "n") -> Path:
    """A tar with samples of a picture, a class and a text."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as tar:
        for i in range(samples):
            members = {"jpg": make_jpeg(16, 12, i), "cls": b"%d" % (i % 3), "txt": b"text %d" % i}
            for ending, content in members.items():
                info = tarfile.TarInfo(f"{prefix}{i:04}.{ending}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return file


def write_lines(file: Path, samples: int) -> Path:
    """Lines of JSON with a text, a number and a list of numbers."""
    lines = [{"text": f"text {i}", "label": i % 3, "vector": [i, i + 0.5]} for i in range(samples)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def overwrite(file: Path, found: bytes, replacement: bytes, skip: int = 0) -> None:
    """Damage a file, `skip` bytes after what is found in it."""
    content = bytearray(file.read_bytes())
    at = content.index(found) + skip
    content[at : at + len(replacement)] = replacement
    file.write_bytes(content)

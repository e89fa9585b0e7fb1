"""The files that data_files.py reads, in the formats of all contestants."""

from __future__ import annotations

import io
import os
import tarfile
from functools import partial
from pathlib import Path

import numpy as np

IMAGES, SHARDS, SIDE, CLASSES = 1_000, 4, 256, 10
ROWS, ROW_GROUPS = 400_000, 8
SMALL_SAMPLES, SMALL_BYTES = 50_000, 100
TOKEN_FILE_BYTES = 4 << 30


def write_files(task: str, folder: Path) -> None:
    {
        "images": write_images,
        "tokens": write_tokens,
        "rows": write_rows,
        "small": write_small,
    }[task](folder)


def make_picture(number: int) -> bytes:
    """A JPEG of about 15 kB: soft shapes with noise."""
    from PIL import Image

    rng = np.random.default_rng(number)
    shapes = Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))
    pixels = np.asarray(shapes.resize((SIDE, SIDE), Image.Resampling.BICUBIC)).astype(np.int16)
    pixels = pixels + rng.normal(0, 6, pixels.shape).astype(np.int16)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def get_sample(pictures: list[bytes], number: int) -> dict[str, object]:
    """As litData's writer asks for it, by number."""
    return {"jpg": pictures[number], "cls": number % CLASSES}


def get_typed_sample(pictures: list[bytes], number: int) -> dict[str, object]:
    """With the picture in litData's own type, which it decodes itself."""
    from litdata.streaming.serializers import Jpeg

    return {"jpg": Jpeg(bytes=pictures[number]), "cls": number % CLASSES}


def write_images(folder: Path) -> None:
    import litdata

    from data_contestants import HAS_TORCHVISION, import_streaming

    pictures = [make_picture(number) for number in range(IMAGES)]
    tars, files = folder / "images" / "tar", folder / "images" / "files"
    tars.mkdir(parents=True)
    for shard in range(SHARDS):
        with tarfile.open(tars / f"train-{shard:03}.tar", "w") as tar:
            for number in range(shard * IMAGES // SHARDS, (shard + 1) * IMAGES // SHARDS):
                add_member(tar, f"{number:06}.jpg", pictures[number])
                add_member(tar, f"{number:06}.cls", str(number % CLASSES).encode())
    for number, picture in enumerate(pictures):
        file = files / str(number % CLASSES) / f"{number:06}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(picture)
    columns = {"jpg": "bytes", "cls": "int"}
    with import_streaming().MDSWriter(
        out=str(folder / "images" / "mds"), columns=columns, size_limit=8 << 20
    ) as writer:
        for number in range(IMAGES):
            writer.write(get_sample(pictures, number))
    stored = {"litdata": get_sample} | (
        {"litdata-jpeg": get_typed_sample} if HAS_TORCHVISION else {}
    )
    for name, get in stored.items():
        litdata.optimize(
            partial(get, pictures),
            list(range(IMAGES)),
            str(folder / "images" / name),
            chunk_bytes="8MB",
            num_workers=1,
            verbose=False,
        )


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def write_tokens(folder: Path) -> None:
    """A file of zeros, in the page cache as any other is once it was read."""
    with (folder / "tokens.bin").open("wb") as file:
        os.truncate(file.fileno(), TOKEN_FILE_BYTES)
    with (folder / "tokens.bin").open("rb", buffering=0) as file:
        while file.read(16 << 20):
            pass


def write_rows(folder: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rng = np.random.default_rng(0)
    types = ["f4"] * 4 + ["i8"] * 3 + ["f8", "i4"]
    columns = {
        f"number_{place}": (rng.standard_normal(ROWS) * 1000).astype(kind)
        for place, kind in enumerate(types)
    }
    letters = rng.integers(97, 123, (ROWS, 12), dtype=np.uint8)
    texts = [text.decode() for text in letters.view("S12")[:, 0]]
    (folder / "rows").mkdir()
    table = pa.table({**columns, "text": texts})
    parquet.write_table(table, folder / "rows" / "rows.parquet", row_group_size=ROWS // ROW_GROUPS)


def write_small(folder: Path) -> None:
    from data_contestants import import_streaming

    (folder / "small").mkdir()
    values = np.random.default_rng(0).integers(0, 256, (SMALL_SAMPLES, SMALL_BYTES), dtype=np.uint8)
    np.save(folder / "small" / "samples.npy", values)
    columns = {"values": f"ndarray:uint8:{SMALL_BYTES}"}
    with import_streaming().MDSWriter(
        out=str(folder / "small" / "mds"), columns=columns, size_limit=1 << 20
    ) as writer:
        for row in values:
            writer.write({"values": row})

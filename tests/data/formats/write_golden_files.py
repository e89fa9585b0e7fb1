"""Write the files of `golden/` with the libraries that people write such files with, and what these
libraries read from them.

    pip install webdataset datasets pillow
    python tests/data/formats/write_golden_files.py

Neither library is needed to run the tests.
"""

from __future__ import annotations

import io
import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import webdataset
from PIL import Image

FOLDER = Path(__file__).parent / "golden"


def make_picture(number: int) -> Image.Image:
    return Image.fromarray(np.full((4, 6, 3), 10 * number, np.uint8))


def encode_png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def make_plain(value: Any) -> Any:
    """As JSON; a picture is its pixels."""
    if isinstance(value, Image.Image):
        return np.asarray(value.convert("RGB")).tolist()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, datetime):
        return str(value)
    return value


def save_expected(name: str, samples: Any) -> None:
    plain = [{k: make_plain(v) for k, v in sample.items() if k[0] != "_"} for sample in samples]
    (FOLDER / f"{name}.json").write_text(json.dumps(plain) + "\n")


def write_tar() -> None:
    with webdataset.TarWriter(str(FOLDER / "shard.tar")) as writer:
        for number in range(5):
            writer.write(
                {
                    "__key__": f"train/n{number:04}",
                    "png": encode_png(make_picture(number)),
                    "cls": number,
                    "json": {"id": number, "name": "grün"},
                    "emb.npy": np.arange(number + 1, dtype=np.float32),
                    "txt": f"text {number}\n",
                }
            )
    shard = webdataset.WebDataset(str(FOLDER / "shard.tar"), shardshuffle=False)
    save_expected("shard", shard.decode("pil"))


def write_dataset() -> None:
    features = datasets.Features(
        {
            "img": datasets.Image(),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "text": datasets.Value("string"),
            "vector": datasets.Sequence(datasets.Value("float32")),
            "matrix": datasets.Array2D((2, 3), "int32"),
            "inner": {"x": datasets.Value("int64"), "words": [datasets.Value("string")]},
            "at": datasets.Value("timestamp[us]"),
            "maybe": datasets.Value("int32"),
        }
    )
    rows = [
        {
            "img": make_picture(number),
            "label": number % 2,
            "text": f"text {number}",
            "vector": [number, number + 0.5],
            "matrix": [[number] * 3] * 2,
            "inner": {"x": number, "words": ["a"] * (number % 3)},
            "at": datetime(2024, 1, 1 + number),
            "maybe": None if number % 2 else number,
        }
        for number in range(7)
    ]
    dataset = datasets.Dataset.from_list(rows, features=features)
    dataset.to_parquet(FOLDER / "table.parquet")
    save_expected("table", dataset)
    shuffled = dataset.shuffle(seed=1)
    shuffled.save_to_disk(FOLDER / "saved")
    save_expected("saved", shuffled)


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    write_tar()
    write_dataset()

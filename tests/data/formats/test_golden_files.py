"""Files that webdataset and Hugging Face's datasets have written: read as they read them."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import echelon

GOLDEN = Path(__file__).parent / "golden"


def make_plain(value: Any) -> Any:
    if isinstance(value, Image.Image):
        return np.asarray(value).tolist()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return str(value) if isinstance(value, datetime) else value


@pytest.mark.parametrize("name", ["shard.tar", "table.parquet", "saved"])
def test_samples_are_those_of_the_library_that_wrote_them(tmp_path: Path, name: str) -> None:
    source = GOLDEN / name
    copied = shutil.copytree if source.is_dir() else shutil.copy
    copied(source, tmp_path / name)  # an index is written beside it
    dataset = echelon.data.open(tmp_path / name)
    expected = json.loads((GOLDEN / f"{source.stem}.json").read_text())
    found = [{column: make_plain(value) for column, value in each.items()} for each in dataset]
    assert found == expected

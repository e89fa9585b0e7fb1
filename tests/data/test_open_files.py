"""Which files are meant, and which format they have."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import echelon
from echelon.errors import EchelonError


def write_rows(path: Path, *values: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.save(file, np.array(values))
    return path


def read_rows(*paths: str | Path, **options: str) -> list[int]:
    given = paths[0] if len(paths) == 1 else paths
    return [int(each["data"]) for each in echelon.data.open(given, **options)]  # type: ignore[arg-type]


def refuse(*paths: str | Path, **options: str) -> str:
    with pytest.raises(EchelonError) as caught:
        read_rows(*paths, **options)
    return str(caught.value)


def test_a_file_a_folder_a_pattern_and_a_list(tmp_path: Path) -> None:
    a, b = write_rows(tmp_path / "x" / "a.npy", 1, 2), write_rows(tmp_path / "x" / "y" / "b.NPY", 3)
    write_rows(tmp_path / "x" / "_temporary" / "c.npy", 9)
    (tmp_path / "x" / ".hidden.npy").touch()
    (tmp_path / "x" / "README.md").touch()
    assert read_rows(a) == [1, 2]
    assert read_rows(tmp_path / "x") == [1, 2, 3]
    assert read_rows(f"{tmp_path}/x/*.npy") == [1, 2]
    assert read_rows(f"{tmp_path}/**/*.[nN]*") == [9, 1, 2, 3]
    assert read_rows(b, a, b) == [3, 1, 2, 3], "a list is taken as it is"


def test_a_name_with_the_signs_of_a_pattern_is_a_file(tmp_path: Path) -> None:
    assert read_rows(write_rows(tmp_path / "a[1].npy", 4)) == [4]


def test_a_format_that_the_ending_does_not_say(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.npy", 1).rename(tmp_path / "a.array")
    assert "a.array has no ending of a known format" in refuse(path)
    assert read_rows(path, format="npy") == [1]
    assert "did you mean 'npy'?" in refuse(path, format="np")


def test_all_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.npy", 1)
    (tmp_path / "empty").mkdir()
    text = refuse(tmp_path / "trian.npy", f"{tmp_path}/*.tar", tmp_path / "empty", "ftp://a/b")
    assert f"{tmp_path}/trian.npy does not exist" in text
    assert "did you mean 'train.npy'?" in text
    assert f"nothing matches {tmp_path}/*.tar" in text
    assert f"the folder {tmp_path}/empty has no files with a known ending" in text
    assert "ftp://a/b is of no store that is known" in text
    with pytest.raises(EchelonError, match="paths is an empty list"):
        echelon.data.open([])


def test_formats_are_not_mixed(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.npy", 1)
    (tmp_path / "b.parquet").touch()
    text = refuse(tmp_path)
    assert f"several formats: 1 npy ({tmp_path}/a.npy), 1 parquet ({tmp_path}/b.parquet)" in text
    (tmp_path / "c.bin").touch()
    assert "echelon.data.open_tokens(path, length=1024)" in refuse(tmp_path / "c.bin")


def test_files_without_samples_are_refused(tmp_path: Path) -> None:
    assert "there are no samples in" in refuse(write_rows(tmp_path / "a.npy"))


def test_columns_is_a_list(tmp_path: Path) -> None:
    text = refuse(write_rows(tmp_path / "a.npy", 1), columns="data")
    assert "give a list of names: columns=['data']" in text


def test_the_public_names_are_imported_when_they_are_used() -> None:
    program = (
        "import sys, echelon; print(dir(echelon.data)); assert 'numpy' not in sys.modules\n"
        "echelon.data.open; assert 'numpy' in sys.modules and 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert "'open', 'open_tokens'" in done.stdout


def test_pictures_and_tars_are_opened_by_their_folder_and_ending(tmp_path: Path) -> None:
    for number, label in enumerate(("cat", "dog", "dog")):
        path = tmp_path / "pictures" / label / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2), (number, 0, 0)).save(path)
    dataset = echelon.data.open(tmp_path / "pictures")
    assert [each["label"] for each in dataset] == [0, 1, 1]
    assert dataset[2]["image"].getpixel((0, 0)) == (2, 0, 0)
    assert (
        echelon.data.open(tmp_path / "pictures", format="images", decode=None)[0]["image"][1:4]
        == b"PNG"
    )
    assert "open the folder that has a folder of pictures for each class" in refuse(path)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(path, "x.png")
    assert echelon.data.open(tmp_path / "*.tar")[0]["png"].size == (2, 2)


def test_what_is_decoded(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "n": 1}\n')
    path = tmp_path / "a.jsonl"
    assert echelon.data.open(path)[0] == {"text": "a", "n": 1}
    assert echelon.data.open(path, decode={"n": str})[0] == {"text": "a", "n": "1"}
    joined = echelon.data.open(path, decode=lambda name, value: f"{name}={value}")
    assert joined[0] == {"text": "text=a", "n": "n=1"}
    with pytest.raises(EchelonError, match="decode has 'x', which is not a column"):
        echelon.data.open(path, decode={"x": str})

"""Folders with links that lead in a circle, pipes, and folders that may not be read."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from other_users import STRANGER, act_as, make_open_folder, needs_root
from sample_files import write_photos, write_shard

import echelon
from echelon.data.formats.reader import BadSampleError
from echelon.errors import EchelonError


def refuse(path: Path) -> list[str]:
    with pytest.raises(EchelonError) as caught:
        echelon.data.open(path)
    return [fault.what for fault in caught.value.faults]


def test_a_link_that_leads_back_is_refused(tmp_path: Path) -> None:
    tars = write_shard(tmp_path / "tars" / "a.tar", 2).parent
    (tars / "loop").symlink_to(".")
    assert refuse(tars) == [f"{tars}/loop is a link that leads back to a folder it is in"]
    photos = write_photos(tmp_path / "photos", "cat")
    (photos / "cat" / "up").symlink_to("..")
    assert refuse(photos) == [f"{photos}/cat/up is a link that leads back to a folder it is in"]


def test_a_link_to_another_folder_is_followed(tmp_path: Path) -> None:
    write_shard(tmp_path / "elsewhere" / "a.tar", 2)
    for name in ("one", "two"):
        (tmp_path / "tars" / name).mkdir(parents=True)
        (tmp_path / "tars" / name / "linked").symlink_to(tmp_path / "elsewhere")
    # Both have one index, whose lock is taken once.
    assert len(echelon.data.open(tmp_path / "tars")) == 4


@pytest.mark.parametrize("ending", ["tar", "jsonl", "parquet", "arrow", "npy"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, ending: str) -> None:
    pipe = tmp_path / f"a.{ending}"
    os.mkfifo(pipe)
    assert refuse(pipe) == [f"{pipe} cannot be read: it is a named pipe"]
    os.mkfifo(tmp_path / "a.bin")
    with pytest.raises(EchelonError, match="a named pipe"):
        echelon.data.open_tokens(tmp_path / "a.bin", length=4)


def test_a_picture_that_is_a_pipe_or_a_link_to_nothing_is_a_bad_sample(tmp_path: Path) -> None:
    write_photos(tmp_path, "cat", each=1)
    os.mkfifo(tmp_path / "cat" / "pipe.jpg")
    (tmp_path / "cat" / "void.jpg").symlink_to("nothing.jpg")
    (tmp_path / "cat" / "x.jpg").symlink_to("x.jpg")
    dataset = echelon.data.open(tmp_path)
    assert np.asarray(dataset[0]["image"]).shape == (12, 16, 3)
    for row, why in enumerate(("a named pipe", "no such file", "too many levels"), start=1):
        with pytest.raises(BadSampleError, match=f"jpg, sample 0: it cannot be read: .*{why}"):
            dataset[row]


@needs_root
def test_a_folder_that_may_not_be_read_is_named() -> None:
    with make_open_folder() as folder:
        write_shard(folder / "a.tar", 1)
        echelon.data.open(folder)  # with an index, and everything imported
        (folder / "inner").mkdir(mode=0o700)
        with act_as(STRANGER):
            assert refuse(folder) == [f"{folder}/inner cannot be read: permission denied"]
            inner = folder / "inner" / "b.tar"
            assert refuse(inner) == [f"{inner} cannot be read: permission denied"]

"""Folders of pictures, one for each class."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from echelon.data.formats.image_folder import ImageFolderReader
from echelon.data.formats.reader import BadSampleError
from echelon.errors import EchelonError


def write_files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    return folder


def test_labels_are_classes_sorted_by_name(tmp_path: Path) -> None:
    names = ["dog/1.jpg", "cat/2.PNG", "cat/10.jpeg", "cat/x/y.webp", "bird.jpg/1.bmp"]
    write_files(tmp_path, *names, ".cache/1.jpg", "cat/.hidden.jpg", "cat/notes.txt", "README")
    reader = ImageFolderReader(tmp_path)
    assert reader.class_names == ["bird.jpg", "cat", "dog"]
    expected = [
        (b"bird.jpg/1.bmp", 0),
        (b"cat/10.jpeg", 1),
        (b"cat/2.PNG", 1),
        (b"cat/x/y.webp", 1),
        (b"dog/1.jpg", 2),
    ]
    samples = reader.read_samples(range(len(reader)))
    assert [(sample["image"], sample["label"]) for sample in samples] == expected
    assert pickle.loads(pickle.dumps(reader)).read_samples([4, 0]) == [samples[4], samples[0]]
    assert reader.locate(3).file == tmp_path / "cat" / "x" / "y.webp"
    assert reader.chunks.starts.tolist() == [0, 1, 2, 3, 4, 5]
    assert reader.chunks.sizes_bytes.tolist() == [11] * 5, "the mean"
    assert ImageFolderReader(tmp_path, ["label"]).read_samples([4]) == [{"label": 2}]


def test_a_picture_that_is_gone_is_named(tmp_path: Path) -> None:
    reader = ImageFolderReader(write_files(tmp_path, "a/1.jpg", "a/2.jpg"))
    (tmp_path / "a/2.jpg").unlink()
    with pytest.raises(BadSampleError, match=r"a/2\.jpg, sample 0: it cannot be read: no such"):
        reader.read_samples([1])
    with pytest.raises(IndexError, match="there is no sample 2: there are 2"):
        reader.read_samples([2])


def test_what_is_wrong_with_a_folder_is_told_at_once(tmp_path: Path) -> None:
    write_files(tmp_path, "1.jpg", "2.jpg", "a/1.jpg", "b/notes.txt", "c/x")
    with pytest.raises(EchelonError) as caught:
        ImageFolderReader(tmp_path, ["image", "lable"])
    assert [fault.what for fault in caught.value.faults] == [
        f"{tmp_path} has no column 'lable'",
        f"{tmp_path}/1.jpg is in no class, like 1 more",
        f"{tmp_path}/b has no pictures",
        f"{tmp_path}/c has no pictures",
    ]


def test_a_folder_without_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EchelonError, match="has no folders"):
        ImageFolderReader(tmp_path)
    with pytest.raises(EchelonError, match="none cannot be read: no such file or directory"):
        ImageFolderReader(tmp_path / "none")

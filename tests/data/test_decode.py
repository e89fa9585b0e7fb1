"""Bytes become pictures, arrays, JSON, text and numbers by the name of their column."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from echelon.data.decode import DecodeSetting, SampleDecoder
from echelon.data.formats.reader import BadSampleError, SamplePlace
from echelon.errors import EchelonError

PLACE = SamplePlace(Path("a.tar"), 3, "key")


def decode(sample: dict[str, Any], setting: DecodeSetting = "auto") -> dict[str, Any]:
    decoder = pickle.loads(pickle.dumps(SampleDecoder(setting, sample)))
    assert isinstance(decoder, SampleDecoder)
    return decoder.decode_sample(sample, lambda: PLACE)


def encode_image(mode: str, format: str) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (5, 4), 200).save(file, format)
    return file.getvalue()


def encode_array(save: Any, *args: Any, **kwargs: Any) -> bytes:
    file = io.BytesIO()
    save(file, *args, **kwargs)
    return file.getvalue()


@pytest.mark.parametrize(
    ("column", "mode", "format"),
    [
        ("jpg", "RGB", "JPEG"),
        ("jpeg", "L", "JPEG"),
        ("png", "RGBA", "PNG"),
        ("seg.PNG", "P", "PNG"),
        ("webp", "RGB", "WEBP"),
        ("bmp", "L", "BMP"),
        ("image", "CMYK", "JPEG"),
        ("gif", "P", "GIF"),
        ("tiff", "L", "TIFF"),
    ],
)
def test_pictures_are_rgb(column: str, mode: str, format: str) -> None:
    image = decode({column: encode_image(mode, format)})[column]
    assert (image.mode, image.size) == ("RGB", (5, 4))


def test_pictures_of_hugging_face_tables() -> None:
    data = encode_image("RGB", "PNG")
    sample = decode({"image": {"bytes": data, "path": None}, "label": 3})
    assert sample["image"].size == (5, 4)
    assert sample["label"] == 3


def test_files_in_tables_are_pictures_whatever_their_column_is_called() -> None:
    picture = {"bytes": encode_image("RGB", "PNG"), "path": "1.png"}
    sound = {"bytes": b"RIFF\0\0\0\0WAVE", "path": "1.wav"}
    decoder = SampleDecoder("auto", ["img", "voice"], ["img", "voice"])
    decoded = decoder.decode_sample({"img": picture, "voice": sound}, lambda: PLACE)
    assert decoded["img"].size == (5, 4)
    assert decoded["voice"] == sound
    assert decoder.leaves_numbers
    with pytest.raises(BadSampleError, match=r"the table has its path only, '1\.png'"):
        decode({"image": {"bytes": None, "path": "1.png"}})
    assert decode({"image": None}) == {"image": None}


def test_other_columns_by_name() -> None:
    array = np.arange(6, dtype=np.float16).reshape(2, 3)
    sample = decode(
        {
            "npy": encode_array(np.save, array),
            "npz": encode_array(np.savez, a=array, b=array + 1),
            "meta.json": b'{"a": [1, null]}',
            "txt": "grün".encode(),
            "cls": b" 7\n",
            "mp4": b"\0",
            "text": "a table has text",
        }
    )
    np.testing.assert_array_equal(sample["npy"], array)
    assert sample["npy"].dtype == np.float16
    assert sorted(sample["npz"]) == ["a", "b"]
    np.testing.assert_array_equal(sample["npz"]["b"], array + 1)
    del sample["npy"], sample["npz"]
    assert sample == {
        "meta.json": {"a": [1, None]},
        "txt": "grün",
        "cls": 7,
        "mp4": b"\0",
        "text": "a table has text",
    }


def add_name(column: str, value: Any) -> Any:
    return (column, value)


def test_decoding_by_functions() -> None:
    sample = {"cls": b"7", "txt": b"a", "pth": b"b"}
    assert decode(sample, None) == sample
    assert decode(sample, add_name) == {name: (name, value) for name, value in sample.items()}
    chosen: DecodeSetting = {"txt": len, "pth": None}
    assert decode(sample, chosen) == {"cls": 7, "txt": 1, "pth": b"b"}


@pytest.mark.parametrize(
    ("column", "data", "why"),
    [
        ("cls", b"seven", "cls cannot be decoded: invalid literal"),
        ("jpg", b"no picture", "jpg cannot be decoded: it is not a picture of a known format"),
        ("jpg", encode_image("RGB", "JPEG")[:-20], "jpg cannot be decoded: "),
        ("png", encode_image("RGB", "PNG")[:50], "png cannot be decoded: "),
        ("npy", encode_array(np.save, np.array([None]), allow_pickle=True), "Object arrays cannot"),
        ("json", b"{", "json cannot be decoded: Expecting"),
        ("txt", b"\xff", "txt cannot be decoded: 'utf-8' codec"),
    ],
    ids=["word", "no-picture", "cut-jpeg", "cut-png", "objects", "cut-json", "no-utf8"],
)
def test_what_cannot_be_decoded_is_named(column: str, data: bytes, why: str) -> None:
    with pytest.raises(BadSampleError, match=why) as caught:
        decode({column: data})
    assert caught.value.place == PLACE
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_faults_of_the_setting() -> None:
    with pytest.raises(EchelonError, match="'pth' is pickled") as caught:
        SampleDecoder({"jgp": len}, ["jpg", "pth", "model.pt"])
    assert len(caught.value.faults) == 3
    with pytest.raises(EchelonError, match="decode is 'pil'"):
        SampleDecoder("pil", ["jpg"])  # type: ignore[arg-type]

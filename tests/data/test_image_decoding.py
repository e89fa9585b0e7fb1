"""Arrays of pixels are those of PIL, whoever decoded them."""

from __future__ import annotations

import io
import pickle
import random
import sys
import tarfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image

import echelon.data
from echelon.data import image_decoding
from echelon.data.decode import SampleDecoder
from echelon.data.formats.reader import BadSampleError
from echelon.data.image_decoding import decode_image, decode_pixels, try_decode_jpeg

SIZES = ((1, 1), (7, 5), (16, 16), (33, 47))


def make_image(mode: str, size: tuple[int, int] = (33, 47)) -> Image.Image:
    """Soft shapes, as photographs have them: upsampling of colours matters at their edges."""
    pixels = np.random.default_rng(sum(size)).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).convert(mode)


def encode(image: Image.Image, format: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def decode_or_explain(decode: Any, data: bytes) -> Any:
    """Return the pixels as a list, or the error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return np.asarray(decode(data)).tolist()
        except Exception as error:
            return type(error), str(error)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "options",
    [
        {"subsampling": "4:4:4"},
        {"subsampling": "4:2:2"},
        {"subsampling": "4:2:0"},
        {"subsampling": "4:2:0", "progressive": True},
        {"quality": 100, "optimize": True, "restart_marker_blocks": 2},
        {"keep_rgb": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_pixels_of_jpegs_are_pils(mode: str, options: Any, size: tuple[int, int]) -> None:
    data = encode(make_image(mode, size), **options)
    pixels = try_decode_jpeg(data)
    assert pixels is not None
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels, np.asarray(decode_image(data)))


@pytest.mark.parametrize("subsampling", ["440", "411"])
def test_pixels_of_other_subsampling_are_pils(subsampling: str) -> None:
    data = simplejpeg.encode_jpeg(np.array(make_image("RGB")), colorsubsampling=subsampling)
    np.testing.assert_array_equal(decode_pixels(data), np.asarray(decode_image(data)))


def test_a_rotation_in_the_exif_data_is_left_as_pil_leaves_it() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    data = encode(make_image("RGB"), exif=exif.tobytes(), icc_profile=b"no profile")
    assert try_decode_jpeg(data) is not None
    np.testing.assert_array_equal(decode_pixels(data), np.asarray(decode_image(data)))


@pytest.mark.parametrize(
    ("mode", "format"),
    [("CMYK", "JPEG"), ("RGBA", "PNG"), ("I;16", "PNG"), ("P", "GIF"), ("RGB", "WEBP")],
)
def test_other_pictures_are_decoded_by_pil(mode: str, format: str) -> None:
    image = Image.new(mode, (5, 4), 200) if mode == "I;16" else make_image(mode)
    data = encode(image, format)
    pixels = decode_pixels(data)
    assert (pixels.dtype, pixels.shape) == (np.uint8, (image.height, image.width, 3))
    np.testing.assert_array_equal(pixels, np.asarray(decode_image(data)))


def test_damaged_jpegs_give_what_pil_gives() -> None:
    """Pixels or the error, of files that are cut off or have bytes that are wrong, too many, or
    follow the end."""
    rng = random.Random(0)
    files = [encode(make_image(mode), progressive=p) for mode in ("RGB", "L") for p in (0, 1)]
    kept = 0
    for file in files * 25:
        place = rng.randrange(3, len(file))
        noise = rng.randbytes(rng.randrange(1, 6))
        data = rng.choice(
            (
                file[:place],
                file[:place] + noise + file[place + len(noise) :],
                file[:place] + noise + file[place:],
                file + noise,
            )
        )
        kept += try_decode_jpeg(data) is not None
        assert decode_or_explain(decode_pixels, data) == decode_or_explain(decode_image, data)
    assert 0 < kept < 100


def test_a_picture_that_is_too_large_for_pil_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(make_image("RGB"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(Image.DecompressionBombError):
        decode_pixels(data)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert try_decode_jpeg(data) is not None


def test_pixels_are_the_same_without_simplejpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(make_image("RGB"))
    pixels = decode_pixels(data)
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    image_decoding._import_decoders.cache_clear()
    try:
        assert try_decode_jpeg(data) is None
        np.testing.assert_array_equal(decode_pixels(data), pixels)
    finally:
        image_decoding._import_decoders.cache_clear()


def test_pixels_of_tables_of_hugging_face() -> None:
    data = encode(make_image("RGB"))
    assert decode_pixels({"bytes": data, "path": None}).shape == (47, 33, 3)
    assert decode_pixels(None) is None
    with pytest.raises(ValueError, match=r"the table has its path only, '1\.jpg'"):
        decode_pixels({"bytes": None, "path": "1.jpg"})


def test_pixels_of_a_tar_shard(tmp_path: Path) -> None:
    """They are writable, cross to loader processes by name, and a damaged one is named."""
    data = encode(make_image("RGB"))
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, content in (("0.jpg", data), ("1.jpg", data[:300])):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    dataset = echelon.data.open(tmp_path / "a.tar", decode={"jpg": echelon.data.decode_pixels})
    assert not dataset.may_draw
    pixels = pickle.loads(pickle.dumps(dataset))[0]["jpg"]
    pixels[0] = 0
    np.testing.assert_array_equal(pixels[1:], np.asarray(decode_image(data))[1:])
    with pytest.raises(BadSampleError, match=r"a\.tar, sample 1 \(1\): jpg cannot be decoded"):
        dataset[1]


def test_pixels_count_as_decoding_that_draws_no_random_numbers() -> None:
    assert SampleDecoder({"jpg": decode_pixels}, ["jpg", "cls"]).leaves_numbers

"""Texts, images and histograms that are logged beside numbers, on every tracker."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echelon.runs.metrics_file import read_recent_metrics
from echelon.runs.run_folder import Run
from echelon.tracking.media_records import read_png_size, remove_media_after
from echelon.train.media import Histogram, Image, MediaError, encode_media, encode_png

Picture = pytest.importorskip("PIL.Image")


def read_png(data: bytes) -> Any:
    return np.asarray(Picture.open(io.BytesIO(data)))


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_png_is_what_others_read(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels), dtype=np.uint8)
    data = encode_png(pixels)
    assert read_png_size(data) == (7, 5, channels)
    np.testing.assert_array_equal(read_png(data).reshape(5, 7, channels), pixels)


@pytest.mark.parametrize(
    ("shape", "rendered"),
    [
        ((6, 8), (6, 8, 1)),
        ((1, 6, 8), (6, 8, 1)),
        ((3, 6, 8), (6, 8, 3)),
        ((6, 8, 4), (6, 8, 4)),
        ((5, 3, 6, 8), (6 * 2 + 2, 8 * 3 + 4, 3)),
        ((2, 6, 8, 3), (6, 8 * 2 + 2, 3)),
    ],
)
def test_shapes_of_images(shape: tuple[int, ...], rendered: tuple[int, ...]) -> None:
    assert Image(torch.rand(shape)).render_pixels().shape == rendered
    assert Image(np.zeros(shape, np.uint8)).render_pixels().shape == rendered


def test_kinds_of_pixels() -> None:
    floats = torch.tensor([[0.0, 0.5, 1.0, -3.0, 3.0]], requires_grad=True)
    assert Image(floats).render_pixels().ravel().tolist() == [0, 128, 255, 0, 255]
    assert Image(floats.bfloat16()).render_pixels().ravel().tolist() == [0, 128, 255, 0, 255]
    assert Image(torch.tensor([[True, False]])).render_pixels().ravel().tolist() == [255, 0]
    grid = Image(torch.stack([torch.ones(3, 2, 2), torch.zeros(3, 2, 2)])).render_pixels()
    assert grid[:, :2].min() == 255
    assert grid[:, 2:].max() == 0


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Image(torch.zeros(5)), "an image of shape (5,)"),
        (Image(torch.zeros(2, 5, 7)), "an image of shape (2, 5, 7)"),
        (Image(torch.zeros(0, 3, 4, 4)), "an image of shape (0, 3, 4, 4)"),
        (Image(torch.zeros(4, 4, dtype=torch.int64)), "an image of int64"),
        (Image(torch.tensor([[0.0, torch.nan]])), "an image of which 1 of 2 values are not finite"),
        (Histogram(torch.tensor([1.0, torch.inf])), "2 values, of which 1 are not finite"),
        (Histogram([]), "a histogram of 0 values"),
        (Histogram(["a"]), "a histogram of 1 values"),
        (Histogram([1.0], bins=0), "a histogram with bins=0"),
        ("a" * 600_000, "a text of 600,000 characters"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_shown(value: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(MediaError) as caught:
        encode_media(Run(tmp_path), "x", 1, value)
    assert said in caught.value.what
    assert list(tmp_path.iterdir()) == []


def test_a_histogram_has_bins_and_counts(tmp_path: Path) -> None:
    values = torch.tensor([0.0, 0.1, 0.9, 1.0])
    line = encode_media(Run(tmp_path), "x", 1, Histogram(values, bins=2))
    assert line == {"bins": [0.0, 0.5, 1.0], "counts": [2, 2]}


def test_files_of_images(tmp_path: Path) -> None:
    """Names that are no file names, two of which differ in such a letter alone."""
    run, image = Run(tmp_path), Image(torch.zeros(2, 2))
    names = ("a/b", "a b", "../up", "é" * 300)
    paths = {encode_media(run, name, step, image)["image"] for name in names for step in (4, 5)}
    assert len(paths) == 8
    assert {tmp_path / path for path in paths} == set(run.media_folder.iterdir())
    (run.media_folder / ".a.0123.png").touch()  # a killed writer's
    remove_media_after(run, 4)
    left = {path.name for path in run.media_folder.iterdir()}
    assert len(left) == 4
    assert all(name.endswith("-000000004.png") for name in left)


def test_numbers_before_long_lines_are_found(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    numbers = "".join(f'{{"step": {n}, "time": {n}}}\n' for n in range(1, 4))
    file.write_text(numbers + f'{{"step": 4, "text": "{"a" * 30_000}"}}\n')
    assert [line["step"] for line in read_recent_metrics(file)] == [1, 2, 3]

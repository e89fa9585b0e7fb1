"""Texts, images and histograms in a loop of one's own: once each, whatever happens to the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import session_loops
import wandb_files
from optional_packages import require_package
from PIL import Image
from toy_experiments import FEATURES
from worlds import Trained, metrics, train_world, verb

from echelon.errors import ExitCode
from echelon.runs.metrics_file import MetricsLine, read_metrics
from echelon.runs.run_folder import Run

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
tensor_accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.plugin_event_accumulator"
)
"""What TensorBoard itself reads with, and the only one that drops texts of before a resume."""
require_package("wandb")
pytestmark = pytest.mark.slow

STEPS = (2, 4, 6, 8, 10, 12)
WORDS = ("trainer.batch_size=5", "trainer.epochs=3", "trainer.save.steps=3")
TRACKED = ("track=[wandb,tensorboard]", "track.wandb.mode=offline")


def train(folder: Path, world_size: int, *words: str, name: str = "a", **env: str) -> Trained:
    return train_world(
        folder,
        world_size,
        *WORDS,
        *words,
        name=name,
        experiment=session_loops.media,
        env={"HOME": str(folder), **env},
        end_together="KILL" in env.get("ECHELON_TEST_FAULT", ""),
    )


def select(lines: list[MetricsLine], name: str) -> dict[int, Any]:
    found = [(line["step"], line[name]) for line in lines if name in line]
    assert len(found) == len(dict(found)), f"a step has {name} twice"
    return dict(found)


def require_pixels(run: Run, image: dict[str, str], step: int) -> None:
    picture = Image.open(run.folder / image["image"])
    assert picture.size == (18, 18)
    assert picture.getpixel((0, 0)) == (step, step, step)  # rank 0's


def test_killed_and_resumed_each_is_there_once(tmp_path: Path) -> None:
    whole = train(tmp_path, 2, name="whole")
    assert set(whole.codes) == {0}, whole.said
    killed = train(
        tmp_path,
        2,
        *TRACKED,
        ECHELON_TEST_FAULT="0:8:KILL",
        ECHELON_TEST_AFTER=str(tmp_path / "a" / "snapshots" / "step-000000006"),
    )
    assert -9 in killed.codes
    ended = train(tmp_path, 1, *TRACKED)
    assert ended.codes == [0], ended.said

    lines = read_metrics(ended.run.metrics_file)
    said, seen = select(lines, "said"), select(lines, "seen")
    assert said == {step: f"step {step} of rank 0" for step in STEPS}
    assert tuple(seen) == STEPS
    for step, image in seen.items():
        require_pixels(ended.run, image, step)
    assert len(list(ended.run.media_folder.iterdir())) == len(STEPS)
    weights = select(lines, "weights")
    assert tuple(weights) == STEPS
    for value in weights.values():
        assert sum(value["counts"]) == FEATURES
        assert len(value["bins"]) == 4
    assert [line["step"] for line in lines] == [line["step"] for line in metrics(whole.run)]

    require_events(ended.run, said, weights)
    require_rows(ended.run, said, weights)
    folder, page = str(ended.run.folder), str(tmp_path / "curves.html")
    for words in (["show", folder], ["runs", "--dir", str(tmp_path)], ["plot", folder, "-o", page]):
        answer = verb(tmp_path, *words)
        assert answer.code == 0, answer.output
        assert "Traceback" not in answer.output
        assert ("images " in answer.output) == (words[0] == "show")


def test_lines_of_several_ranks_keep_their_order(tmp_path: Path) -> None:
    """They are written together now and then, and what rank 0 logs at once waits for them."""
    alone, two = (
        train(tmp_path, size, "trainer.log_steps=1", name=f"of-{size}") for size in (1, 2)
    )
    assert alone.codes + two.codes == [0, 0, 0], alone.said + two.said
    places = [[(line["step"], *line) for line in metrics(run)] for run in (alone.run, two.run)]
    assert places[0] == places[1]
    steps = [place[0] for place in places[0]]
    assert steps == sorted(steps)
    assert len(steps) == 12 + 3 * len(STEPS)


def require_events(run: Run, said: dict[int, str], weights: dict[int, Any]) -> None:
    folder = str(run.folder / "tensorboard")
    texts = tensor_accumulator.EventAccumulator(folder, {}, {"text": 0}).Reload()
    found = [(e.step, e.tensor_proto.string_val[0].decode()) for e in texts.Tensors("train/said")]
    assert found == list(said.items())
    events = accumulator.EventAccumulator(folder, {"images": 0, "histograms": 0}).Reload()
    images = events.Images("train/seen")
    assert [(e.step, e.width, e.height) for e in images] == [(step, 18, 18) for step in STEPS]
    histograms = events.Histograms("train/weights")
    assert [e.step for e in histograms] == list(STEPS)
    for event in histograms:
        assert event.histogram_value.bucket == weights[event.step]["counts"]


def require_rows(run: Run, said: dict[int, str], weights: dict[int, Any]) -> None:
    rows = wandb_files.read(run.folder).rows
    assert select(rows, "train/said") == said
    assert select(rows, "train/seen/_type") == dict.fromkeys(STEPS, "image-file")
    for path in select(rows, "train/seen/path").values():
        assert any(run.folder.glob(f"wandb/offline-run-*/files/{path}"))
    counts = {step: value["counts"] for step, value in weights.items()}
    assert select(rows, "train/weights/values") == counts


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("nan", "seen is an image of which 1 of 1 values are not finite (rank 0, step 2)"),
        ("early", "session.log is given said outside of the loop (rank 0, step 1)"),
        ("name", "step is the name of a place in metrics.jsonl (rank 0, step 1)"),
    ],
)
def test_what_cannot_be_logged_is_a_sentence(mistake: str, said: str, tmp_path: Path) -> None:
    ended = train(tmp_path, 2, f"mistake={mistake}")
    assert set(ended.codes) == {ExitCode.USAGE}, ended.said
    assert said in ended.said
    assert "Traceback" not in ended.said

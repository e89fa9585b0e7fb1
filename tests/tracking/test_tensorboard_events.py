"""TensorBoard's event files, read back with its own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echelon.config.schema import Config, TensorBoardConfig, TrackConfig
from echelon.errors import ExitCode
from echelon.runs.run_folder import Run
from echelon.tracking.create import create_trackers

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

CONFIG = Config(track=TrackConfig(tensorboard=TensorBoardConfig(use=True)))


def write(
    run: Run,
    step: int,
    lines: list[dict[str, Any]],
    config: Config = CONFIG,
    is_evaluation_left: bool = False,
) -> None:
    run.folder.mkdir(exist_ok=True)
    made = create_trackers(config, run, step, is_evaluation_left)
    for line in lines:
        for tracker in made:
            tracker.log(line)
    for tracker in made:
        tracker.close(ExitCode.OK)


def curve(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(e.step, e.value) for e in read(folder).Scalars(name)]


def read(folder: Path) -> Any:
    return accumulator.EventAccumulator(str(folder), {"scalars": 0, "tensors": 0}).Reload()


def at(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "epoch": 1, "loss": loss, "time": 1000.0 + step}


def test_every_number_is_a_curve(tmp_path: Path) -> None:
    run = Run(tmp_path / "a")
    write(run, 0, [at(1, 0.5), at(2, 0.25), {"step": 2, "epoch": 1, "eval_mae": 2.0}])
    folder = run.folder / "tensorboard"
    assert curve(folder, "train/loss") == [(1, 0.5), (2, 0.25)]
    assert curve(folder, "eval/mae") == [(2, 2.0)]
    assert set(read(folder).Tags()["scalars"]) == {"train/loss", "eval/mae", "epoch"}
    assert [e.wall_time for e in read(folder).Scalars("train/loss")] == [1001.0, 1002.0]
    [config] = read(folder).Tensors("config")
    assert '"batch_size": 32' in config.tensor_proto.string_val[0].decode()


def test_an_evaluation_that_is_made_again_is_there_once(tmp_path: Path) -> None:
    """The run was killed after the event was written, and before its snapshot knew of it."""
    run, evaluated = Run(tmp_path / "a"), {"step": 2, "epoch": 1, "eval_mae": 2.0}
    write(run, 0, [at(1, 0.5), at(2, 0.25), evaluated])
    write(run, 2, [evaluated], is_evaluation_left=True)
    folder = run.folder / "tensorboard"
    assert curve(folder, "train/loss") == [(1, 0.5), (2, 0.25)]
    assert curve(folder, "eval/mae") == [(2, 2.0)]


def test_what_comes_again_after_a_resume_takes_the_place_of_what_was(tmp_path: Path) -> None:
    run = Run(tmp_path / "a")
    write(run, 0, [at(1, 0.5), at(2, 0.5), at(3, 0.5)])
    write(run, 2, [at(3, 0.25), at(4, 0.25)])
    expected = [(1, 0.5), (2, 0.5), (3, 0.25), (4, 0.25)]
    assert curve(run.folder / "tensorboard", "train/loss") == expected


def test_a_folder_that_is_gone_is_filled_again(tmp_path: Path) -> None:
    run = Run(tmp_path / "a")
    write(run, 0, [at(1, 0.5), at(2, 0.5)])
    for file in (run.folder / "tensorboard").iterdir():
        file.unlink()
    write(run, 2, [])
    assert curve(run.folder / "tensorboard", "train/loss") == [(1, 0.5), (2, 0.5)]


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    config = Config(track=TrackConfig(tensorboard=TensorBoardConfig(use=True, folder=str(folder))))
    for name, loss in (("a", 0.5), ("b", 0.25)):
        write(Run(tmp_path / name), 0, [at(1, loss)], config)
    assert curve(folder / "a", "train/loss") == [(1, 0.5)]
    assert curve(folder / "b", "train/loss") == [(1, 0.25)]


def test_a_folder_that_cannot_be_made_is_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "in")
    config = Config(track=TrackConfig(tensorboard=TensorBoardConfig(use=True, folder=folder)))
    run = Run(tmp_path / "a")
    write(run, 0, [at(1, 0.5), at(2, 0.5)], config)
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith("warning: TensorBoard: ")
    assert len(run.metrics_file.read_text().splitlines()) == 2

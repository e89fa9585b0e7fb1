"""Trackers of real trainings: one run with every number, whatever happened to it or to a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import wandb_files
from command_runner import ECHELON, HERE, TWO, CommandResult, only_run
from optional_packages import require_package
from wandb_server import ServedRun, Server, serving
from worlds import Trained, run_forked, train_world

from echelon.runs.metrics_file import SPEED_METRICS, read_metrics
from echelon.runs.run_folder import Run
from echelon.snapshot.layout import list_snapshots
from echelon.snapshot.reader import verify_snapshot
from echelon.tracking.tracker import prefix_metric_names

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
require_package("wandb")
pytestmark = pytest.mark.slow

EXPERIMENT = f"experiment={HERE / 'toy_experiments.py'}:regression"
SIZE = ("samples=80", "eval_samples=16", "trainer.batch_size=8", "trainer.epochs=2")
"""Twenty steps, evaluated and saved after the 10th and the 20th."""
KEY = "5ecre7" * 7
CLOCKS = [f"train/{name}" for name in SPEED_METRICS]


def numbers(run: Run) -> dict[tuple[int, str], float]:
    """Every number of metrics.jsonl by its step and the name it has on a tracker."""
    return {
        (line["step"], name): value
        for line in read_metrics(run.metrics_file)
        for name, value in prefix_metric_names(line).items()
        if name not in CLOCKS
    }


def of_rows(rows: list[dict[str, Any]]) -> dict[tuple[int, str], float]:
    """The same of wandb's rows; those of one step have to agree."""
    found: dict[tuple[int, str], float] = {}
    for row in rows:
        for name, value in row.items():
            if "/" in name and name not in CLOCKS:
                assert found.setdefault((row["step"], name), value) == value
    return found


def of_events(folder: Path) -> dict[tuple[int, str], float]:
    events = accumulator.EventAccumulator(str(folder), {"scalars": 0}).Reload()
    names = [n for n in events.Tags()["scalars"] if "/" in n and n not in CLOCKS]
    found = [((e.step, name), e.value) for name in names for e in events.Scalars(name)]
    assert len(found) == len(dict(found)), "a step is there more than once"
    return dict(found)


def at_home(tmp_path: Path, server: Server | None = None) -> dict[str, Any]:
    """Nobody's settings but these."""
    url = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY} if server else {}
    limits = {"WANDB_INIT_TIMEOUT": "300", "WANDB_FINISH_TIMEOUT": "300"}
    return {"HOME": str(tmp_path)} | limits | url


# --- offline ------------------------------------------------------------------------------------


def test_after_a_kill_and_a_resume_there_is_one_run_with_every_number(tmp_path: Path) -> None:
    env = at_home(tmp_path)
    words = ("track=[wandb,tensorboard]", "track.wandb.mode=offline", "trainer.log_steps=1")
    fault: dict[str, Any] = {
        "ECHELON_TEST_FAULT": "0:15:KILL",
        "ECHELON_TEST_AFTER": str(tmp_path / "runs" / "a" / "snapshots" / "step-000000010"),
    }
    train = [*ECHELON, "train", EXPERIMENT, *TWO, *SIZE, *words, "run.name=a"]
    train += ["launch.max_replacements=0"]
    killed = run_forked(train, tmp_path, **env, **fault)
    assert killed.code == 1, killed.err
    assert killed.left == []
    resumed = run_forked([*ECHELON, "resume", "a"], tmp_path, **env)
    assert resumed.code == 0, resumed.err
    assert resumed.left == []

    run = Run(only_run(tmp_path))
    expected = numbers(run)
    assert {step for step, _ in expected} == set(range(1, 21))
    offline = wandb_files.read(run.folder)
    assert offline.ids == {run.read_wandb_id()}
    assert of_rows(offline.rows) == expected
    assert [row["_step"] for row in offline.rows] == sorted({r["_step"] for r in offline.rows})
    assert offline.configs[-1]["trainer"]["batch_size"] == 8
    assert offline.exits == [0]
    assert of_events(run.folder / "tensorboard") == pytest.approx(expected, rel=1e-6)
    assert (
        verify_snapshot(list_snapshots(run.snapshots_folder)[-1]).info["wandb_run_id"]
        == run.read_wandb_id()
    )
    _says_how_to_send(resumed, run)


def _says_how_to_send(done: CommandResult, run: Run) -> None:
    [command] = [line for line in done.err.splitlines() if "wandb sync " in line]
    files = run.folder.glob("wandb/offline-run-*/*.wandb")
    with_rows = {
        str(f.parent.relative_to(run.folder.parents[1])) for f in files if f.stat().st_size > 7
    }
    assert set(command.split("wandb sync ")[1].split()) == with_rows
    assert "wandb:" not in done.err  # nothing that it says itself


# --- online -------------------------------------------------------------------------------------


def train(tmp_path: Path, server: Server, *words: str, **fault: str) -> Trained:
    return train_world(
        tmp_path,
        2,
        "track=wandb",
        *SIZE,
        *words,
        env=at_home(tmp_path, server) | fault,
        end_together="KILL" in fault.get("ECHELON_TEST_FAULT", ""),
    )


def test_a_server_has_one_run_whether_killed_or_stopped(tmp_path: Path) -> None:
    after = str(tmp_path / "a" / "snapshots" / "step-000000010")
    with serving() as server:
        assert (
            -9
            in train(
                tmp_path, server, ECHELON_TEST_FAULT="0:15:KILL", ECHELON_TEST_AFTER=after
            ).codes
        )
        stopped = train(tmp_path, server, ECHELON_TEST_FAULT="1:5:TERM")
        assert stopped.codes == [75, 75], stopped.said
        [served] = server.runs.values()
        assert served.preempting
        done = train(tmp_path, server)
        assert done.codes == [0, 0], done.said
        [(name, served)] = server.runs.items()
    assert name == done.run.read_wandb_id()
    _is_complete(served, done)
    assert [end["exitcode"] for end in served.ends] == [75, 0]
    assert "wandb sync" not in done.said
    assert not [line for line in done.said.splitlines() if line.startswith("warning:")]
    _nowhere(KEY, tmp_path)


def _is_complete(served: ServedRun, done: Trained) -> None:
    expected = numbers(done.run)
    assert of_rows(served.rows()) == expected
    assert served.config["experiment"]["samples"] == 80
    assert served.config["trainer"]["save"]["epochs"] == 1
    best = min(value for (_, name), value in expected.items() if name == "eval/loss")
    assert served.summary["best/loss"] == best
    assert served.about["project"] == "echelon"
    assert served.about["displayName"] == done.run.name


def _nowhere(key: str, folder: Path) -> None:
    """Neither in a file of the run nor in what was said."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert [path for path in files if key.encode() in path.read_bytes()] == []


@pytest.mark.parametrize(
    ("answer", "then", "said"),
    [
        (401, 401, "does not accept the key"),
        ("hang", "hang", "no answer from its server within 2 s"),
        (200, 500, "not all of it reached its server"),
        (200, 401, "not all of it reached its server"),
    ],
    ids=str,
)
def test_an_ill_server_is_one_warning_and_nothing_is_lost(
    answer: int | str, then: int | str, said: str, tmp_path: Path
) -> None:
    with serving() as server:
        server.answer, server.then = answer, then
        soon = "2" if answer == "hang" else "60"
        # Only a server that once answered is waited for at the end; a busy machine needs longer.
        last = "10" if answer == 200 else "300"
        limits = {"WANDB_INIT_TIMEOUT": soon, "WANDB_FINISH_TIMEOUT": last}
        done = train(tmp_path, server, **limits)
    assert done.codes == [0, 0], done.said
    [warning] = [line for line in done.said.splitlines() if line.startswith("warning:")]
    assert said in warning
    assert len([line for line in done.said.splitlines() if "wandb sync" in line]) == 1
    assert of_rows(wandb_files.read(done.run.folder).rows) == numbers(done.run)


def test_a_training_that_fails_is_marked_so(tmp_path: Path) -> None:
    with serving() as server:
        failed = train_world(
            tmp_path,
            1,
            "track=wandb",
            "lr=1e30",  # the loss overflows after some steps
            *SIZE,
            env=at_home(tmp_path, server),
        )
        assert failed.codes == [1], failed.said
        [served] = server.runs.values()
    assert [end["exitcode"] for end in served.ends] == [1]

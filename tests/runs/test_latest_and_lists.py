"""What failed before its first step takes no name and fills no list; what runs is always listed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from run_folders import echelon, lines, make_run

from echelon.errors import EchelonError, ExitCode
from echelon.runs.find import find_run
from echelon.runs.latest import record_first_step
from echelon.runs.process_record import identify_this_process
from echelon.runs.run_folder import Run

QUICK = ("samples=64", "eval_samples=16", "trainer.batch_size=8", "trainer.epochs=1")


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def make_early_failure(root: Path, name: str, **status: Any) -> Run:
    return make_run(root, name, status={"state": "failed", "failure": {"rank": 0}} | status)


def make_active_run(root: Path, name: str, **status: Any) -> Run:
    return make_run(
        root,
        name,
        status={"state": "starting", "process": identify_this_process(), "started": 2e9} | status,
    )


# --- latest ---


def test_a_training_that_fails_before_its_first_step_leaves_latest_to_the_last_that_trained(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, line in (("bad", "raise RuntimeError('no data')"), ("worse", "import nothing")):
        (tmp_path / f"{name}.py").write_text(f"def experiment(settings):\n    {line}\n")
    assert echelon(capsys, "train", "run.name=bad", "experiment=bad.py:experiment")[0] == 1
    assert not (root / "latest").is_symlink()
    code, _, err = echelon(capsys, "show", "latest")
    assert code == ExitCode.NOT_FOUND
    assert "no run in" in err
    assert "has trained yet" in err
    assert echelon(capsys, "train", "run.name=good", *QUICK)[0] == 0
    assert echelon(capsys, "train", "run.name=worse", "experiment=worse.py:experiment")[0] == 1
    assert os.readlink(root / "latest") == "good"
    assert find_run("latest").name == "good"

    code, out, _ = echelon(capsys, "runs")
    assert [line.split()[0] for line in out.splitlines()[1:-1]] == ["good"]
    assert out.splitlines()[-1] == "not shown: 2 ended before step 1, the newest worse: --all"
    code, out, _ = echelon(capsys, "runs", "--all")
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["worse", "good", "bad"]


def test_latest_is_a_run_that_is_queued_or_before_its_first_step(root: Path) -> None:
    """Whoever has just started one follows it by that name, and the link comes with the step."""
    trained = make_run(root, "trained", lines())
    record_first_step(trained)
    make_early_failure(root, "failed", started=3e9)
    assert find_run("latest").name == "trained"
    young = make_active_run(root, "young")
    assert find_run("latest").name == "young"
    assert os.readlink(root / "latest") == "trained"
    record_first_step(young)
    assert find_run("latest").name == "young"
    assert os.readlink(root / "latest") == "young"
    record_first_step(trained)
    assert find_run("latest").name == "trained", "the last that trained, though one still runs"


def test_a_link_of_before_that_names_a_failure_is_not_followed(root: Path) -> None:
    make_early_failure(root, "failed", started=3e9)
    (root / "latest").symlink_to("failed")
    with pytest.raises(EchelonError, match="has trained yet"):
        find_run("latest")
    make_run(root, "old", lines())
    make_run(root, "new", lines(), status={"started": 2e9})
    assert find_run("latest").name == "new"


# --- lists ---


def list_names(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    code, out, err = echelon(capsys, *words)
    assert code == 0, err
    return sorted(line.split()[0] for line in out.splitlines()[1:] if line[0].isalpha())


def test_what_ended_before_its_first_step_is_left_out_and_counted(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for state in ("failed", "cancelled"):
        mark = make_early_failure(root, state)
        (mark.folder / "cancelled").touch() if state == "cancelled" else None
    make_early_failure(root, "lost", state="running", process={**identify_this_process(), "pid": 0})
    make_run(root, "finished", lines())
    make_early_failure(root, "preempted", state="preempted")
    make_early_failure(root, "stepped", step=1)
    make_early_failure(root, "logged").metrics_file.write_text('{"step": 1, "loss": 1.0}\n')
    make_active_run(root, "starting")
    make_active_run(root, "archived-but-active").archive_file.touch()
    program = make_early_failure(root, "program")
    config = json.loads(program.config_file.read_text())
    program.config_file.write_text(json.dumps(config | {"program": ["a"], "experiment": {}}))
    shown = ["archived-but-active", "finished", "logged", "preempted", "program", "starting"]
    shown.append("stepped")
    for command in ("runs", "jobs"):
        assert set(list_names(capsys, command)) - {"not"} == set(shown)
        assert {"failed", "lost", "cancelled"} < set(list_names(capsys, command, "--all"))
        assert "not shown: 3 ended before step 1" in echelon(capsys, command)[1]
    assert "failed" in list_names(capsys, "jobs", "failed"), "it was asked for"
    data = json.loads(echelon(capsys, "runs", "--json")[1])
    assert data["hidden"] == {"before_step_1": 3, "archived": 0}
    assert {row["run"] for row in data["runs"]} == set(shown)
    polled = json.loads(echelon(capsys, "jobs", "--json")[1])
    assert "failed" in {row["run"] for row in polled}, "a program may wait for its end"


def test_a_list_of_nothing_but_failures_says_so(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_early_failure(root, "failed")
    for command in ("runs", "jobs"):
        code, out, _ = echelon(capsys, command)
        assert code == 0
        assert out.splitlines()[-1] == "not shown: 1 ended before step 1 (failed): --all"

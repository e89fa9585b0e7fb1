"""Run folders: their names, and the version of their format."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from run_folders import echelon, lines, make_run

from echelon.config.schema import Config, RunConfig
from echelon.errors import EchelonError
from echelon.runs.create import assign_name, create_run
from echelon.runs.run_folder import RUN_FORMAT

SHORT = {
    "echelon.recipes.toy:experiment": "toy",
    "echelon.recipes.movielens.experiments:ranking": "movielens_ranking",
    "/home/me/my_file.py:experiment": "my_file",
}
PROGRAMS = {
    ("python", "-u", "train.py", "--lr=1"): "train",
    ("./not_here.sh",): "not_here",
    ("wandb", "agent", "a/b/c"): "wandb",
}


@pytest.mark.parametrize("entry", SHORT)
def test_a_run_is_called_after_its_experiment(entry: str) -> None:
    name = assign_name(Config(experiment={"entry": entry})).run.name
    assert str(name).startswith(f"{SHORT[entry]}-2")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_run_is_called_after_its_program(program: tuple[str, ...]) -> None:
    name = assign_name(Config(program=list(program))).run.name
    assert str(name).startswith(f"{PROGRAMS[program]}-2")


@pytest.mark.parametrize("version", [None, 1, RUN_FORMAT + 1, "2"])
def test_a_run_folder_of_another_format_is_refused_and_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], version: object
) -> None:
    run = make_run(tmp_path, "before", lines())
    data = json.loads(run.config_file.read_text())
    assert data.pop("run_format") == RUN_FORMAT
    run.config_file.write_text(
        json.dumps(data if version is None else {"run_format": version, **data})
    )
    with pytest.raises(EchelonError, match=rf"format {version or 1}, and this version .* reads"):
        run.read_config()
    named = replace(Config(), run=RunConfig(name="before", dir=str(tmp_path)))
    with pytest.raises(EchelonError, match="is a run folder of format"):
        create_run(named)
    for command in ("runs", "jobs"):
        code, output, _ = echelon(capsys, command, "--dir", str(tmp_path))
        assert code == 0
        assert "before" in output
        assert "finished" in output
    code, output, _ = echelon(capsys, "show", str(run.folder))
    assert code == 0
    assert "run_format" not in output
    aside = replace(named, trainer=replace(named.trainer, resume="never"))
    assert create_run(aside).read_config() == aside
    assert (tmp_path / "before.1" / "config.json").exists()


def test_runs_and_jobs_agree_on_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a program, whose lines have a step and a time and nothing else of training's."""
    monkeypatch.chdir(tmp_path)
    written = [{"step": step, "time": float(step), "acc": 0.5} for step in (1, 2, 7)]
    make_run(tmp_path / "runs", "program", written, status={"step": 3, "total_steps": 9})
    make_run(tmp_path / "runs", "training", lines(20), status={"total_steps": True})
    make_run(tmp_path / "runs", "pruned", status={"state": "pruned"})
    make_run(
        tmp_path / "runs", "failed", status={"state": "failed", "step": 3, "failure": {"rank": 1}}
    )
    _, of_runs, _ = echelon(capsys, "runs", "--json")
    _, of_jobs, _ = echelon(capsys, "jobs", "--json")
    keys = ("run", "folder", "state", "note", "step", "total_steps", "started")
    rows = [
        [{key: row[key] for key in keys} for row in found]
        for found in (json.loads(of_runs)["runs"], json.loads(of_jobs))
    ]
    assert rows[0] == rows[1]
    assert {row["run"]: (row["step"], row["total_steps"]) for row in rows[0]} == {
        "program": (7, 9),
        "training": (20, None),
        "pruned": (None, None),
        "failed": (3, None),
    }
    assert {row["run"]: row["state"] for row in rows[0]}["pruned"] == "pruned"
    assert "pruned" in echelon(capsys, "show", "pruned")[1].splitlines()[0]

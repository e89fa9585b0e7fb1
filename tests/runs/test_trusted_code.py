"""A run folder of somebody else can be read by everybody, but no code is run from it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from other_users import STRANGE_GROUP, STRANGER, give_away, make_open_folder, needs_root
from run_folders import lines, make_run

from echelon.cli import run_and_report_faults, run_command
from echelon.config.schema import Config
from echelon.errors import EchelonError
from echelon.runs.create import create_run, find_restarted_run
from echelon.runs.run_folder import Run
from echelon.submission.call_function import call_function_of_run, write_call
from echelon.submission.source_copy import copy_source, survey_source
from echelon.sweep.sweep_folder import SweepFolder, SweepSettings

EXPERIMENT = {"entry": "own.py:experiment"}


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of runs that everybody may write, as some labs have it."""
    with make_open_folder() as folder:
        monkeypatch.chdir(folder)
        (folder / "runs").mkdir()
        (folder / "runs").chmod(0o777)
        yield folder / "runs"


def make_config(root: Path, name: str) -> Config:
    config = Config(experiment=EXPERIMENT)
    return replace(config, run=replace(config.run, dir=str(root), name=name))


def get_refusal(error: pytest.ExceptionInfo[EchelonError]) -> str:
    (fault,) = error.value.faults
    assert "choose another name, or another place with run.dir=PATH" in fault.do
    return fault.what


def test_a_run_of_our_own_goes_on(root: Path) -> None:
    config = make_config(root, "mine")
    assert create_run(config).read_config() == config
    assert create_run(config).name == "mine"


@needs_root
def test_a_run_of_somebody_else_is_listed_and_shown_but_not_continued(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    give_away(make_run(root, "his", lines()).folder)
    for words in (["runs"], ["show", "his"], ["jobs", "--all"], ["plot", "his", "-o", "a.html"]):
        code = run_and_report_faults(partial(run_command, words))
        assert code == 0, (words, capsys.readouterr().err)
    capsys.readouterr()
    assert run_and_report_faults(partial(run_command, ["resume", "his"])) == 2
    assert f"{root}/his/config.json belongs to {STRANGER}" in capsys.readouterr().err
    assert Run(root / "his").read_config(runs_code=False).experiment["entry"]


@needs_root
def test_a_folder_that_a_stranger_made_before_us_is_not_taken(root: Path) -> None:
    """It may hold `code-0`, which would be run instead of the experiment."""
    (root / "next").mkdir()
    give_away(root / "next")
    with pytest.raises(EchelonError) as caught:
        create_run(make_config(root, "next"))
    assert f"{root}/next belongs to {STRANGER}" in get_refusal(caught)


@needs_root
def test_a_strangers_code_in_our_folder_is_not_run(root: Path) -> None:
    """A group may be allowed to write a run folder; its members' code is not ours for that."""
    config = make_config(root, "mine")
    run = create_run(config)
    assert run.get_entry_point(config, 0) == EXPERIMENT["entry"]
    code = run.get_code_folder(0)
    code.mkdir()
    (code / "own.py").write_text("")
    assert run.get_entry_point(config, 0) == f"{code}/own.py:experiment"
    (code / "helper.py").write_text("")
    give_away(code / "helper.py")
    with pytest.raises(EchelonError) as caught:
        run.get_entry_point(config, 0)
    assert f"{code}/helper.py belongs to {STRANGER}" in get_refusal(caught)


@needs_root
def test_a_group_may_share_run_folders_but_not_write_what_names_code(root: Path) -> None:
    before = os.umask(0o002)
    try:
        run = create_run(make_config(root, "mine"))
    finally:
        os.umask(before)
    for path in (run.folder, run.config_file):
        os.chown(path, -1, STRANGE_GROUP)
    assert run.folder.stat().st_mode & 0o777 == 0o775
    assert run.config_file.stat().st_mode & 0o777 == 0o644
    run.read_config()
    run.config_file.chmod(0o664)
    with pytest.raises(EchelonError) as caught:
        run.read_config()
    assert f"may be written by the group {STRANGE_GROUP}" in get_refusal(caught)


@needs_root
def test_a_restarted_job_does_not_take_up_a_strangers_run(root: Path) -> None:
    """The id of a job is easily guessed."""
    env = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    config = replace(make_config(root, ""), run=replace(Config().run, dir=str(root)))
    run = make_run(root, "job", status={"launch_id": "7"})
    assert find_restarted_run(config, env) == run
    give_away(run.folder)
    assert find_restarted_run(config, env) is None


@needs_root
def test_no_source_is_copied_into_a_strangers_folder(root: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    source = survey_source(tmp_path, root)
    copy_source(source, root / "mine")
    give_away(root / "mine")
    with pytest.raises(EchelonError) as caught:
        copy_source(source, root / "mine")
    assert f"{root}/mine belongs to {STRANGER}" in get_refusal(caught)


@needs_root
def test_the_function_that_a_stranger_names_is_not_called(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = create_run(make_config(root, "mine"))
    write_call(run, {"function": "builtins:len", "args": [[1, 2]], "kwargs": {}})
    assert call_function_of_run(run) == 0
    give_away(run.call_file)
    assert call_function_of_run(run) == 1
    assert f"{run.call_file} belongs to {STRANGER}" in capsys.readouterr().err


@needs_root
def test_trials_do_not_run_the_program_of_a_strangers_sweep(root: Path) -> None:
    sweep = SweepFolder(root / "s")
    settings = SweepSettings([], ["python", "train.py"], {"name": "loss", "goal": "minimize"}, 3)
    sweep.write_files(settings, "method: random\n")
    sweep.require_trusted_files()
    give_away(sweep.settings_file)
    assert sweep.read_settings() == settings, "it can be looked at"
    with pytest.raises(EchelonError) as caught:
        sweep.require_trusted_files()
    assert f"{sweep.settings_file} belongs to {STRANGER}" in get_refusal(caught)
    give_away(sweep.folder)
    with pytest.raises(EchelonError):
        sweep.write_files(settings, "method: random\n")

"""A run folder and its copy: what grows is added to, what was cut is sent again, nothing else."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from echelon.config.schema import Config, LaunchConfig, RunConfig
from echelon.errors import EchelonError
from echelon.login.frames import ConnectionLostError, receive_frame
from echelon.login.host.run_files import SentFiles
from echelon.login.local_copy import (
    LocalCopy,
    create_copy,
    create_sweep_copy,
    require_free_or_copy,
)
from echelon.runs.origin import RunOrigin, read_copy_state, read_origin
from echelon.runs.run_folder import Run
from echelon.runs.status import read_run_status
from echelon.sweep.sweep_folder import SweepFolder, SweepSettings


@pytest.fixture
def there(tmp_path: Path) -> Run:
    run = Run(tmp_path / "there" / "runs" / "a")
    run.logs_folder.mkdir(parents=True)
    run.status_file.write_text(json.dumps({"state": "running", "launcher": "slurm"}))
    run.job_id_file.write_text("7\n")
    run.metrics_file.write_text('{"step": 1}\n')
    (run.logs_folder / "node-0.log").write_text("one\n")
    return run


@pytest.fixture
def copy(tmp_path: Path, there: Run) -> LocalCopy:
    run = Run(tmp_path / "here" / "runs" / "a")
    config = Config(
        launch=LaunchConfig(kind="slurm", login="node"),
        run=RunConfig("a", str(run.folder.parent)),
    )
    origin = RunOrigin("node", "ssh", "~/x", str(there.folder), None, "", config.to_dict())
    return create_copy(run, origin, config)


def refresh(copy: LocalCopy, there: Run, with_logs: bool = True) -> int:
    """Bring the copy up to date; how many bytes of files travelled."""
    known = json.loads(json.dumps(copy.describe_known(with_logs)))
    wire = io.BytesIO()
    assert known[0] == str(there.folder)
    SentFiles(there.folder, *known[1:]).send_changes(wire, with_logs)
    wire.seek(0)
    travelled = 0
    while True:
        try:
            message, data = receive_frame(wire)
        except ConnectionLostError:
            break
        travelled += len(data)
        copy.apply(message, data)
    copy.save()
    return travelled


def same(copy: LocalCopy, there: Run, *names: str) -> bool:
    return all(
        (copy.run.folder / name).read_bytes() == (there.folder / name).read_bytes()
        for name in names
    )


def test_a_trial_of_a_sweep_becomes_a_copy_of_its_own(tmp_path: Path) -> None:
    """The login node tells of trials that are new; they are runs beside the sweep's folder."""
    there = SweepFolder(tmp_path / "there" / "runs" / "s")
    here = SweepFolder(tmp_path / "here" / "runs" / "s")
    settings = SweepSettings([], [], {"name": "loss", "goal": "minimize"}, 4)
    for sweep in (there, here):
        sweep.write_files(settings, "method: grid\nparameters: {lr: {values: [1]}}\n")
    there.journal_file.write_text("{}\n")
    trial = there.get_trial_run(3)
    trial.logs_folder.mkdir(parents=True)
    trial.write_config(Config(run=RunConfig("s-3", str(trial.folder.parent))))
    origin = RunOrigin("node", "ssh", "~/x", str(there.folder), None, "", {}, is_sweep=True)
    copy = create_sweep_copy(here, origin)
    refresh(copy, Run(there.folder))
    assert here.journal_file.read_text() == "{}\n"
    [run] = copy.new_trials
    assert run.folder == here.get_trial_run(3).folder
    found = read_origin(run)
    assert found is not None
    assert (found.folder, found.sweep, found.is_sweep) == (str(trial.folder), "s", False)
    again = LocalCopy(Run(here.folder))
    refresh(again, Run(there.folder))
    assert again.new_trials == []
    with pytest.raises(EchelonError, match="sent a file named"):
        again.apply({"trial": "other-3"}, b"{}")


GROWING = ("metrics.jsonl", "logs/node-0.log")


def test_what_grows_is_added_to(copy: LocalCopy, there: Run) -> None:
    refresh(copy, there)
    assert same(copy, there, "status.json", "job", *GROWING)
    assert refresh(copy, there) == 0
    for name in GROWING:
        with (there.folder / name).open("a") as file:
            file.write("more\n")
    assert refresh(LocalCopy(copy.run), there) == 2 * len("more\n")
    assert same(copy, there, *GROWING)


def test_what_was_cut_back_and_grew_again_is_sent_whole(copy: LocalCopy, there: Run) -> None:
    """As the metrics of a run that was resumed from a snapshot before their end."""
    there.metrics_file.write_text("".join(f'{{"step": {n}}}\n' for n in range(9)))
    refresh(copy, there)
    there.metrics_file.write_text("".join(f'{{"step": {n}, "again": 1}}\n' for n in range(9)))
    refresh(copy, there)
    assert same(copy, there, *GROWING)


def test_two_commands_at_once_add_nothing_twice(copy: LocalCopy, there: Run) -> None:
    refresh(copy, there)
    first, second = LocalCopy(copy.run), LocalCopy(copy.run)
    with there.metrics_file.open("a") as file:
        file.write('{"step": 2}\n')
    known = second.describe_known(True)
    refresh(first, there)
    wire = io.BytesIO()
    SentFiles(there.folder, *json.loads(json.dumps(known))[1:]).send_changes(wire, True)
    wire.seek(0)
    second.apply(*receive_frame(wire))
    second.save()
    assert same(copy, there, *GROWING)
    refresh(LocalCopy(copy.run), there)
    assert same(copy, there, *GROWING)


def test_what_is_gone_there_goes_here_and_what_is_ours_stays(copy: LocalCopy, there: Run) -> None:
    there.exit_code_file.write_text("75\n")
    refresh(copy, there)
    (copy.run.folder / "annotations.json").write_text("{}")
    assert read_run_status(copy.run).state == "preempted"
    there.exit_code_file.unlink()  # it was resumed
    refresh(copy, there)
    assert not copy.run.exit_code_file.exists()
    assert (copy.run.folder / "annotations.json").exists()
    assert copy.run.read_config().launch.login == "node", "the settings are those typed here"


def test_slurm_is_believed_as_it_answered_there(copy: LocalCopy, there: Run) -> None:
    refresh(copy, there)

    def say(**fields: Any) -> str:
        message = {"states": {}, "folder": str(there.folder), "error": ""} | fields
        copy.apply(message, b"")
        copy.save()
        return read_run_status(copy.run).state

    assert say(states={"7": ["PENDING", "Resources"]}) == "queued"
    assert read_run_status(copy.run).note == "Resources"
    assert say(states={"7": ["RUNNING", ""]}) == "running"
    assert not read_copy_state(copy.run).is_settled
    copy.save(unreachable="node did not answer within 20 s")
    status = read_run_status(copy.run)
    assert status.state == "running"
    assert "node did not answer" in status.note
    assert say(states={"7": ["TIMEOUT", ""]}) == "failed"
    assert read_copy_state(copy.run).is_settled


@pytest.mark.parametrize("name", ["../x", "/etc/x", ".origin", "logs/../../x"])
def test_a_login_node_writes_nothing_but_the_runs_own_files(copy: LocalCopy, name: str) -> None:
    message = {"file": name, "offset": 0, "last": True, "size": 1, "changed": 1}
    with pytest.raises(EchelonError, match="sent a file named"):
        copy.apply(message, b"x")


def test_a_run_of_this_machine_is_not_taken_for_a_copy(tmp_path: Path, copy: LocalCopy) -> None:
    require_free_or_copy(Run(tmp_path / "none"), "node")
    require_free_or_copy(copy.run, "node")
    with pytest.raises(EchelonError, match="a run on node, not one on other"):
        require_free_or_copy(copy.run, "other")
    own = Run(tmp_path / "own")
    own.logs_folder.mkdir(parents=True)
    with pytest.raises(EchelonError, match="a run of this machine"):
        require_free_or_copy(own, "node")

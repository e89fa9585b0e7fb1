"""The batch script of a sweep's workers: what it does when one ends, and what stands before it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from echelon.config.compose import compose
from echelon.launch.slurm.batch_script import make_trial_step_command, render_sweep_script
from echelon.runs.run_folder import Run

SCONTROL = '#!/bin/bash\necho "$@" >> "$CALLS"\nexit "${REFUSES:-0}"\n'
TASK = {"SLURM_JOB_ID": "70009", "SLURM_ARRAY_JOB_ID": "70007", "SLURM_ARRAY_TASK_ID": "3"}
LIMIT = "launch.max_requeues=2"


def worked(
    folder: Path, worker: str, *words: str, look: str = "true", **variables: str
) -> tuple[int, list[str], str]:
    """The script's exit code, what it asked of Slurm, and what it said."""
    config = compose(["launch=slurm", LIMIT, *words])
    command, first = ("bash", "-c", worker), ("bash", "-c", look)
    script = render_sweep_script(config, folder / "s" / "logs", command, first, 4)
    (folder / "workers.sh").write_text(script)
    (folder / "scontrol").write_text(SCONTROL)
    (folder / "scontrol").chmod(0o755)
    return again(folder, **variables)


def again(folder: Path, **variables: str) -> tuple[int, list[str], str]:
    script, calls = folder / "workers.sh", folder / "calls"
    env = {"PATH": f"{folder}:/usr/bin:/bin", "CALLS": str(calls), **TASK, **variables}
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True)
    asked = calls.read_text().splitlines() if calls.exists() else []
    return done.returncode, asked, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("worker", "variables", "code", "queued"),
    [
        ("exit 0", {}, 0, False),
        ("exit 1", {}, 1, False),
        ("exit 75", {}, 0, True),
        ("kill -9 $$", {}, 0, True),
        ("exit 75", {"SLURM_RESTART_COUNT": "1"}, 0, True),
        ("exit 75", {"SLURM_RESTART_COUNT": "2"}, 75, False),
        ("kill -TERM $PPID; sleep 0.05; exit 75", {}, 75, False),
    ],
    ids=["done", "failed", "saved", "killed", "again", "often enough", "Slurm's own business"],
)
def test_a_worker_queues_itself_again_and_not_the_whole_array(
    tmp_path: Path, worker: str, variables: dict[str, str], code: int, queued: bool
) -> None:
    ended, asked, said = worked(tmp_path, worker, **variables)
    assert (ended, asked) == (code, ["requeue 70007_3"] if queued else []), said


def test_a_signal_as_the_worker_ends_does_not_take_its_code(tmp_path: Path) -> None:
    """In bash 5.2 `wait` lost it in one of seven tries."""
    ended = [worked(tmp_path, "kill -TERM $PPID; exit 75")]
    ended += [again(tmp_path) for _ in range(29)]
    assert [(code, asked) for code, asked, _ in ended] == [(75, [])] * 30


def test_a_worker_that_slurm_will_not_queue_again_says_so(tmp_path: Path) -> None:
    assert worked(tmp_path, "exit 75", REFUSES="1")[0] == 75


def test_a_set_up_that_fails_ends_the_worker_before_it_takes_a_trial(tmp_path: Path) -> None:
    setup = "launch.setup=['no-such-program']"
    code, _, said = worked(tmp_path, "echo at work", setup)
    assert code == 127
    assert "error: launch.setup fails with 127 at: no-such-program" in said
    assert "at work" not in said


def test_nodes_that_are_not_ready_get_no_trial(tmp_path: Path) -> None:
    worker, ready = "echo at work", "launch.preflight=true"
    code, _, said = worked(tmp_path, worker, ready, look="echo link: fail; exit 8")
    assert (code, said) == (8, "link: fail\n")
    assert worked(tmp_path, worker, ready)[::2] == (0, "at work\n")
    assert worked(tmp_path, worker, look="exit 8")[::2] == (0, "at work\n")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="-P is new in Python 3.11")
def test_a_program_s_folder_is_not_searched_for_our_modules(tmp_path: Path) -> None:
    for program, safe in ((["python", "x.py"], True), ([], False)):
        config = compose(["launch=slurm", "launch.nodes=2"], program=program)
        words = make_trial_step_command(config, Run(tmp_path), "first:20007")
        at = words.index(sys.executable)
        assert words[at + 1 : at + 4] == (["-P", "-m", "echelon"] if safe else words[at + 1 :][:3])
        assert ("-P" in words) is safe
        assert words[-5:] == ["--nodes", "2", "--master", "first:20007", str(tmp_path)]

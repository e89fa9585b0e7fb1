"""A submission is carried out once, also where the login node ended the process in the middle.

Slurm's commands are programs that answer as Slurm does and write down that they were called.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from echelon.config.schema import Config, LaunchConfig, RunConfig
from echelon.login.host.source_store import SourceStore
from echelon.login.host.submit_once import RunRequest, read_submission, submit_once
from echelon.runs.run_folder import Run

SBATCH = """#!/bin/sh
case "$*" in *--test-only*) cat > /dev/null; exit 0 ;; esac
echo sbatch >> {calls}
{then}
"""
SQUEUE = "#!/bin/sh\n{answer}\n"


@pytest.fixture
def store(tmp_path: Path) -> SourceStore:
    made = SourceStore(tmp_path / "project")
    made.make_tree("tree", [])
    return made


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    slurm_says(tmp_path, "echo 7")
    return tmp_path / "calls"


def slurm_says(folder: Path, sbatch: str, squeue: str = ":") -> None:
    texts = {
        "sbatch": SBATCH.format(calls=folder / "calls", then=sbatch),
        "squeue": SQUEUE.format(answer=squeue),
    }
    for name, text in texts.items():
        program = folder / "bin" / name
        program.write_text(text)
        program.chmod(0o755)


def make_submission(store: SourceStore, submission_id: str = "id1") -> RunRequest:
    config = Config(
        experiment={"entry": "echelon.recipes.toy:experiment"},
        launch=LaunchConfig(kind="slurm", python="/usr/bin/python3"),
        run=RunConfig("a", str(store.root / "runs")),
    )
    return RunRequest(submission_id, "tree", [config.to_dict()])


def jobs_of(result: dict[str, Any] | None) -> list[str]:
    assert result is not None
    return [run["job"] for run in result["runs"]]


def test_whoever_asks_again_is_told_what_became_of_it(store: SourceStore, calls: Path) -> None:
    assert read_submission(store, "id1") is None
    assert jobs_of(submit_once(store, make_submission(store))) == ["7"]
    assert jobs_of(submit_once(store, make_submission(store))) == ["7"]
    assert jobs_of(read_submission(store, "id1")) == ["7"]
    assert calls.read_text().split() == ["sbatch"]


def test_two_connections_with_one_submission_queue_one_job(
    store: SourceStore, calls: Path, tmp_path: Path
) -> None:
    slurm_says(tmp_path, "sleep 0.5; echo 7")
    # Each connection is a process of its own there, which forks.
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        both = [pool.submit(submit_once, store, make_submission(store)) for _ in range(2)]
        assert [jobs_of(each.result()) for each in both] == [["7"], ["7"]]
    assert calls.read_text().split() == ["sbatch"]


def test_a_refusal_leaves_nothing_and_may_be_tried_again(
    store: SourceStore, calls: Path, tmp_path: Path
) -> None:
    slurm_says(tmp_path, "echo 'sbatch: error: over the limit' >&2; exit 1")
    result = submit_once(store, make_submission(store))
    assert "over the limit" in result["faults"][0][0]
    assert not (store.root / "runs" / "a").exists()
    assert not list((store.folder / "submissions").iterdir())
    slurm_says(tmp_path, "echo 8")
    assert jobs_of(submit_once(store, make_submission(store))) == ["8"]


def test_jobs_that_were_taken_before_a_refusal_are_known(
    store: SourceStore, calls: Path, tmp_path: Path
) -> None:
    """Runs that differ in their launch are a call of sbatch each."""
    [first] = make_submission(store).configs
    second = first | {
        "run": first["run"] | {"name": "b"},
        "launch": first["launch"] | {"nodes": 2},
    }
    slurm_says(tmp_path, f"[ $(wc -l < {calls}) = 1 ] || exit 1; echo 7")
    both = RunRequest("id1", "tree", [first, second], work_lines=[])
    result = submit_once(store, both)
    assert jobs_of(result) == ["7"]
    assert "Slurm does not take the job" in result["refused"]["faults"][0][0]
    assert (store.root / "runs" / "a").exists()
    assert not (store.root / "runs" / "b").exists()
    assert jobs_of(read_submission(store, "id1")) == ["7"]
    assert calls.read_text().split() == ["sbatch", "sbatch"]


@pytest.mark.parametrize("knows", ["queue", "folder"])
def test_killed_between_sbatch_and_its_record(
    store: SourceStore, calls: Path, tmp_path: Path, knows: str
) -> None:
    """The login node ended the process when Slurm had taken the job. It is found in the queue; or
    it is over, and has written its number into the folder."""
    run = Run(store.root / "runs" / "a")
    wrote = f"echo 9 > {run.job_id_file}; " if knows == "folder" else ""
    # `sbatch` takes the job and ends the process that called it, before that hears of it.
    slurm_says(tmp_path, f"{wrote}kill -9 $PPID; sleep 1; echo 9")
    assert submit_once(store, make_submission(store)) == {"unknown": True}
    answer = 'echo "9|$(date +%Y-%m-%dT%H:%M:%S)"' if knows == "queue" else ":"
    slurm_says(tmp_path, "echo 10", answer)
    assert jobs_of(submit_once(store, make_submission(store))) == ["9"]
    assert calls.read_text().split() == ["sbatch"]

"""The workers of a sweep are submitted once, into the folder of the same sweep only.

Slurm's commands are programs that answer as Slurm does and write down that they were called.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from echelon.config.schema import Config, LaunchConfig, RunConfig
from echelon.login.host.source_store import SourceStore
from echelon.login.host.submit_once import submit_once
from echelon.login.host.sweep_jobs import SweepSubmission
from echelon.sweep.sweep_folder import SweepFolder, SweepSettings

FILE = "method: grid\nmetric: {name: loss}\nparameters: {lr: {values: [1, 2]}}\n"
SETTINGS = SweepSettings(["launch=slurm"], [], {"name": "loss", "goal": "minimize"}, 2)
SBATCH = """#!/bin/sh
case "$*" in *--test-only*) cat > /dev/null; exit 0 ;; esac
pwd >> {calls}
{then}
"""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SourceStore:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    made = SourceStore(tmp_path / "project")
    made.add_file("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", b"abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    made.make_tree("tree", [["x.py", "file", digest, 3]])
    slurm_says(tmp_path, "echo 7")
    return made


def slurm_says(folder: Path, sbatch: str, squeue: str = ":") -> None:
    texts = {
        "sbatch": SBATCH.format(calls=folder / "calls", then=sbatch),
        "squeue": f"#!/bin/sh\n{squeue}\n",
    }
    for name, text in texts.items():
        program = folder / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)


def make_submission(store: SourceStore, submission_id: str, text: str = FILE) -> SweepSubmission:
    config = Config(
        experiment={"entry": "echelon.recipes.toy:experiment"},
        launch=LaunchConfig(kind="slurm", python="/opt/python3"),
        run=RunConfig("s-0", str(store.root / "runs")),
    )
    return SweepSubmission(submission_id, "tree", "s", config.to_dict(), asdict(SETTINGS), text, 2)


def test_workers_are_submitted_once_and_work_in_code_of_their_own(
    store: SourceStore, tmp_path: Path
) -> None:
    [run] = submit_once(store, make_submission(store, "id1"))["runs"]
    assert (run["name"], run["job"]) == ("s", "7")
    assert submit_once(store, make_submission(store, "id1"))["runs"] == [run]
    folder = store.get_sweep_folder("s")
    assert (tmp_path / "calls").read_text().split() == [str(folder)]
    assert (folder / "x.py").read_bytes() == b"abc"
    sweep = SweepFolder(store.root / "runs" / "s")
    script = sweep.script_file.read_text()
    assert f"/opt/python3 -m echelon sweep --work {sweep.folder}" in script
    assert "#SBATCH --array=0-1" in script
    slurm_says(tmp_path, "echo 8", "echo '7_0|RUNNING|None'")
    refused = submit_once(store, make_submission(store, "id2"))
    assert "is queued or running already, as job 7_0" in refused["faults"][0][0]
    slurm_says(tmp_path, "echo 8")
    [again] = submit_once(store, make_submission(store, "id2"))["runs"]
    assert again["job"] == "8", "it is continued"


def test_another_search_of_the_same_name_is_refused(store: SourceStore, tmp_path: Path) -> None:
    submit_once(store, make_submission(store, "id1"))
    other = make_submission(store, "id2", FILE.replace("[1, 2]", "[1, 3]"))
    assert "is another one: parameters" in submit_once(store, other)["faults"][0][0]
    more = replace(make_submission(store, "id3"), settings=asdict(replace(SETTINGS, run_cap=9)))
    assert submit_once(store, more)["runs"]
    slurm_says(tmp_path, "echo 'sbatch: error: over the limit' >&2; exit 1")
    new = replace(make_submission(store, "id4"), name="new")
    assert "over the limit" in submit_once(store, new)["faults"][0][0]
    assert not (store.root / "runs" / "new").exists()
    assert not store.get_sweep_folder("new").exists()


def test_killed_between_sbatch_and_its_record(store: SourceStore, tmp_path: Path) -> None:
    slurm_says(tmp_path, "kill -9 $PPID; sleep 1; echo 9")
    assert submit_once(store, make_submission(store, "id1")) == {"unknown": True}
    slurm_says(tmp_path, "echo 10", 'echo "9|$(date +%Y-%m-%dT%H:%M:%S)"')
    [run] = submit_once(store, make_submission(store, "id1"))["runs"]
    assert run["job"] == "9"
    assert len((tmp_path / "calls").read_text().split()) == 1

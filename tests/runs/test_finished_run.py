"""A finished run that is resumed: nothing is started, and it is said how to train longer."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_folders import echelon

from echelon.config.compose import compose
from echelon.runs.create import create_run
from echelon.runs.run_folder import Run
from echelon.runs.writer import release_run_folder

QUICK = ("samples=64", "eval_samples=16", "trainer.batch_size=8", "trainer.epochs=1")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_finished_run_is_left_alone_until_it_is_to_train_longer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert echelon(capsys, "train", "run.name=a", *QUICK)[0] == 0
    run = Run(Path("runs/a").absolute())
    before = run.status_file.read_bytes()
    for words in (["a"], ["a", "trainer.epochs=1"], ["runs/a", "launch=local", "launch.procs=2"]):
        code, out, err = echelon(capsys, "resume", *words)
        assert (code, err) == (0, "")
        assert out.splitlines() == [
            "run a is finished after step 8 (trainer.epochs=1): nothing was started",
            f"  train longer  echelon resume {words[0]} trainer.epochs=2",
        ]
    assert run.status_file.read_bytes() == before
    code, _, err = echelon(capsys, "resume", "a", "lr=0.7")
    assert code == 2
    assert "was trained with experiment.lr=" in err
    assert echelon(capsys, "resume", "a", "trainer.epochs=2")[0] == 0
    assert run.read_status_file()["step"] == 16
    best = sorted(run.snapshots_folder.glob("step-*"))[0]
    code, _, err = echelon(capsys, "resume", "a", f"trainer.resume={best}")
    assert code == 0
    assert "resuming from" in err, "what is asked for by its path is done"


@pytest.fixture
def _no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("_no_slurm")
def test_a_finished_job_queues_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run = create_run(compose(["launch=slurm", "launch.nodes=2", "run.name=a", "trainer.steps=40"]))
    release_run_folder(run)
    run.update_status(launcher="slurm", job="7", state="finished", step=40, total_steps=40)
    run.exit_code_file.write_text("0\n")
    (run.snapshots_folder / "step-000000040").mkdir(parents=True)
    code, out, _ = echelon(capsys, "resume", "a")
    assert code == 0
    assert "run a is finished after step 40 (trainer.steps=40): nothing was started" in out
    assert "echelon resume a trainer.steps=80" in out
    code, _, err = echelon(capsys, "resume", "a", "trainer.steps=41")
    assert code == 2
    assert "no sbatch" in err


@pytest.mark.usefixtures("_no_slurm")
def test_a_finished_run_without_its_last_snapshot_has_work_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = create_run(compose(["launch=slurm", "run.name=a", "trainer.steps=40"]))
    release_run_folder(run)
    run.update_status(launcher="slurm", job="7", state="finished", step=40, total_steps=40)
    run.exit_code_file.write_text("0\n")
    (run.snapshots_folder / "step-000000030").mkdir(parents=True)
    code, _, err = echelon(capsys, "resume", "a")
    assert code == 2
    assert "no sbatch" in err

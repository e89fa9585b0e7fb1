"""The commands that start runs: `train -m … --wait`, and `run` without its `--`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from echelon.cli import run_and_report_faults, run_command
from echelon.errors import ExitCode


@pytest.mark.parametrize(("codes", "expected"), [("0 0 0", 0), ("0 3 0", 3)])
def test_all_runs_are_waited_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    codes: str,
    expected: int,
) -> None:
    """With a Slurm whose jobs end as soon as they are queued; the code is that of one that
    failed."""
    sbatch = f"""#!/bin/bash
[ "$1" = --test-only ] && exec cat > /dev/null
codes=({codes})
for n in 0 1 2; do echo "${{codes[n]}}" > runs/a-$n/exit; done
echo 7
"""
    for name, text in {"sbatch": sbatch, "squeue": "#!/bin/sh\n"}.items():
        (tmp_path / "slurm" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "slurm" / name).write_text(text)
        (tmp_path / "slurm" / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/slurm:{os.environ['PATH']}")
    words = ["train", "-m", "lr=0.1,0.2,0.3", "launch=slurm", "run.name=a", "--wait"]
    assert run_and_report_faults(lambda: run_command(words)) == expected
    shown = capsys.readouterr()
    assert shown.out == "job 7: 3 runs, a-0 … a-2\n"
    assert shown.err.splitlines()[1].startswith("a-1: failed" if expected else "a-1: finished")


def test_a_dry_run_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "-m", "lr=0.1,0.2", "launch=slurm", "--wait", "--dry-run"]
    assert run_command(words) == ExitCode.OK
    assert "#SBATCH --array=0-1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("python train.py --lr 1", "-- python train.py --lr 1"),
        ("launch=local --dry-run ./x.sh a=b", "launch=local --dry-run -- ./x.sh a=b"),
        ("launch=local python -- --lr 1", "launch=local -- python --lr 1"),
    ],
)
def test_a_forgotten_double_dash(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_and_report_faults(lambda: run_command(["run", *typed.split()]))
    assert code == ExitCode.USAGE
    shown = capsys.readouterr().err
    assert "is not a setting KEY=VALUE; a program comes after --" in shown
    assert f"  hint: echelon run {meant}\n" in shown

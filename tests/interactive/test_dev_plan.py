"""`echelon dev` without a cluster: what it would ask for, what that costs, and what is refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_runner import CommandResult, run_here

from echelon.errors import ExitCode

SLURM = ("launch=slurm", "launch.nodes=2", "launch.gpus_per_node=4")


def _type(folder: Path, *words: str, **variables: str) -> CommandResult:
    cache = {"ECHELON_CACHE": str(folder / "cache")}
    return run_here(["dev", *words], folder, **cache, **variables)


def _plan(folder: Path, *words: str) -> dict[str, Any]:
    done = _type(folder, *words, "--dry-run", "--json")
    assert done.code == ExitCode.OK, done.err
    assert not (folder / "cache").exists()  # a dry run writes nothing
    return dict(json.loads(done.out))


@pytest.mark.parametrize(
    ("words", "text", "hours"),
    [
        ((), "at most 16 GPU-hours: 2 nodes × 4 GPUs × 2:00:00", 16),
        (("launch.time=30",), "at most 4 GPU-hours: 2 nodes × 4 GPUs × 30", 4),
        (("launch.time=1-12",), "at most 288 GPU-hours: 2 nodes × 4 GPUs × 1-12", 288),
        (("launch.time=UNLIMITED",), "2 nodes × 4 GPUs, without a time limit", None),
        (
            ("launch.gpus_per_node=null", "launch.cpus_per_node=16", "launch.nodes=1"),
            "at most 32 CPU-hours: 1 node × 16 CPUs × 2:00:00",
            32,
        ),
    ],
)
def test_what_it_costs_at_most(
    words: tuple[str, ...], text: str, hours: float | None, tmp_path: Path
) -> None:
    cost = _plan(tmp_path, *SLURM, *words)["cost"]
    assert (cost["text"], cost["hours"]) == (text, hours)
    assert f"cost: {text}\n" in _type(tmp_path, *SLURM, *words, "--dry-run").out


def test_the_scripts_are_what_was_asked_for(tmp_path: Path) -> None:
    words = ("launch.partition=gpu", "launch.sbatch=['--mem=64G']", "launch.time=4:00:00")
    setup = "launch.setup=['module load cuda']"
    plan = _plan(tmp_path, *SLURM, *words, setup, "--idle", "45", "--name", "b")
    lines = plan["script"].splitlines()
    for option in (
        *("--job-name=echelon-dev-b", "--nodes=2", "--gpus-per-node=4", "--partition=gpu"),
        *("--time=4:00:00", "--mem=64G", "--signal=B:USR2@120", "--no-requeue"),
    ):
        assert lines.count(f"#SBATCH {option}") == 1, option
    assert lines[-1].endswith("--idle-s 2700")
    assert "module load cuda" in plan["shell"]
    for script in (plan["script"], plan["shell"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_a_shell_has_the_variables_of_the_job_alone(tmp_path: Path) -> None:
    """What srun says of the step of the shell is gone; what the keeper has written is there."""
    plan = _plan(tmp_path, *SLURM)
    folder = tmp_path / "cache" / "dev" / "dev"
    folder.mkdir(parents=True)
    (folder / "job.env").write_text("export SLURM_JOB_ID=7\nexport SLURM_NNODES=2\n")
    shown = tmp_path / "shell"
    shown.write_text("#!/bin/sh\nenv | grep ^S[LR]\n")
    shown.chmod(0o755)
    step = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SRUN_DEBUG": "3", "SLURM_NNODES": "1"}
    done = subprocess.run(
        ["bash", "-c", plan["shell"]],
        env={"PATH": "/usr/bin:/bin", "SHELL": str(shown), **step},
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.split()) == ["SLURM_JOB_ID=7", "SLURM_NNODES=2"], done.stderr


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["launch=local"], "launch=local has nothing to allocate"),
        (["launch=ssh", "launch.hosts=[a]"], "launch=ssh has nothing to allocate"),
        (["launch=slurm", "--name", "a/b"], "--name 'a/b' is not a name for an allocation"),
        (["launch=slurm", "launch.time=a b"], "launch.time='a b' is not safe as one word"),
        (["launch=slurm", "launch.nodes=0"], "launch.nodes=0 is below 1"),
    ],
)
def test_what_cannot_be_is_a_sentence(words: list[str], what: str, tmp_path: Path) -> None:
    for more in ([], ["--dry-run"]):
        done = _type(tmp_path, *words, *more)
        assert done.code == ExitCode.USAGE
        assert what in done.err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["launch=slurm", "lr=0.1"], "lr=0.1: only settings of launch"),
        (["--idle", "0"], "'0' is not a number of minutes from 0.1 on"),
        (["--port", "80"], "'80' is not a port from 1024 to 65535"),
        (["--end", "--list"], "not allowed with argument"),
    ],
)
def test_words_that_are_none(words: list[str], what: str, tmp_path: Path) -> None:
    done = _type(tmp_path, *words)
    assert done.code == ExitCode.USAGE
    assert what in done.err


@pytest.mark.parametrize("words", [("launch=slurm",), ("--list",), ("--end",)])
def test_without_slurm_there_is_a_hint(words: tuple[str, ...], tmp_path: Path) -> None:
    done = _type(tmp_path, *words, PATH="/nowhere")
    assert done.code == ExitCode.USAGE
    assert "there is no sbatch on this machine's PATH" in done.err

"""What a shell says about Slurm does not change what our commands ask it for."""

from __future__ import annotations

import pytest

from echelon.runs.slurm_environment import make_slurm_environment

SCRIPT = "#!/bin/bash\n#SBATCH --account=mine\n#SBATCH --time=10\n#SBATCH --no-requeue\nsrun x\n"


@pytest.mark.parametrize(
    "name",
    [
        "SBATCH_ACCOUNT",
        "SBATCH_TIMELIMIT",
        "SBATCH_REQUEUE",
        "SBATCH_JOB_NAME",
        "SBATCH_ARRAY_INX",
        "SQUEUE_PARTITION",
        "SQUEUE_STATES",
        "SLURM_JOB_ID",
        "SLURM_ARRAY_JOB_ID",
        "SLURM_MEM_PER_NODE",
    ],
)
def test_what_is_left_out(name: str) -> None:
    assert name not in make_slurm_environment({name: "1"}, SCRIPT)


@pytest.mark.parametrize("name", ["SBATCH_PARTITION", "SLURM_CONF", "SLURM_CLUSTERS", "PATH"])
def test_what_stays(name: str) -> None:
    assert make_slurm_environment({name: "1"}, SCRIPT)[name] == "1"


def test_times_are_written_in_the_usual_way() -> None:
    env = make_slurm_environment({"SLURM_TIME_FORMAT": "relative"})
    assert env["SLURM_TIME_FORMAT"] == "standard"

"""The variables that Slurm's commands are given.

sbatch takes SBATCH_ACCOUNT and the like before what a script says, squeue hides jobs by
SQUEUE_PARTITION, and a job that is submitted from within another one would inherit that one's
layout. What a command of ours asks for is what it says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_KEPT = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"}
"""They say which cluster is meant, and who asks."""
_DROPPED_PREFIXES = ("SLURM_", "SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SCONTROL_")
_NEVER_MEANT = {"SBATCH_ARRAY_INX", "SBATCH_WAIT", "SBATCH_JOB_NAME"}
"""Each would make something else of any script: several jobs, an answer at the end, a job that
cannot be found by its name."""
_OTHER_NAMES = {
    "time": ("SBATCH_TIMELIMIT",),
    "mem": ("SBATCH_MEM_PER_NODE", "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU"),
    "requeue": ("SBATCH_REQUEUE", "SBATCH_NO_REQUEUE"),
    "no-requeue": ("SBATCH_REQUEUE", "SBATCH_NO_REQUEUE"),
    "gres": ("SBATCH_GRES", "SBATCH_GPUS", "SBATCH_GPUS_PER_NODE", "SBATCH_GPUS_PER_TASK"),
    "gpus-per-node": ("SBATCH_GRES", "SBATCH_GPUS", "SBATCH_GPUS_PER_NODE", "SBATCH_GPUS_PER_TASK"),
}
"""Of options whose variable is not just the option in capitals."""
_OPTION = re.compile(r"^#SBATCH\s+--([a-z-]+)", re.MULTILINE)


def make_slurm_environment(env: Mapping[str, str], script: str = "") -> dict[str, str]:
    """Return the variables for a command of Slurm; `script` is what sbatch is given. Variables of
    sbatch stay as defaults of what the script does not set."""
    dropped = _NEVER_MEANT | set(_list_set_variables(script))
    kept = {
        name: value
        for name, value in env.items()
        if name in _KEPT or not (name.startswith(_DROPPED_PREFIXES) or name in dropped)
    }
    return kept | {"SLURM_TIME_FORMAT": "standard"}


def _list_set_variables(script: str) -> Iterator[str]:
    for option in _OPTION.findall(script):
        yield from _OTHER_NAMES.get(option, (f"SBATCH_{option.replace('-', '_').upper()}",))

"""A further job whose nodes join a run that trains already, and which ends with it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from echelon.config.schema import Config
from echelon.errors import ExitCode
from echelon.launch.slurm import batch_script
from echelon.launch.slurm.sbatch import require_sbatch, require_slurm_accepts, submit_job
from echelon.runs.run_folder import Run


def queue_joining_job(config: Config, run: Run, count: int, first_node: int) -> str:
    """Queue a job of so many nodes, with the options of the run's own; returns its id. The numbers
    of its nodes begin with `first_node`."""
    require_sbatch()
    text = render_joining_script(config, run, count, first_node)
    require_slurm_accepts(text)
    run.joining_script_file.write_text(text, encoding="utf-8", errors="surrogateescape")
    command = ("sbatch", "--parsable", str(run.joining_script_file))
    return submit_job(_make_name(run), command, [])


def render_joining_script(config: Config, run: Run, count: int, first_node: int) -> str:
    """Return its script. The key of the run is in none of its lines: agents read it from a file
    that is their owner's alone."""
    sbatch = _drop_node_names(config.launch.sbatch)
    # The run trains already, so its job waits for no other one.
    launch = replace(config.launch, nodes=count, spares=0, sbatch=sbatch, after=None)
    of_job = replace(config, launch=launch)
    procs = batch_script.count_processes_per_node(config)
    options = [
        f"--job-name={_make_name(run)}",
        f'--output="{run.logs_folder}/job-joined-%j.log"',
        *(o for o in batch_script.make_sbatch_options(of_job, procs) if o != "--requeue"),
        "--no-requeue",
    ]
    well = f"{int(ExitCode.OK)} | {int(ExitCode.LEFT)} | {int(ExitCode.PREEMPTED)}"
    srun = batch_script.make_srun_command(of_job, 1)
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in options),
            "",
            f"run={shlex.quote(str(run.folder))}",
            'fail() { exit "$1"; }',
            *batch_script.render_setup(config.launch, has_key=False),
            *batch_script.render_container(config),
            "",
            "# TERM: preempted or cancelled. The agents leave the run, which goes on.",
            "trap : TERM",
            f"{srun} --wait=0 --kill-on-bad-exit=0 \\",
            '  --output="$run/logs/node-joined-$SLURM_JOB_ID-%n.log" \\',
            f"  {batch_script.render_node_command(config)} \\",
            f'  --join {first_node} "$run"',
            f'code=$?; case "$code" in {well}) exit 0 ;; esac',
            'exit "$code"',
            "",
        ]
    )


def _drop_node_names(options: Sequence[str]) -> list[str]:
    """Return options of sbatch without those that name nodes: they name those of the run's own job,
    and are as many."""
    return [o for o in options if not o.startswith(("--nodelist", "-w"))]


def _make_name(run: Run) -> str:
    return f"{run.name}-joined"

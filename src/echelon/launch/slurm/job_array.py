"""Many runs at once as Slurm job arrays, so that the controller is asked once per array."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from echelon.config.schema import Config
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.launch.slurm import batch_script
from echelon.launch.slurm.sbatch import record_queued, submit_job
from echelon.launch.slurm.version import require_known_options
from echelon.runs.create import create_run
from echelon.runs.run_folder import Run
from echelon.runs.writer import release_run_folder

_SLURM_CONF_FILES = (
    "/etc/slurm/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
    "/run/slurm/conf/slurm.conf",  # where the controller has given it to this machine
)
_DEFAULT_MAX_ARRAY_SIZE = 1001
"""Slurm's default of MaxArraySize; indices stay below it."""


class JobArray(NamedTuple):
    """The runs that are submitted by one call of sbatch."""

    configs: Sequence[Config]
    listing: Path
    """The file with the folder of each task, one a line."""
    script: str


def submit_arrays(configs: Sequence[Config], dry_run: bool) -> int:
    """Submit all runs as one array, or as few as the cluster takes; returns the exit code."""
    _require_equal_launch(configs)
    if read_max_array_size(os.environ) <= 1:
        raise EchelonError(
            Fault("this cluster takes no job arrays (MaxArraySize)", "type a command for each run")
        )
    for array in plan_arrays(configs):
        if dry_run:
            print(array.script)
            continue
        require_known_options(array.script)
        job, created_runs = queue_array(array)
        first, last = created_runs[0], created_runs[-1]
        print(f"job {job}: {len(created_runs)} runs, {first.name} … {last.name}")
    return ExitCode.OK


def group_alike(configs: Sequence[Config]) -> Iterator[list[Config]]:
    """Yield groups of runs with equal launch settings, in the order of their first members."""
    settings = [(config.launch, config.mode) for config in configs]
    first = [settings.index(each) for each in settings]
    for _, group in groupby(sorted(range(len(configs)), key=first.__getitem__), first.__getitem__):
        yield [configs[index] for index in group]


def plan_arrays(
    configs: Sequence[Config], environment: batch_script.ScriptEnvironment | None = None
) -> list[JobArray]:
    """Return the arrays of runs that differ in nothing that Slurm has to know."""
    arrays = []
    for part in _split_into_chunks(configs, read_max_array_size(os.environ) - 1):
        listing = _get_listing_path(part)
        text = batch_script.render_array_script(part[0], listing, len(part), environment)
        arrays.append(JobArray(part, listing, text))
    return arrays


def queue_array(array: JobArray) -> tuple[str, list[Run]]:
    """Submit an array; returns its job id and its runs."""
    configs, listing, text = array
    created_runs = [_create_queued_run(config) for config in configs]
    listing.write_text(
        "".join(f"{run.folder}\n" for run in created_runs),
        encoding="utf-8",
        errors="surrogateescape",
    )
    file = listing.with_suffix(".sh")
    file.write_text(text, encoding="utf-8", errors="surrogateescape")
    job = submit_job(created_runs[0].name, ("sbatch", "--parsable", str(file)), created_runs)
    for index, run in enumerate(created_runs):
        run.job_id_file.write_text(f"{job}_{index}\n", encoding="utf-8")
    return job, created_runs


def find_array_task(run: Run) -> tuple[Path, int] | None:
    """Return the script of the array that a run was queued with, and the number of its task there;
    None for a run with a script of its own."""
    for listing in sorted(run.folder.parent.glob(".*.array")):
        folders = listing.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        if str(run.folder) in folders:
            return listing.with_suffix(".sh"), folders.index(str(run.folder))
    return None


def _create_queued_run(config: Config) -> Run:
    """Create a run and leave its folder to its task: a thousand claims would be as many files that
    are open at once."""
    run = create_run(config)
    try:
        if config.program:
            batch_script.write_program_argv(config, run)
        record_queued(run, config)
    finally:
        release_run_folder(run)
    return run


def _get_listing_path(configs: Sequence[Config]) -> Path:
    """Return the file that lists the folders of an array's runs, in the folder of the first."""
    return Run.from_config(configs[0]).array_file


def _split_into_chunks(configs: Sequence[Config], size: int) -> Iterator[Sequence[Config]]:
    for start in range(0, len(configs), size):
        yield configs[start : start + size]


def _require_equal_launch(configs: Sequence[Config]) -> None:
    """Refuse runs that differ in a setting of launch: the tasks of an array are alike for Slurm."""
    if any(config.launch != configs[0].launch for config in configs):
        raise EchelonError(
            Fault(
                "the runs differ in settings of launch, and the jobs of one array are alike",
                "type one command for each choice of launch",
            )
        )


def read_max_array_size(env: Mapping[str, str]) -> int:
    """MaxArraySize from the cluster's own file, so that the controller is not asked."""
    for file in (env.get("SLURM_CONF"), *_SLURM_CONF_FILES):
        try:
            text = Path(file).read_text(encoding="utf-8", errors="replace") if file else ""
        except OSError:
            continue
        if found := re.search(r"^\s*MaxArraySize\s*=\s*(\d+)", text, re.MULTILINE | re.IGNORECASE):
            return int(found[1])
    return _DEFAULT_MAX_ARRAY_SIZE

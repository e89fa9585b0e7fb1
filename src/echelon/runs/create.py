"""The folder of a run, made new or taken up again, and the name it gets."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from echelon.config import bundled_experiments
from echelon.config.schema import Config, find_differences
from echelon.config.validate import NAME_CHARACTERS
from echelon.errors import EchelonError, ExitCode, Fault, suggest_other_folder
from echelon.object_store.urls import is_url
from echelon.runs.latest import point_latest_to
from echelon.runs.metrics_file import read_first_metrics
from echelon.runs.process_record import make_starting_status
from echelon.runs.run_folder import METRICS_FILE, RUN_FILES, STATUS_FILE, Run
from echelon.runs.start_record import record_start_command
from echelon.runs.trusted_code import require_trusted_folder
from echelon.runs.writer import claim_run_folder, release_run_folder
from echelon.snapshot.layout import (
    EXAMPLE_FOLDER,
    find_snapshot_path_problem,
    list_snapshots,
    parse_step,
)
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.trust import find_owner_trust_problem

_SCRIPT_SUFFIXES = (".py", ".sh")
_MAX_SUBJECT = 60
"""Characters of a generated name that say what is run."""


def create_run(config: Config, is_snapshot_here: bool = True) -> Run:
    """Return the run of a configuration, with its folder made and the resolved config in it.

    A run of that name that exists is continued, if it is of the same experiment and settings, or
    set aside with ``trainer.resume=never``. Everything that can be refused is refused before
    anything in the folder is replaced: also a run that somebody else writes. From here on this
    process is the writer of the folder, until it ends or calls release_run_folder().
    ``is_snapshot_here=False`` means that a snapshot given by its path is on another machine, where
    it is checked later.
    """
    root = Path(config.run.dir).absolute()
    run = Run(root / (config.run.name or _generate_name(config)))
    if is_snapshot_here:
        _require_snapshot(config)
    _claim_folder(run, config)
    try:
        _set_up_folder(run, config, is_snapshot_here)
    except BaseException:
        release_run_folder(run)
        raise
    return run


def _set_up_folder(run: Run, config: Config, is_snapshot_here: bool) -> None:
    """Write what a new start of the run begins with into a folder that this process has claimed."""
    # 1. Refuse what cannot work while the folder is still as it was.
    if config.trainer.resume == "never":
        # Also a folder that has lost its config.json, which would be overwritten.
        if any((run.folder / name).exists() for name in RUN_FILES):
            _move_aside(run)
            _claim_folder(run, config)
    elif run.config_file.exists():
        _require_same_experiment(run, config)
    if config.trainer.resume == "auto":
        # Ranks check these too, but by then the new config.json would have replaced the run's.
        newest = next(reversed(list_snapshots(run.snapshots_folder, ignore_errors=True)), None)
        if newest is None and is_snapshot_here and config.trainer.mirror is None:
            require_snapshots_kept(run)
        elif newest is not None and run.config_file.exists():
            require_same_settings(run, run.read_config().select_numerics_settings(), config, newest)
    # 2. The new configuration.
    _make_folder(run, config)
    # 3. What an earlier start of the run left would be read as the end of this one.
    run.command_file.unlink(missing_ok=True)
    clear_last_end(run)
    record_start_command(run, config)
    # 4. Its status, so that lists show it while torch is imported; the launcher completes it.
    run.update_status(**make_starting_status(config.launch.kind, None, None))
    # 5. Last, so that `latest` never names a run that was refused. A training has to make a step
    #    for it; of a program nobody knows whether it does.
    if config.program:
        point_latest_to(run)


def clear_last_end(run: Run) -> None:
    """Remove what says that the run is over or put away, before it is started again."""
    for file in (run.exit_code_file, run.cancel_file, run.job_id_file, run.archive_file):
        file.unlink(missing_ok=True)


def adopt_run(folder: Path, config: Config) -> Run:
    """Return the run that node 0 made at this path, as this node sees it.

    On a shared file system that is the same folder; elsewhere it is made here.
    """
    run = Run(folder)
    if not run.config_file.exists() or run.read_config() != config:
        _make_folder(run, config)
    return run


def find_restarted_run(config: Config, env: Mapping[str, str]) -> Run | None:
    """Return the run that torchrun or Slurm has started before and starts again now.

    None on a first start, and for a run with a name, which is found by it.
    """
    count = env.get("TORCHELASTIC_RESTART_COUNT") or env.get("SLURM_RESTART_COUNT") or "0"
    if count == "0" or config.run.name:
        return None
    files = Path(config.run.dir).absolute().glob(f"*/{STATUS_FILE}")
    for file in sorted(files, key=lambda p: p.stat().st_mtime, reverse=True):
        run = Run(file.parent)
        if (
            run.read_status_file().get("launch_id") == get_launch_id(env)
            and not run.folder.is_symlink()
            and find_owner_trust_problem(run.folder) is None
        ):
            return run
    return None


def get_launch_id(env: Mapping[str, str]) -> str | None:
    """Return what stays the same when torchrun or Slurm restarts a job; None outside of both."""
    return env.get("TORCHELASTIC_RUN_ID") or env.get("SLURM_JOB_ID")


def require_same_settings(
    run: Run, recorded: dict[str, Any], config: Config, snapshot: Path
) -> None:
    """Raise EchelonError if a run would go on with settings that change its numbers.

    ``recorded`` are the settings of before. A snapshot that a person gives by its path may be
    continued with any settings; the hint says so.
    """
    different = find_differences(recorded, config.select_numerics_settings())
    if different:
        raise EchelonError(
            *(
                Fault(
                    f"{key}={now}, but run {run.name} was trained with {key}={before}",
                    "set it back, choose another run.name, or take the snapshot on purpose with "
                    f"trainer.resume={snapshot}",
                )
                for key, (before, now) in different.items()
            )
        )


def require_snapshots_kept(run: Run, is_any_damaged: bool = False) -> None:
    """Raise EchelonError if a run has no snapshot left that it could continue from, though it had
    saved one. Starting over would overwrite its numbers.

    A run that failed before its first snapshot has nothing to lose.
    """
    status = run.read_status_file()
    saved = str(status.get("snapshot") or "")
    # Without a status nobody knows what was saved, and the numbers may be all that is left.
    has_numbers_alone = not status and read_first_metrics(run.metrics_file) is not None
    if not (saved or is_any_damaged or has_numbers_alone):
        return
    step = parse_step(Path(saved).name)
    had = f"had saved step {step}" if step is not None else "has trained before"
    how = "those left are damaged" if is_any_damaged else "none is left"
    raise EchelonError(
        Fault(
            f"run {run.name} {had}, but of the snapshots in {run.snapshots_folder} {how}, so it "
            f"cannot go on; its numbers in {METRICS_FILE} are kept",
            "bring the snapshots back, choose another run.name, or start over with "
            f"trainer.resume=never, which keeps the old run as {_find_free_folder(run).name}",
        ),
        exit=ExitCode.NOT_FOUND,
    )


def _require_same_experiment(run: Run, config: Config) -> None:
    before, now = run.read_config().experiment.get("entry"), config.experiment.get("entry")
    if before != now:
        raise EchelonError(
            Fault(
                f"run.name={run.name}: {run.folder} is a run of the experiment {before!r}, "
                f"not of {now!r}",
                "choose another run.name, or trainer.resume=never to set the old run aside",
            )
        )


def _require_snapshot(config: Config) -> None:
    """Raise EchelonError if ``trainer.resume=PATH`` is not a snapshot, by the names in it.

    Its content is verified where it is read.
    """
    given = config.trainer.resume
    if given in ("auto", "never") or is_url(given):
        return
    if missing := find_snapshot_path_problem(Path(given)):
        raise EchelonError(
            Fault(
                f"trainer.resume={given} is not a snapshot: {missing}",
                f"give a folder such as {EXAMPLE_FOLDER}",
            ),
            exit=ExitCode.NOT_FOUND,
        )


def _claim_folder(run: Run, config: Config) -> None:
    """Make this process the writer of the folder, which is made for that."""
    require_trusted_folder(run.folder)
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        claim_run_folder(run)
    except OSError as error:
        raise _make_folder_error(run, config, error) from error


def _make_folder(run: Run, config: Config) -> None:
    require_trusted_folder(run.folder)
    try:
        run.logs_folder.mkdir(parents=True, exist_ok=True)
        run.write_config(config)
    except OSError as error:
        raise _make_folder_error(run, config, error) from error


def _make_folder_error(run: Run, config: Config, error: OSError) -> EchelonError:
    return EchelonError(
        Fault(
            f"run.dir={config.run.dir}: the run folder {run.folder} cannot be written: "
            f"{format_os_error_reason(error)}",
            suggest_other_folder(error, "run.dir=PATH"),
        )
    )


def _move_aside(run: Run) -> None:
    """Rename the folder to the first free NAME.1, NAME.2, …"""
    run.folder.rename(_find_free_folder(run))


def _find_free_folder(run: Run) -> Path:
    numbered = (run.folder.with_name(f"{run.name}.{number}") for number in count(1))
    return next(folder for folder in numbered if not os.path.lexists(folder))


# --- names ---


def assign_name(config: Config) -> Config:
    """Return the configuration with a name for its run, so that a plan can show its folder."""
    if config.run.name:
        return config
    return replace(config, run=replace(config.run, name=_generate_name(config)))


def assign_numbered_names(configs: list[Config]) -> list[Config]:
    """Return the configurations with the name of the first and a number each: NAME-0, NAME-1, …"""
    name = assign_name(configs[0]).run.name
    return [
        replace(config, run=replace(config.run, name=f"{name}-{number}"))
        for number, config in enumerate(configs)
    ]


def generate_run_name(program: Sequence[str], entry: str = "") -> str:
    """Return a new name for a run of this experiment or program: ``toy-20260228-090500-1a2b``."""
    short = get_short_subject(entry, program).lstrip(".-")[:_MAX_SUBJECT] or "run"
    return f"{short}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def get_short_subject(entry: str, program: Sequence[str]) -> str:
    """Return one word for what is run: the name, file or module of an experiment or a program."""
    if entry in bundled_experiments.read_names_by_entry():
        return bundled_experiments.read_names_by_entry()[entry]
    entry = entry or _find_script(program)
    where = entry.rpartition(":")[0] or entry
    stem = Path(where).stem if where.endswith(_SCRIPT_SUFFIXES) else where
    return "".join(c for c in stem.rpartition(".")[2] if c in NAME_CHARACTERS) or "run"


def _generate_name(config: Config) -> str:
    return generate_run_name(config.program, str(config.experiment.get("entry") or ""))


def _find_script(program: Sequence[str]) -> str:
    """Return the word of a command that names it best: its first script, or the program."""
    scripts = [word for word in program if word.endswith(_SCRIPT_SUFFIXES)]
    return f"{scripts[0]}:" if scripts else Path(program[0]).name if program else "run"

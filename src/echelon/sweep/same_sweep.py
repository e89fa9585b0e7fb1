"""Whether a sweep that is continued is the one that was begun.

It is asked where the sweep is planned, and again on the cluster whose folder has it.
"""

from __future__ import annotations

from collections.abc import Sequence

from echelon.errors import EchelonError, Fault
from echelon.runs.run_folder import Run
from echelon.sweep.sweep_file import SweepFile
from echelon.sweep.sweep_folder import SweepFolder, SweepSettings


def require_same_sweep(sweep: SweepFolder, file: SweepFile, settings: SweepSettings) -> None:
    """Refuse to continue a sweep as another search; only the number of trials may change."""
    if Run(sweep.folder).config_file.exists():
        raise EchelonError(
            Fault(f"{sweep.folder} is a run, not a sweep", "choose another name with --name")
        )
    if not sweep.settings_file.exists():
        _require_no_trials(sweep)
        return
    old_file, old_settings = sweep.read_file(), sweep.read_settings()
    differs = [
        key
        for key in ("method", "metric", "parameters", "early_terminate")
        if old_file.data.get(key) != file.data.get(key)
    ]
    differs += [
        key
        for key in ("program", "storage")
        if getattr(old_settings, key) != getattr(settings, key)
    ]
    old_overrides = _select_trial_overrides(old_settings.overrides)
    differs += sorted(set(old_overrides) ^ set(_select_trial_overrides(settings.overrides)))
    if differs:
        raise EchelonError(
            Fault(
                f"the sweep {sweep.name} in {sweep.folder} is another one: {', '.join(differs)}",
                "choose another name with --name",
            )
        )


def _require_no_trials(sweep: SweepFolder) -> None:
    """Refuse a new sweep beside runs of these names: a finished one would pass for a trial."""
    for run in sweep.find_trial_runs():
        raise EchelonError(
            Fault(
                f"{run.folder} is there already, and is not a trial of a new sweep {sweep.name}",
                "choose another name with --name, or remove such runs",
            )
        )


def _select_trial_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that decide what trials are; where they run may change."""
    return [word for word in overrides if not word.startswith(("launch", "track", "notify"))]

"""Which trackers a run has, and whether they can be used.

The module of a tracker is imported where it is chosen, as most runs have none.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping

from echelon.config.schema import WANDB_MODES, Config
from echelon.errors import EchelonError, Fault, suggest_nearest
from echelon.runs.run_folder import Run
from echelon.tracking.metrics_writer import MetricsFile
from echelon.tracking.summary import shorten_path
from echelon.tracking.tracker import Tracker

_TENSORBOARD_CLOSE_S = 20.0
_WANDB_MARGIN_S = 10.0
"""How much longer than wandb's own timeouts to wait for it at the end."""


def create_trackers(
    config: Config, run: Run, step: int, is_evaluation_left: bool = False
) -> tuple[Tracker, ...]:
    """Return the trackers of rank 0 for a run that continues after ``step``, or with the evaluation
    of this step where that is left.

    The writer of metrics.jsonl is always the first: the others are brought up to date from its
    lines, so they must be truncated to ``step`` before a tracker starts.
    """
    metrics_file = MetricsFile(run, step, is_evaluation_left)
    trackers: list[Tracker] = [metrics_file]
    if _uses_wandb(config, os.environ):
        trackers.append(_create_wandb_tracker(config, run, metrics_file))
    if config.track.tensorboard.use:
        # The evaluation may be in its files already: then they are purged from its step on.
        whole_step = step - 1 if is_evaluation_left else step
        trackers.append(_create_tensorboard_tracker(config, run, whole_step, metrics_file))
    return tuple(trackers)


def _create_wandb_tracker(config: Config, run: Run, metrics_file: MetricsFile) -> Tracker:
    from echelon.tracking import wandb_run
    from echelon.tracking.background import BackgroundTracker

    _import_early("wandb")
    with contextlib.suppress(OSError):  # a full disk; wandb then generates an id
        wandb_run.ensure_run_id(config, run, os.environ)
    return BackgroundTracker(
        "wandb",
        functools.partial(wandb_run.open_wandb, config, run),
        metrics_file.read_past_lines(),
        run.get_tracker_progress_file("wandb"),
        close_timeout_s=sum(wandb_run.get_timeouts_s(os.environ)) + _WANDB_MARGIN_S,
        get_summary_rows=functools.partial(wandb_run.get_url_and_sync_rows, run),
        abandon=wandb_run.kill_wandb_core,
    )


def _create_tensorboard_tracker(
    config: Config, run: Run, step: int, metrics_file: MetricsFile
) -> Tracker:
    from echelon.tracking import tensorboard_events
    from echelon.tracking.background import BackgroundTracker

    _import_early("tensorboard.summary.writer.record_writer")
    folder = tensorboard_events.get_event_folder(config, run.folder)
    return BackgroundTracker(
        "TensorBoard",
        functools.partial(tensorboard_events.open_tensorboard, folder, run, config, step),
        metrics_file.read_past_lines(),
        run.get_tracker_progress_file("tensorboard"),
        close_timeout_s=_TENSORBOARD_CLOSE_S,
        get_summary_rows=lambda: {"curves": f"tensorboard --logdir {shorten_path(folder)}"},
    )


def _import_early(module: str) -> None:
    """Import a module before there is a thread that needs it: a data loader's process that is
    forked in the middle of another thread's import would wait for that import for ever."""
    with contextlib.suppress(Exception):  # the thread fails in the same way, and warns
        importlib.import_module(module)


def require_trackers(config: Config, env: Mapping[str, str]) -> None:
    """Raise EchelonError if a chosen tracker cannot be used on this machine, before a run
    starts."""
    faults = list(_find_faults(config, env))
    if faults:
        raise EchelonError(*faults)


def _find_faults(config: Config, env: Mapping[str, str]) -> Iterator[Fault]:
    """Yield what is missing: a package, a valid mode, a key."""
    chosen = {"wandb": _uses_wandb(config, env), "tensorboard": config.track.tensorboard.use}
    for name, used in chosen.items():
        if used and importlib.util.find_spec(name) is None:
            yield Fault(f"track={name}, but {name} is not installed", _format_install_hint(name))
    if not config.track.wandb.use:
        return
    from echelon.tracking import wandb_key, wandb_run

    mode = wandb_run.get_mode(config, env)
    if mode not in WANDB_MODES:
        yield Fault(f"WANDB_MODE={mode}: there is no such mode", suggest_nearest(mode, WANDB_MODES))
    if mode != "online":
        return
    if reason := wandb_key.find_key_problem(env):
        yield Fault(
            f"track=wandb, but {reason}",
            "log in with `wandb login`, or set WANDB_API_KEY; or go without a server: "
            "track.wandb.mode=offline",
        )


def _format_install_hint(name: str) -> str:
    return f'install it: pip install "echelon[{name}]"'


def _uses_wandb(config: Config, env: Mapping[str, str]) -> bool:
    if not config.track.wandb.use:
        return False
    from echelon.tracking.wandb_run import get_mode

    return get_mode(config, env) != "disabled"

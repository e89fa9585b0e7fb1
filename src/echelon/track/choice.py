"""Which trackers a run has, and whether they can be had."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping

from echelon.config.schema import WANDB_MODES, Config
from echelon.errors import EchelonError, Fault, nearest
from echelon.runs import Run
from echelon.track import events, key, wandb_run
from echelon.track.apart import Apart
from echelon.track.jsonl import JsonLines
from echelon.track.lines import Tracker
from echelon.track.summary import short

_EVENTS_S = 20.0
_MORE_S = 10.0
"""Beyond what wandb itself is told to wait."""


def trackers(config: Config, run: Run, step: int) -> tuple[Tracker, ...]:
    """Of rank 0, for a run that goes on after `step`; metrics.jsonl is always the first."""
    lines = JsonLines(run.metrics_file, step)
    made: list[Tracker] = [lines]
    if _wants_wandb(config, os.environ):
        _import("wandb")
        with contextlib.suppress(OSError):  # a full disk; wandb then makes an id of its own
            wandb_run.keep_id(config, run, os.environ)
        made.append(
            Apart(
                "wandb",
                functools.partial(wandb_run.open_wandb, config, run),
                lines.kept,
                run.mark_file("wandb"),
                patience_s=sum(wandb_run.limits_s(os.environ)) + _MORE_S,
                last_words=functools.partial(wandb_run.last_words, run),
                abandon=wandb_run.abandon,
            )
        )
    if config.track.tensorboard.use:
        _import("tensorboard.summary.writer.record_writer")
        folder = events.folder_of(config, run.folder)
        made.append(
            Apart(
                "TensorBoard",
                functools.partial(events.open_events, folder, config, step),
                lines.kept,
                run.mark_file("tensorboard"),
                patience_s=_EVENTS_S,
                last_words=lambda: {"curves": f"tensorboard --logdir {short(folder)}"},
            )
        )
    return tuple(made)


def _import(module: str) -> None:
    """Before there is a thread for it: a loader's process that is forked in the middle of another
    thread's import would wait for that import for ever."""
    with contextlib.suppress(Exception):  # the thread meets it too, and says so
        importlib.import_module(module)


def require(config: Config, env: Mapping[str, str]) -> None:
    """Before anything is started, where it will run on this machine."""
    faults = list(_missing(config, env))
    if faults:
        raise EchelonError(*faults)


def _missing(config: Config, env: Mapping[str, str]) -> Iterator[Fault]:
    chosen = {"wandb": _wants_wandb(config, env), "tensorboard": config.track.tensorboard.use}
    for name, used in chosen.items():
        if used and importlib.util.find_spec(name) is None:
            yield Fault(f"track={name}, but {name} is not installed", _install(name))
    mode = wandb_run.mode_of(config, env)
    if config.track.wandb.use and mode not in WANDB_MODES:
        yield Fault(f"WANDB_MODE={mode}: there is no such mode", nearest(mode, WANDB_MODES))
    if not _wants_wandb(config, env) or mode != "online":
        return
    if reason := key.problem(env):
        yield Fault(
            f"track=wandb, but {reason}",
            "log in with `wandb login`, or set WANDB_API_KEY; or go without a server: "
            "track.wandb.mode=offline",
        )


def _install(name: str) -> str:
    return f'install it: pip install "echelon[{name}]"'


def _wants_wandb(config: Config, env: Mapping[str, str]) -> bool:
    return config.track.wandb.use and wandb_run.mode_of(config, env) != "disabled"

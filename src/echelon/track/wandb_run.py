"""Weights & Biases: one run of theirs for one run of ours, however often it was started.

wandb speaks to a process of its own, wandb-core, which ends by itself when ours is gone. It writes
every row to a file before it sends it, so what a server did not take can be sent later; but it
writes that file only every quarter of a minute, so what a kill took from it is given again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shlex
import signal
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.config.schema import Config, Trainer
from echelon.errors import Exit
from echelon.runs import Run, write_json
from echelon.track import key
from echelon.track.apart import Say, brief
from echelon.track.lines import Line, axes, curves
from echelon.track.summary import short

_INIT_S = 20.0
"""The training runs on meanwhile; what it logs waits."""
_FINISH_S = 15.0
PATIENCE_S = _INIT_S + _FINISH_S + 10.0
_SETTLES_S = 30.0


def mode_of(config: Config, env: Mapping[str, str]) -> str:
    return config.track.wandb.mode or env.get("WANDB_MODE") or "online"


def keep_id(run: Run, env: Mapping[str, str]) -> str:
    """Made once. A sweep's agent gives it by WANDB_RUN_ID, which every rank inherits."""
    known = run.wandb_id()
    if known is not None:
        return known
    letters = string.ascii_lowercase + string.digits
    new = env.get("WANDB_RUN_ID") or "".join(secrets.choice(letters) for _ in range(8))
    write_json(run.wandb_file, {"id": new, "unsent": []})
    return new


def last_words(run: Run) -> dict[str, str]:
    state = _state(run)
    folders = [run.folder / "wandb" / name for name in state["unsent"]]
    unsent = [f for f in folders if f.is_dir() and not any(f.glob("*.wandb.synced"))]
    words = {"wandb": str(state["url"])} if state.get("url") else {}
    if unsent:
        words["send it"] = "wandb sync " + " ".join(shlex.quote(short(f)) for f in unsent)
    return words


def end_core() -> None:
    """Whatever it waits for: its file is on the disk."""
    import psutil

    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.name() == "wandb-core":
                child.kill()


class WandbRun:
    """A run of wandb's that is open."""

    settles_s = _SETTLES_S

    def __init__(self, config: Config, run: Run, past: Sequence[Line], say: Say) -> None:
        self._run, self._say = run, say
        self._online = mode_of(config, os.environ) == "online"
        self._best = Best(config.trainer, past)
        self._warnings = _Warnings(say)
        self._wandb = _start(config, run, self._online, self._warnings, say)
        self._online = not self._wandb.offline
        self._folder = Path(self._wandb.dir).parent.name
        self._remember(unsent=True)
        self._wandb.define_metric("step")
        self._wandb.define_metric("*", step_metric="step")
        self._wandb.summary.update(self._best.shown())
        if self._online:
            say(f"wandb: {self._wandb.url}")

    def put(self, line: Line, row: int) -> None:
        """A row has wandb's own number, which must grow; curves are drawn over our `step`, which
        goes back when a run goes on from a snapshot."""
        self._wandb.log(axes(line) | curves(line), step=max(row, self._wandb.step))
        if self._best.beaten_by(line):
            self._wandb.summary.update(self._best.shown())

    def flush(self) -> None: ...

    def close(self, outcome: Exit) -> None:
        import wandb

        try:
            if outcome is Exit.PREEMPTED:
                self._wandb.mark_preempting()
            self._wandb.finish(exit_code=int(outcome))
            if self._online and not self._warnings.unsent:
                self._remember(unsent=False)
        except TimeoutError:
            self._say(
                f"warning: wandb did not take everything within {_FINISH_S:g} s; the rest is in "
                f"{short(self._run.folder / 'wandb' / self._folder)}"
            )
        finally:
            wandb.teardown()

    def _remember(self, unsent: bool) -> None:
        state = _state(self._run)
        others = [name for name in state["unsent"] if name != self._folder]
        url = {"url": self._wandb.url} if self._online else {}
        names = [*others, self._folder] if unsent else others
        write_json(self._run.wandb_file, state | url | {"unsent": names})


def open_wandb(
    config: Config, run: Run, past: Sequence[Line], handed: int, say: Say
) -> tuple[WandbRun, Sequence[Line]]:
    return WandbRun(config, run, past, say), past[handed:]


def _start(config: Config, run: Run, online: bool, warnings: _Warnings, say: Say) -> Any:
    os.environ["WANDB_SILENT"] = "true"  # what it says from the very first is ours to say
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.pop("WANDB_SERVICE", None)  # of the process that started us, perhaps elsewhere
    logger = logging.getLogger("wandb")  # where it speaks when it is silent
    logger.addHandler(warnings)
    reason = key.problem(os.environ) if online else None
    if online and reason is None:
        try:
            return _init(config, run, "online")
        except Exception as error:
            reason = brief(error)
    if reason is not None:
        say(
            f"warning: wandb: {reason}; going on offline, the last words of the run say how to "
            "send its files"
        )
    return _init(config, run, "offline")


def _init(config: Config, run: Run, mode: str) -> Any:
    import wandb

    given, env = config.track.wandb, os.environ
    settings = wandb.Settings(
        init_timeout=_INIT_S,
        finish_timeout=_FINISH_S,
        finish_timeout_raises=True,
        stop_fn=lambda: _stop(run),
        silent=True,
        console="off",  # what is printed is in the run's logs
        disable_git=True,
        disable_code=True,
        x_disable_stats=True,  # a sampler beside the training, for this one process of many
        x_save_requirements=False,
    )
    return wandb.init(
        mode=mode,  # type: ignore[arg-type]
        id=run.wandb_id(),
        resume="allow",
        dir=run.folder,
        project=given.project or env.get("WANDB_PROJECT") or "echelon",
        entity=given.entity or env.get("WANDB_ENTITY"),
        group=given.group or env.get("WANDB_RUN_GROUP"),
        name=given.name or env.get("WANDB_NAME") or run.name,
        tags=given.tags or None,
        notes=given.notes or env.get("WANDB_NOTES"),
        config=config.to_dict(),
        settings=settings,
    )


def _stop(run: Run) -> None:
    """The stop button of its page: save, end, and do not queue again."""
    run.cancel_file.touch()
    os.kill(os.getpid(), signal.SIGTERM)


def _state(run: Run) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return {"unsent": []} | dict(json.loads(run.wandb_file.read_text()))
    return {"unsent": []}


class _Warnings(logging.Handler):
    """The first warning of wandb's becomes ours; one of them says that it has given up sending."""

    def __init__(self, say: Say) -> None:
        super().__init__(logging.WARNING)
        self._tell = say
        self._told = False
        self.unsent = False

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "wandb sync" in text:
            self.unsent = True
        if not self._told:
            self._told = True
            self._tell(f"warning: wandb: {text.splitlines()[0]}")


class Best:
    """The best number of a run so far, by what trainer.best asks for."""

    def __init__(self, trainer: Trainer, past: Sequence[Line]) -> None:
        self._name = trainer.best
        self._sign = 1 if trainer.best_is == "min" else -1
        self._line: Line | None = None
        for line in past:
            self.beaten_by(line)

    def beaten_by(self, line: Line) -> bool:
        key = f"eval_{self._name}"
        if key not in line:
            return False
        if self._line is not None and self._sign * line[key] >= self._sign * self._line[key]:
            return False
        self._line = line
        return True

    def shown(self) -> dict[str, float]:
        if self._line is None:
            return {}
        return {
            f"best/{self._name}": self._line[f"eval_{self._name}"],
            "best/step": self._line["step"],
        }

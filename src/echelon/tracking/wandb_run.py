"""Weights & Biases: one wandb run for each run of Echelon, over all its restarts.

wandb starts a separate process, wandb-core, which ends by itself when ours has ended. It writes
every row to a file before it sends it, so rows that the server did not accept can be sent later.
But it writes that file only every quarter of a minute. Rows that a kill took are put again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import signal
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.config.schema import Config, TrainerConfig, flatten
from echelon.errors import ExitCode
from echelon.runs.metrics_file import MetricsLine
from echelon.runs.run_folder import Run
from echelon.tracking import wandb_file, wandb_key
from echelon.tracking.background import PrintMessage, TrackerProgress, summarize_error
from echelon.tracking.media_records import find_image, is_histogram
from echelon.tracking.summary import shorten_path
from echelon.tracking.tracker import is_better, prefix_metric_names, select_axes
from echelon.utils.files import write_json_atomically

_INIT_TIMEOUT_S, _FINISH_TIMEOUT_S = 10.0, 15.0
"""WANDB_INIT_TIMEOUT and WANDB_FINISH_TIMEOUT say otherwise. The training runs on while a server is
waited for at the start; what it logs waits too."""
_DURABLE_AFTER_S = 30.0
_UNSENT_WARNING = (
    "not all of it reached its server; everything is in its files, and the last words of the run "
    "say how to send them"
)


def get_mode(config: Config, env: Mapping[str, str]) -> str:
    """Return wandb's mode: online, offline or disabled."""
    return config.track.wandb.mode or env.get("WANDB_MODE") or "online"


def get_timeouts_s(env: Mapping[str, str]) -> tuple[float, float]:
    """Return how long a server may take to answer at the start and to receive the rest at the
    end."""
    return _read_float_variable(env, "WANDB_INIT_TIMEOUT", _INIT_TIMEOUT_S), _read_float_variable(
        env, "WANDB_FINISH_TIMEOUT", _FINISH_TIMEOUT_S
    )


def _read_float_variable(env: Mapping[str, str], name: str, default: float) -> float:
    with contextlib.suppress(KeyError, ValueError):
        return float(env[name])
    return default


def ensure_run_id(config: Config, run: Run, env: Mapping[str, str]) -> str:
    """Return the id of wandb's run, made once. For a trial the sweep's server has made it."""
    known = run.read_wandb_id()
    if known is not None:
        return known
    letters = string.ascii_lowercase + string.digits
    given_id = config.track.wandb.id or env.get("WANDB_RUN_ID")
    new_id = given_id or "".join(secrets.choice(letters) for _ in range(8))
    write_json_atomically(run.wandb_file, {"id": new_id, "unsent": []})
    return new_id


def get_url_and_sync_rows(run: Run) -> dict[str, str]:
    """Return rows for the summary: the address of the run, and the command that sends what its
    server does not have."""
    state = _read_state(run)
    unsent = [f for name in state["unsent"] if _has_unsent_rows(f := run.folder / "wandb" / name)]
    rows = {"wandb": str(state["url"])} if state.get("url") else {}
    if unsent:
        rows["send it"] = "wandb sync " + " ".join(shlex.quote(shorten_path(f)) for f in unsent)
    return rows


def _has_unsent_rows(folder: Path) -> bool:
    """Return whether a folder has rows that were not sent. `wandb sync` marks what it has sent, and
    stops at a file that a kill left empty."""
    files = list(folder.glob("*.wandb"))
    return any(f.stat().st_size > wandb_file.HEADER_BYTES for f in files) and not any(
        folder.glob("*.synced")
    )


def kill_wandb_core() -> None:
    """Kill wandb-core, whatever it waits for, so that it is not waited for again when this
    process ends."""
    import psutil

    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.name() == "wandb-core":
                child.kill()
    with contextlib.suppress(Exception):
        import wandb

        wandb.teardown()


class WandbRun:
    """An open wandb run."""

    settles_s = _DURABLE_AFTER_S

    def __init__(
        self,
        config: Config,
        run: Run,
        past_lines: Sequence[MetricsLine],
        print_message: PrintMessage,
    ) -> None:
        self._run = run
        self._online = get_mode(config, os.environ) == "online"
        self._best = BestMetric(config.trainer, past_lines)
        self._wandb = _init_run_with_fallback(config, run, self._online, print_message)
        self._messages = _install_message_handler(print_message)
        self._online = not self._wandb.offline
        self._folder = Path(self._wandb.dir).parent.name
        self._last_folder = str(_read_state(run).get("last", ""))
        self._save_state(unsent=self._folder)
        self._wandb.define_metric("step")
        self._wandb.define_metric("*", step_metric="step")
        self._wandb.summary.update(self._best.to_summary())
        if self._online:
            print_message(f"wandb: {self._wandb.url}")

    def count_received_lines(self, progress: TrackerProgress) -> int:
        """Return how many lines of metrics.jsonl wandb has received.

        A server knows up to which row it received the last start, so no `wandb sync` is needed
        after a kill. Without a server, the rows in the file of that start are counted.
        """
        last = self._last_folder
        if self._online and not last.startswith("offline"):
            received_rows = int(self._wandb.step) - progress.first_row
            if last not in _read_state(self._run)["unsent"] or received_rows < 0:
                return progress.lines
            self._save_state(sent=last)
            return progress.first_line + received_rows
        files = list((self._run.folder / "wandb" / last).glob("*.wandb")) if last else []
        return progress.first_line + wandb_file.count_rows(files[0]) if files else progress.lines

    def put(self, line: MetricsLine, row: int) -> None:
        """Log a line.

        wandb numbers its rows, and drops a row whose number does not grow. Curves are drawn over
        our `step`, which goes back when a run resumes from a snapshot.
        """
        converted = {n: self._convert(value) for n, value in prefix_metric_names(line).items()}
        named = {name: value for name, value in converted.items() if value is not None}
        self._wandb.log(select_axes(line) | named, step=max(row, self._wandb.step))
        if self._best.update(line):
            self._wandb.summary.update(self._best.to_summary())

    def _convert(self, value: Any) -> Any:
        """Return an image or a histogram as wandb has it; anything else as it is."""
        import wandb

        if is_histogram(value):
            return wandb.Histogram(np_histogram=(value["counts"], value["bins"]))
        if not isinstance(value, dict):
            return value
        path = find_image(self._run, value)
        try:
            return wandb.Image(str(path)) if path is not None else None
        except Exception as error:  # it needs pillow
            self._messages.warn_once(f"an image was left out: {summarize_error(error)}")
            return None

    def flush(self) -> None:
        """Do nothing: wandb-core writes and sends by itself."""

    def close(self, outcome: ExitCode) -> None:
        """Finish the wandb run with the outcome of ours."""
        import wandb

        try:
            ended = outcome is ExitCode.PREEMPTED and self._run.cancel_file.exists()
            if outcome is ExitCode.PREEMPTED and not ended:
                self._wandb.mark_preempting()  # a sweep's server gives it to an agent again
            self._wandb.finish(exit_code=0 if ended else int(outcome))
            if self._online and not self._messages.has_unsent:
                self._save_state(sent=self._folder)
        except TimeoutError:
            self._messages.warn_once(_UNSENT_WARNING)
        finally:
            wandb.teardown()

    def _save_state(self, unsent: str = "", sent: str = "") -> None:
        state = _read_state(self._run)
        names = [name for name in (*state["unsent"], unsent) if name and name != sent]
        url = {"url": self._wandb.url} if self._online else {}
        write_json_atomically(
            self._run.wandb_file, state | url | {"unsent": names, "last": self._folder}
        )


def open_wandb(
    config: Config,
    run: Run,
    past_lines: Sequence[MetricsLine],
    progress: TrackerProgress,
    print_message: PrintMessage,
) -> tuple[WandbRun, Sequence[MetricsLine]]:
    """Return the open run and the lines it must be given."""
    wandb_run = WandbRun(config, run, past_lines, print_message)
    return wandb_run, past_lines[wandb_run.count_received_lines(progress) :]


def _init_run_with_fallback(
    config: Config, run: Run, online: bool, print_message: PrintMessage
) -> Any:
    """Return wandb's run object: online if its server answers, offline with a warning otherwise."""
    import wandb

    os.environ["WANDB_SILENT"] = "true"  # also before init; we print what matters ourselves
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    for of_an_agent in ("WANDB_SERVICE", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH"):
        # The agent may run on another host. What it gave is in `config` already.
        os.environ.pop(of_an_agent, None)
    reason = wandb_key.find_key_problem(os.environ) if online else None
    if online and reason is None:
        try:
            return _init_run(config, run, "online")
        except Exception as error:
            reason = _describe_refusal(error)
            wandb.teardown()  # otherwise it refuses to start the same id again
    if reason is not None:
        print_message(
            f"warning: wandb: {reason}; going on offline, the last words of the run say how to "
            "send its files"
        )
    return _init_run(config, run, "offline")


def _describe_refusal(error: Exception) -> str:
    """Return why wandb could not start online, as part of a sentence."""
    text = str(error)
    if "deadline exceeded" in text or "timed out" in text.lower():
        return f"no answer from its server within {get_timeouts_s(os.environ)[0]:g} s"
    if re.search(r"\b40[13]\b", text):
        return "its server does not accept the key (`wandb login` stores another)"
    return summarize_error(error)


def _init_run(config: Config, run: Run, mode: str) -> Any:
    import wandb

    given, env = config.track.wandb, os.environ
    sweep = given.sweep or ""
    entity, _, project = sweep.rpartition("/")[0].partition("/")
    init_s, finish_s = get_timeouts_s(env)
    settings = wandb.Settings(
        init_timeout=init_s,
        finish_timeout=finish_s,
        finish_timeout_raises=True,
        stop_fn=lambda: _handle_stop_button(run),
        silent=True,
        console="off",  # what is printed is in the run's logs
        disable_git=True,
        disable_code=True,
        x_disable_stats=True,  # a sampler beside the training, for this one process of many
        x_save_requirements=False,
        sweep_id=sweep.rpartition("/")[2] or None,
    )
    return wandb.init(
        mode=mode,  # type: ignore[arg-type]
        id=run.read_wandb_id(),
        resume="allow",
        dir=run.folder,
        project=project or given.project or env.get("WANDB_PROJECT") or "echelon",
        entity=entity or given.entity or env.get("WANDB_ENTITY"),
        group=given.group or env.get("WANDB_RUN_GROUP"),
        name=given.name or env.get("WANDB_NAME") or run.name,
        tags=given.tags or None,
        notes=given.notes or env.get("WANDB_NOTES"),
        config=_build_config(config),
        settings=settings,
    )


def _build_config(config: Config) -> dict[str, Any]:
    """Return the configuration for wandb. Settings that a sweep has chosen are repeated under the
    names by which the sweep's server reads them."""
    tree = config.to_dict()
    flat = flatten(tree)
    names = config.track.wandb.swept
    return tree | {name: flat.get(name, flat.get(f"experiment.{name}")) for name in names}


def _handle_stop_button(run: Run) -> None:
    """Handle the stop button of wandb's page: save, stop, and do not queue the run again."""
    # The file first: whoever handles the signal reads it to tell a cancellation from a preemption.
    run.cancel_file.touch()
    os.kill(os.getpid(), signal.SIGTERM)


def _read_state(run: Run) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return {"unsent": []} | dict(json.loads(run.wandb_file.read_text(encoding="utf-8")))
    return {"unsent": []}


def _install_message_handler(print_message: PrintMessage) -> _WandbMessages:
    """Return an object that receives what wandb would print."""
    import wandb

    messages = _WandbMessages(print_message)
    wandb.termsetup(wandb.Settings(silent=True), messages)
    return messages


class _WandbMessages:
    """Prints wandb's first warning as ours, and notes the one that says it has given up sending."""

    def __init__(self, print_message: PrintMessage) -> None:
        self._print_message = print_message
        self._has_warned = False
        self.has_unsent = False

    def info(self, text: str) -> None: ...

    def warning(self, text: str) -> None:
        gave_up = "wandb sync" in text or "Timed out" in text
        self.has_unsent = self.has_unsent or gave_up
        self.warn_once(
            _UNSENT_WARNING if gave_up else text.splitlines()[0].rpartition("WARNING ")[2]
        )

    def warn_once(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._print_message(f"warning: wandb: {text}")

    error = warning


class BestMetric:
    """The best value of a run so far, by what trainer.best asks for."""

    def __init__(self, trainer: TrainerConfig, past_lines: Sequence[MetricsLine]) -> None:
        self._name = trainer.best
        self._best_is = trainer.best_is
        self._line: MetricsLine | None = None
        for line in past_lines:
            self.update(line)

    def update(self, line: MetricsLine) -> bool:
        """Take a line into account, and return whether it is the new best."""
        key = f"eval_{self._name}"
        if key not in line:
            return False
        if not is_better(line[key], self._line[key] if self._line else None, self._best_is):
            return False
        self._line = line
        return True

    def to_summary(self) -> dict[str, float]:
        """Return the best value and its step by wandb's names; empty before the first
        evaluation."""
        if self._line is None:
            return {}
        return {
            f"best/{self._name}": self._line[f"eval_{self._name}"],
            "best/step": self._line["step"],
        }

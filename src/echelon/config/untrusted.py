"""Settings from untrusted sources: what a sweep file or a sweep server may set.

A person at the keyboard may decide where a run goes and which code it runs. Somebody who can write
to a sweep's server, or who wrote a sweep file, may not. They set plain values of the settings that
an experiment declares, the seed, and a few of the trainer's settings that change results.
Everything else is refused before anything is started. The rules do not depend on the engine that
searches.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.config.schema import Config
from echelon.config.validate import check_run_name
from echelon.errors import EchelonError, Fault, suggest_nearest
from echelon.utils.os_errors import format_os_error_reason

if TYPE_CHECKING:
    from echelon.config.compose import UserExperiment

MAX_BYTES = 64 * 1024
"""The size of all parameters of a trial together, as JSON or YAML."""
_MAX_PARAMETERS, _MAX_DEPTH, _MAX_TEXT_LENGTH, _MAX_LIST_ITEMS = 500, 6, 1000, 1000
"""Limits: number of parameters, levels of nesting, characters of a text, items of a list."""
_MAX_FAULTS_SHOWN = 20
PLAIN_VALUES_HINT = "give numbers, texts, true, false, null, or lists of these"
_USE_COMMAND_LINE_HINT = "set it on the command line, or in the sweep's command"

_ALLOWED_TRAINER_KEYS = (
    "accumulate",
    "batch_size",
    "clip",
    "epochs",
    "eval_batch_size",
    "evaluate",
    "schedule",
    "steps",
    "warmup_steps",
)
"""Those that change the results of a run, not where or how it runs."""
_KEY_PATTERN = re.compile(r"[A-Za-z]\w*(\.[A-Za-z0-9]\w*)*", re.ASCII)
"""Excludes `_target_`, `${…}` and everything else that has a meaning in an override."""


@dataclass(frozen=True)
class WandbTrial:
    """One run of a sweep on wandb's server."""

    sweep: str
    """ENTITY/PROJECT/SWEEP; a part that wandb fills in by default may be empty."""
    id: str
    """The id of the run on the server."""
    parameters: Mapping[str, Any]
    """The parameters, named and nested as on the server."""
    values: Mapping[str, Any]
    """The same parameters by the dotted keys of settings."""

    def to_json(self) -> str:
        """Return what rank 0 sends to the other ranks; `parse_wandb_trial` reads it."""
        return json.dumps({"sweep": self.sweep, "id": self.id, "given": self.parameters})

    @property
    def run_name(self) -> str:
        """The run's name; the same at every start of the trial, so that it resumes."""
        return f"{self.sweep.rpartition('/')[2]}-{self.id}"


def make_wandb_trial(sweep: str, id: str, given: Mapping[str, Any]) -> WandbTrial:
    """Return the trial after checking its ids, keys, values and size."""
    faults = [*_check_ids({"sweep": sweep.rpartition("/")[2], "run": id})]
    if faults:
        raise EchelonError(*faults)
    result = WandbTrial(sweep, id, given, check_values(given))
    _require_small(len(result.to_json()), "the set of the sweep's parameters")
    return result


def parse_wandb_trial(text: str) -> WandbTrial:
    """Return the trial that `to_json` wrote, checked again."""
    _require_small(len(text), "the trial that rank 0 sent")
    return make_wandb_trial(**json.loads(text))


def read_wandb_trial(env: Mapping[str, str]) -> WandbTrial | None:
    """Return the trial that `wandb agent` started this process for, or None."""
    sweep, file = env.get("WANDB_SWEEP_ID"), env.get("WANDB_SWEEP_PARAM_PATH")
    if not sweep or not file:
        return None
    path = "/".join((env.get("WANDB_ENTITY", ""), env.get("WANDB_PROJECT", ""), sweep))
    return make_wandb_trial(path, env.get("WANDB_RUN_ID", ""), _read_parameters(Path(file)))


def drop_trial_arguments(words: Sequence[str], trial: WandbTrial | None) -> list[str]:
    """Return the arguments of a command without those that `wandb agent` has added.

    The agent appends the parameters as text: `--lr=0.1`, `lr=0.1`, `++lr=0.1`, `--lr 0.1`, or
    `--flag` alone. They are dropped because its parameter file has them too, with their types.
    """
    kept_words: list[str] = []
    parameters = trial.parameters if trial else {}
    value_follows: str | None = None
    for word in words:
        if word == value_follows:
            value_follows = None
            continue
        flag, equals, _ = word.partition("=")
        name = flag.removeprefix("--") if flag.startswith("--") else flag.lstrip("+")
        is_parameter = name in parameters and bool(equals or flag.startswith("--"))
        value_follows = str(parameters[name]) if is_parameter and not equals else None
        if not is_parameter:
            kept_words.append(word)
    return kept_words


def apply_trial(
    config: Config, trial: WandbTrial | None, user_experiment: UserExperiment | None
) -> Config:
    """Return the configuration with the parameters of a trial in it, tracked as that trial."""
    if trial is None:
        return config
    from echelon.config.compose import apply_values

    config = apply_values(config, trial.values, user_experiment)
    tracked = dataclasses.replace(
        config.track.wandb, use=True, sweep=trial.sweep, id=trial.id, swept=list(trial.values)
    )
    return dataclasses.replace(
        config,
        track=dataclasses.replace(config.track, wandb=tracked),
        run=dataclasses.replace(config.run, name=config.run.name or trial.run_name),
    )


# --- reading ------------------------------------------------------------------------------------


def _read_parameters(path: Path) -> dict[str, Any]:
    """Return the parameters in the file that `wandb agent` wrote."""
    import yaml

    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise EchelonError(
            Fault(
                f"WANDB_SWEEP_PARAM_PATH={path} cannot be read: {format_os_error_reason(error)}",
                "set WANDB_DIR to a folder that every process of the trial sees, before "
                "`wandb agent` is started",
            )
        ) from None
    _require_small(len(text), str(path))
    try:
        tree = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        tree.pop("wandb_version", None)
        return {name: entry["value"] for name, entry in tree.items()}
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
        reason_lines = str(error).splitlines()
        raise EchelonError(
            Fault(
                f"{path} has no parameters of a sweep: "
                f"{reason_lines[0] if reason_lines else error!r}",
                "let `wandb agent` write it",
            )
        ) from None


def _require_small(size: int, what: str) -> None:
    """Raise if something is larger than MAX_BYTES."""
    if size > MAX_BYTES:
        raise EchelonError(
            Fault(
                f"{what} is larger than {MAX_BYTES // 1024} KiB, but the parameters of a trial are "
                "a few numbers",
                "check the parameters of the sweep on the server",
            )
        )


def _check_ids(ids: Mapping[str, str]) -> Iterator[Fault]:
    """Yield a fault for each id that is unsafe: ids become part of a folder name and of a URL."""
    for what, name in ids.items():
        if check_run_name(name):
            yield Fault(
                f"{name[:100]!r} is not the id of a {what} on wandb's server",
                "check the sweep there",
            )


# --- checking -----------------------------------------------------------------------------------


def check_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by dotted key, or raise if a key or a value is not allowed."""
    leaves = list(itertools.islice(_iter_leaves(given, "", 1), _MAX_PARAMETERS + 1))
    if len(leaves) > _MAX_PARAMETERS:
        raise EchelonError(
            Fault(
                f"the sweep sets more than {_MAX_PARAMETERS} values", "sweep over fewer parameters"
            )
        )
    found = (_check_key(key) or _check_value(key, value) for key, value in leaves)
    faults = [fault for fault in found if fault is not None]
    if faults:
        raise EchelonError(*faults[:_MAX_FAULTS_SHOWN])
    return dict(leaves)


def _iter_leaves(tree: Mapping[Any, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield each value by its dotted key.

    Lazily, because a YAML file with references can expand to more than fits into memory.
    """
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if (
            isinstance(value, Mapping)
            and value
            and depth < _MAX_DEPTH
            and _KEY_PATTERN.fullmatch(key)
        ):
            yield from _iter_leaves(value, f"{key}.", depth + 1)
        else:
            yield key, value


def _check_key(key: str) -> Fault | None:
    """Return the fault of a key that may not be set."""
    label = key if len(key) <= 100 else key[:99] + "…"
    if not _KEY_PATTERN.fullmatch(key) or len(key) > _MAX_TEXT_LENGTH:
        return Fault(
            f"the sweep sets {label!r}, which is not the name of a setting",
            "name a setting of the experiment, or one of trainer's",
        )
    top, _, rest = key.partition(".")
    if top == "trainer" and rest.partition(".")[0] not in _ALLOWED_TRAINER_KEYS:
        return Fault(
            f"the sweep sets {label}, which it may not",
            f"{_USE_COMMAND_LINE_HINT}; of trainer's, "
            f"{suggest_nearest(rest, _ALLOWED_TRAINER_KEYS)}",
        )
    reserved = {f.name for f in dataclasses.fields(Config)} - {"experiment", "trainer", "seed"}
    if top in reserved or key in ("experiment", "entry", "experiment.entry"):
        return Fault(
            f"the sweep sets {label}, which it may not: that controls where or what is run",
            _USE_COMMAND_LINE_HINT,
        )
    return None


def _check_value(key: str, value: Any) -> Fault | None:
    """Return the fault of a value that is not plain data."""
    problem = describe_unsafe_value(value)
    return Fault(f"the sweep sets {key} to {problem}", PLAIN_VALUES_HINT) if problem else None


def describe_unsafe_value(value: Any) -> str:
    """Return why a value may not become a setting, beginning with the value; empty if it may."""
    problem = _find_problem(value)
    if problem is None and isinstance(value, list):
        problem = next(filter(None, map(_find_item_problem, value)), None)
        problem = (
            f"a list of more than {_MAX_LIST_ITEMS} items"
            if len(value) > _MAX_LIST_ITEMS
            else problem
        )
    if problem is None:
        return ""
    text = (
        repr(value[:100] if isinstance(value, str) else value) if _is_short_to_print(value) else ""
    )
    label = text if len(text) <= 60 else text[:59] + "…"
    return f"{label or type(value).__name__}: {problem}"


def _is_short_to_print(value: Any) -> bool:
    """Return whether the value may be written out: an integer of millions of digits may not."""
    return isinstance(value, (str, float)) or (isinstance(value, int) and abs(value) < 2**200)


def _find_item_problem(value: Any) -> str | None:
    """Return why a value may not be an item of a list."""
    return "a list in a list" if isinstance(value, list) else _find_problem(value)


def _find_problem(value: Any) -> str | None:
    """Return why a value may not become a setting, or None if it may."""
    match value:
        case None | bool() | list():
            return None
        case str() if "${" in value:
            return "an interpolation, but values must be plain data"
        case str() if value == "???":
            return "the marker of a missing value"
        case str() if len(value) > _MAX_TEXT_LENGTH:
            return f"a text of {len(value):,} characters"
        case str() if not all(c.isprintable() or c in "\t\n" for c in value):
            return "characters that are not text"
        case int() if abs(value) >= 2**63:
            return "too large a number"
        case float() if not math.isfinite(value):
            return "not a finite number"
        case str() | int() | float():
            return None
    return "not a plain value"

"""Settings from outside: what a sweep, its file or its server, may set, and how it looks.

A person at the keyboard may say where a run goes and which code it runs. Whoever can write to a
sweep's server, or hands a sweep's file on, may not: it sets plain values of what an experiment
declares, a few of the trainer's settings that decide numbers, and the seed. Everything else is
refused before anything is started, and the same file means the same whoever searches.
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
from echelon.utils.os_errors import describe_os_error

if TYPE_CHECKING:
    from echelon.config.compose import UserExperiment

MAX_BYTES = 64 * 1024
"""Bytes of all parameters of a trial together, in any form."""
_MAX_PARAMETERS, _MAX_DEPTH, _MAX_TEXT_LENGTH, _MAX_LIST_ITEMS = 500, 6, 1000, 1000
"""Parameters, levels of nesting, characters of a text, items of a list."""
_MAX_FAULTS_SHOWN = 20
PLAIN_VALUES_HINT = "give numbers, texts, true, false, null, or lists of these"
_USE_COMMAND_LINE_HINT = "say it on the command line, or in the sweep's command"

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
_KEY_PATTERN = re.compile(r"[A-Za-z]\w*(\.[A-Za-z0-9]\w*)*", re.ASCII)
"""No `_target_`, no `${…}`, nothing that means something in an override."""


@dataclass(frozen=True)
class WandbTrial:
    """One run of a sweep on wandb's server."""

    sweep: str
    """ENTITY/PROJECT/SWEEP; what is wandb's own default may be empty."""
    id: str
    """Of its run there."""
    parameters: Mapping[str, Any]
    """Its parameters as the server names and nests them."""
    values: Mapping[str, Any]
    """The same by the dotted names of settings."""

    def to_json(self) -> str:
        return json.dumps({"sweep": self.sweep, "id": self.id, "given": self.parameters})

    @property
    def run_name(self) -> str:
        """The same whenever the trial is started, so that it goes on where it was."""
        return f"{self.sweep.rpartition('/')[2]}-{self.id}"


def make_trial(sweep: str, id: str, given: Mapping[str, Any]) -> WandbTrial:
    """Checked, however it came here."""
    faults = [*_check_ids({"sweep": sweep.rpartition("/")[2], "run": id})]
    if faults:
        raise EchelonError(*faults)
    result = WandbTrial(sweep, id, given, check_values(given))
    _require_small(len(result.to_json()), "what the sweep sets")
    return result


def parse_trial(text: str) -> WandbTrial:
    _require_small(len(text), "what rank 0 tells of its trial")
    return make_trial(**json.loads(text))


def read_trial(env: Mapping[str, str]) -> WandbTrial | None:
    """The trial that `wandb agent` started this process for."""
    sweep, file = env.get("WANDB_SWEEP_ID"), env.get("WANDB_SWEEP_PARAM_PATH")
    if not sweep or not file:
        return None
    path = "/".join((env.get("WANDB_ENTITY", ""), env.get("WANDB_PROJECT", ""), sweep))
    return make_trial(path, env.get("WANDB_RUN_ID", ""), _read_parameters(Path(file)))


def drop_trial_arguments(words: Sequence[str], trial: WandbTrial | None) -> list[str]:
    """The words of a command that its writer wrote.

    An agent fills the parameters into the command as text: `--lr=0.1`, `lr=0.1`, `++lr=0.1`,
    `--lr 0.1`, or `--flag` alone. The same are in its file, with their types; those are taken.
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
    """The configuration with a trial's parameters in it, tracked as that trial."""
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
    import yaml

    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise EchelonError(
            Fault(
                f"WANDB_SWEEP_PARAM_PATH={path} cannot be read: {describe_os_error(error)}",
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
                f"{path} holds no parameters of a sweep: {reason_lines[0] if reason_lines else error!r}",
                "let `wandb agent` write it",
            )
        ) from None


def _require_small(size: int, what: str) -> None:
    if size > MAX_BYTES:
        raise EchelonError(
            Fault(
                f"{what} is larger than {MAX_BYTES // 1024} KiB, and the parameters of a trial are "
                "a few numbers",
                "look at what the sweep on the server sets",
            )
        )


def _check_ids(ids: Mapping[str, str]) -> Iterator[Fault]:
    """They become a folder and part of an address."""
    for what, name in ids.items():
        if check_run_name(name):
            yield Fault(
                f"{name[:100]!r} is no id of a {what} on wandb's server", "look at the sweep there"
            )


# --- checking -----------------------------------------------------------------------------------


def check_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values by the dotted names of settings that may be set from outside."""
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
    """Lazy: a file with references in it can mean more than fits anywhere."""
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
    label = key if len(key) <= 100 else key[:99] + "…"
    if not _KEY_PATTERN.fullmatch(key) or len(key) > _MAX_TEXT_LENGTH:
        return Fault(
            f"the sweep sets {label!r}, which is no name of a setting",
            "name a setting of the experiment, or one of trainer's",
        )
    top, _, rest = key.partition(".")
    if top == "trainer" and rest.partition(".")[0] not in _ALLOWED_TRAINER_KEYS:
        return Fault(
            f"the sweep sets {label}, which it may not",
            f"{_USE_COMMAND_LINE_HINT}; of trainer's, {suggest_nearest(rest, _ALLOWED_TRAINER_KEYS)}",
        )
    reserved = {f.name for f in dataclasses.fields(Config)} - {"experiment", "trainer", "seed"}
    if top in reserved or key in ("experiment", "entry", "experiment.entry"):
        return Fault(
            f"the sweep sets {label}, which it may not: that decides where or what is run",
            _USE_COMMAND_LINE_HINT,
        )
    return None


def _check_value(key: str, value: Any) -> Fault | None:
    problem = describe_unsafe_value(value)
    return Fault(f"the sweep sets {key} to {problem}", PLAIN_VALUES_HINT) if problem else None


def describe_unsafe_value(value: Any) -> str:
    """What a value is, and why it may not become a setting; "" when it may."""
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
    text = repr(value[:100] if isinstance(value, str) else value) if _is_printable(value) else ""
    label = text if len(text) <= 60 else text[:59] + "…"
    return f"{label or type(value).__name__}: {problem}"


def _is_printable(value: Any) -> bool:
    """Whether it may be written out: an integer of millions of digits may not."""
    return isinstance(value, (str, float)) or (isinstance(value, int) and abs(value) < 2**200)


def _find_item_problem(value: Any) -> str | None:
    return "a list in a list" if isinstance(value, list) else _find_problem(value)


def _find_problem(value: Any) -> str | None:
    match value:
        case None | bool() | list():
            return None
        case str() if "${" in value:
            return "an interpolation, and values are plain data"
        case str() if value == "???":
            return "a mark for a missing value"
        case str() if len(value) > _MAX_TEXT_LENGTH:
            return f"a text of {len(value):,} characters"
        case str() if not all(c.isprintable() or c in "\t\n" for c in value):
            return "characters that are no text"
        case int() if abs(value) >= 2**63:
            return "too large a number"
        case float() if not math.isfinite(value):
            return "not a finite number"
        case str() | int() | float():
            return None
    return "no plain value"

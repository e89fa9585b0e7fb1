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

from echelon.config.check import name_fault
from echelon.config.schema import Config
from echelon.errors import EchelonError, Fault, nearest
from echelon.utils.os_errors import describe_os_error

if TYPE_CHECKING:
    from echelon.config.compose import OwnExperiment

LARGEST = 64 * 1024
"""Bytes of all parameters of a trial together, in any form."""
_MOST, _DEEPEST, _LONGEST, _ITEMS = 500, 6, 1000, 1000
"""Parameters, levels of nesting, characters of a text, items of a list."""
_SHOWN_FAULTS = 20
PLAIN = "give numbers, texts, true, false, null, or lists of these"
_SAY = "say it on the command line, or in the sweep's command"

_TRAINER = (
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
_KEY = re.compile(r"[A-Za-z]\w*(\.[A-Za-z0-9]\w*)*", re.ASCII)
"""No `_target_`, no `${…}`, nothing that means something in an override."""


@dataclass(frozen=True)
class Trial:
    """One run of a sweep on wandb's server."""

    sweep: str
    """ENTITY/PROJECT/SWEEP; what is wandb's own default may be empty."""
    id: str
    """Of its run there."""
    given: Mapping[str, Any]
    """Its parameters as the server names and nests them."""
    values: Mapping[str, Any]
    """The same by the dotted names of settings."""

    def to_json(self) -> str:
        return json.dumps({"sweep": self.sweep, "id": self.id, "given": self.given})

    @property
    def run_name(self) -> str:
        """The same whenever the trial is started, so that it goes on where it was."""
        return f"{self.sweep.rpartition('/')[2]}-{self.id}"


def trial(sweep: str, id: str, given: Mapping[str, Any]) -> Trial:
    """Checked, however it came here."""
    faults = [*_id_faults({"sweep": sweep.rpartition("/")[2], "run": id})]
    if faults:
        raise EchelonError(*faults)
    made = Trial(sweep, id, given, values_of(given))
    _require_small(len(made.to_json()), "what the sweep sets")
    return made


def from_json(text: str) -> Trial:
    _require_small(len(text), "what rank 0 tells of its trial")
    return trial(**json.loads(text))


def trial_of(env: Mapping[str, str]) -> Trial | None:
    """The trial that `wandb agent` started this process for."""
    sweep, file = env.get("WANDB_SWEEP_ID"), env.get("WANDB_SWEEP_PARAM_PATH")
    if not sweep or not file:
        return None
    path = "/".join((env.get("WANDB_ENTITY", ""), env.get("WANDB_PROJECT", ""), sweep))
    return trial(path, env.get("WANDB_RUN_ID", ""), _read(Path(file)))


def own_words(words: Sequence[str], told: Trial | None) -> list[str]:
    """The words of a command that its writer wrote.

    An agent fills the parameters into the command as text: `--lr=0.1`, `lr=0.1`, `++lr=0.1`,
    `--lr 0.1`, or `--flag` alone. The same are in its file, with their types; those are taken.
    """
    own: list[str] = []
    given = told.given if told else {}
    value_follows: str | None = None
    for word in words:
        if word == value_follows:
            value_follows = None
            continue
        flag, equals, _ = word.partition("=")
        name = flag.removeprefix("--") if flag.startswith("--") else flag.lstrip("+")
        named = name in given and bool(equals or flag.startswith("--"))
        value_follows = str(given[name]) if named and not equals else None
        if not named:
            own.append(word)
    return own


def as_trial(config: Config, told: Trial | None, own: OwnExperiment | None) -> Config:
    """The configuration with a trial's parameters in it, tracked as that trial."""
    if told is None:
        return config
    from echelon.config.compose import with_values

    config = with_values(config, told.values, own)
    tracked = dataclasses.replace(
        config.track.wandb, use=True, sweep=told.sweep, id=told.id, swept=list(told.values)
    )
    return dataclasses.replace(
        config,
        track=dataclasses.replace(config.track, wandb=tracked),
        run=dataclasses.replace(config.run, name=config.run.name or told.run_name),
    )


# --- reading ------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
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
        said = str(error).splitlines()
        raise EchelonError(
            Fault(
                f"{path} holds no parameters of a sweep: {said[0] if said else error!r}",
                "let `wandb agent` write it",
            )
        ) from None


def _require_small(size: int, what: str) -> None:
    if size > LARGEST:
        raise EchelonError(
            Fault(
                f"{what} is larger than {LARGEST // 1024} KiB, and the parameters of a trial are "
                "a few numbers",
                "look at what the sweep on the server sets",
            )
        )


def _id_faults(ids: Mapping[str, str]) -> Iterator[Fault]:
    """They become a folder and part of an address."""
    for what, name in ids.items():
        if name_fault(name):
            yield Fault(
                f"{name[:100]!r} is no id of a {what} on wandb's server", "look at the sweep there"
            )


# --- checking -----------------------------------------------------------------------------------


def values_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values by the dotted names of settings that may be set from outside."""
    leaves = list(itertools.islice(_leaves(given, "", 1), _MOST + 1))
    if len(leaves) > _MOST:
        raise EchelonError(
            Fault(f"the sweep sets more than {_MOST} values", "sweep over fewer parameters")
        )
    found = (_name_fault(key) or _value_fault(key, value) for key, value in leaves)
    faults = [fault for fault in found if fault is not None]
    if faults:
        raise EchelonError(*faults[:_SHOWN_FAULTS])
    return dict(leaves)


def _leaves(tree: Mapping[Any, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Lazy: a file with references in it can mean more than fits anywhere."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and depth < _DEEPEST and _KEY.fullmatch(key):
            yield from _leaves(value, f"{key}.", depth + 1)
        else:
            yield key, value


def _name_fault(key: str) -> Fault | None:
    shown = key if len(key) <= 100 else key[:99] + "…"
    if not _KEY.fullmatch(key) or len(key) > _LONGEST:
        return Fault(
            f"the sweep sets {shown!r}, which is no name of a setting",
            "name a setting of the experiment, or one of trainer's",
        )
    top, _, rest = key.partition(".")
    if top == "trainer" and rest.partition(".")[0] not in _TRAINER:
        return Fault(
            f"the sweep sets {shown}, which it may not",
            f"{_SAY}; of trainer's, {nearest(rest, _TRAINER)}",
        )
    ours = {f.name for f in dataclasses.fields(Config)} - {"experiment", "trainer", "seed"}
    if top in ours or key in ("experiment", "entry", "experiment.entry"):
        return Fault(
            f"the sweep sets {shown}, which it may not: that decides where or what is run",
            _SAY,
        )
    return None


def _value_fault(key: str, value: Any) -> Fault | None:
    wrong = not_plain(value)
    return Fault(f"the sweep sets {key} to {wrong}", PLAIN) if wrong else None


def not_plain(value: Any) -> str:
    """What a value is, and why it may not become a setting; "" when it may."""
    wrong = _wrong(value)
    if wrong is None and isinstance(value, list):
        wrong = next(filter(None, map(_wrong_item, value)), None)
        wrong = f"a list of more than {_ITEMS} items" if len(value) > _ITEMS else wrong
    if wrong is None:
        return ""
    text = repr(value[:100] if isinstance(value, str) else value) if _is_short(value) else ""
    shown = text if len(text) <= 60 else text[:59] + "…"
    return f"{shown or type(value).__name__}: {wrong}"


def _is_short(value: Any) -> bool:
    """Whether it may be written out: an integer of millions of digits may not."""
    return isinstance(value, (str, float)) or (isinstance(value, int) and abs(value) < 2**200)


def _wrong_item(value: Any) -> str | None:
    return "a list in a list" if isinstance(value, list) else _wrong(value)


def _wrong(value: Any) -> str | None:
    match value:
        case None | bool() | list():
            return None
        case str() if "${" in value:
            return "an interpolation, and values are plain data"
        case str() if value == "???":
            return "a mark for a missing value"
        case str() if len(value) > _LONGEST:
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

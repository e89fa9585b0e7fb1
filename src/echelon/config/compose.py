"""Composes the configuration from files and overrides, and reports all faults together.

Hydra parses the overrides and composes the config groups. Values are checked afterwards, all
together, by `given_values.convert_config`, because Hydra stops at the first mistake.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from echelon.config.bundled_experiments import read_names_by_entry
from echelon.config.defaults_files import NO_DEFAULTS, FileDefaults
from echelon.config.given_values import (
    SECTIONS,
    ExperimentSettings,
    GivenValues,
    convert_config,
    expand_path,
    iter_leaves,
)
from echelon.config.hydra_files import BUNDLED_CONF_DIR, compose_groups
from echelon.config.plain_words import quote_plain_word
from echelon.config.scalar_types import SettingPath, format_value
from echelon.config.schema import Config
from echelon.config.settings_classes import read_settings_class
from echelon.config.validate import find_faults
from echelon.errors import EchelonError, Fault, suggest_nearest

GROUPS = ("experiment", "launch", "trainer", "track")
_LISTS_OF_ONE = (("notify", "to"), ("notify", "events"), ("notify", "mail", "to"))
"""Lists of which a single word may be typed: notify=mail."""


@dataclass(frozen=True)
class UserExperiment:
    """An experiment in a user's file: where it is and which settings it declares."""

    entry: str
    """FILE.py:FUNCTION."""
    settings: type | None
    """The class that declares its settings: a dataclass, a NamedTuple or a TypedDict."""
    names: frozenset[str] | None = None
    """Without a class: the settings that its code may read; None if that is not known, and any may
    be given."""
    has_exact_names: bool = False
    """Whether `names` are all settings of its code, rather than all words that could be one."""


def compose(
    overrides: Sequence[str],
    user_experiment: UserExperiment | None = None,
    conf_dir: Path | None = None,
    program: Sequence[str] = (),
    defaults: FileDefaults = NO_DEFAULTS,
) -> Config:
    """Compose the configuration of a new run.

    `conf_dir` is a user's folder of config groups, searched before the bundled one. `program` is
    the command of `echelon run`, `defaults` are those of `echelon.yaml` files. Returns a frozen
    Config, or raises one EchelonError with every fault.
    """
    faults = _find_name_clashes(user_experiment)
    # 1. Overrides that choose a file of a group (launch=slurm) come first: Hydra composes them.
    parsed = list(_parse_overrides(overrides, faults))
    folders = [d for d in (conf_dir, BUNDLED_CONF_DIR) if d is not None]
    groups = _select_group_overrides(parsed, folders, faults)
    if user_experiment is not None:
        groups.setdefault("experiment", "experiment=own")
    tree = compose_groups(groups, conf_dir, faults)
    # 2. What the files say; a bundled experiment declares its settings by what its file says.
    given = GivenValues()
    settings = _declare_experiment(user_experiment, tree)
    interpolated = _add_files(given, tree)
    # 3. User defaults go below what was typed.
    kind = str(given.get_value("launch", "kind") or Config().launch.kind)
    for key, default in defaults.select_for_launcher(kind).items():
        given.set_value(tuple(key.split(".")), default.value, f"{default.location}: {key}")
    # 4. What was typed, and only then a check, so that every fault is found.
    for override in parsed:
        if override.key_or_group not in groups:
            _add_override(given, override, faults)
    _resolve_interpolations(given, interpolated, settings, faults)
    return _validate(convert_config(given, settings, faults), faults, program)


def recompose(
    config: Config,
    overrides: Sequence[str],
    name: str | None,
    folder: Path,
    user_experiment: UserExperiment | None = None,
) -> Config:
    """Return the configuration of an existing run with a few values changed; it stays in its
    folder. Without a name it is that of a new run beside it.

    Without the `user_experiment`, a setting of the experiment may only be one that the run has.
    """
    faults: list[Fault] = []
    given, settings = _start_from_config(config, user_experiment)
    given.set_value(("run",), {"name": name, "dir": str(folder)})
    for key in ("rank", "world_size", "master", "program"):
        given.remove(key)
    given.remove("launch", "after")  # it was of the job that was queued then
    parsed = list(_parse_overrides(overrides, faults))
    groups = _select_group_overrides(parsed, [BUNDLED_CONF_DIR], faults)
    if groups.pop("experiment", None):
        faults.append(Fault("a run cannot change its experiment", "start a new run: echelon train"))
    tree = compose_groups(groups, None, faults) if groups else {}
    for group in groups:
        given.remove(group)
        for path, value in iter_leaves({group: tree[group]}):
            given.set_value(path, value, f"{'.'.join(path)} of {groups[group]}")
    for override in parsed:
        if override.key_or_group not in GROUPS:
            _add_override(given, override, faults)
    return _validate(convert_config(given, settings, faults), faults, config.program)


def apply_values(
    config: Config, values: Mapping[str, Any], user_experiment: UserExperiment | None
) -> Config:
    """Return the configuration with values from an untrusted source, checked against what is
    declared.

    `user_experiment` is given if the experiment is not a bundled one.
    """
    faults: list[Fault] = []
    given, settings = _start_from_config(config, user_experiment)
    for key, value in values.items():
        given.set_value(tuple(key.split(".")), value, f"{key}={format_value(value)}")
    composed = convert_config(given, settings, faults, accepts_whole_floats=True)
    return _validate(composed, faults, config.program)


def _start_from_config(
    config: Config, user_experiment: UserExperiment | None
) -> tuple[GivenValues, ExperimentSettings]:
    """Return the values of a configuration, and what may be set of its experiment."""
    given = GivenValues()
    for section, value in config.to_dict().items():
        given.set_value((section,), value)
    entry = config.experiment.get("entry")
    if user_experiment is None and entry in read_names_by_entry():
        settings = _infer_settings(config.experiment)
    elif user_experiment is None:
        settings = ExperimentSettings(entry, None, config.experiment_settings.keys())
    elif user_experiment.settings is not None:
        settings = ExperimentSettings(entry, user_experiment.settings)
    else:
        settings = _extend_names(user_experiment, config.experiment_settings)
    return given, settings


def _validate(config: Config, faults: list[Fault], program: Sequence[str] = ()) -> Config:
    """Return the frozen configuration, or raise all faults: those so far and those of
    `find_faults`."""
    if program:
        config = dataclasses.replace(config, program=list(program), experiment={})
    faults.extend(find_faults(config))
    if faults:
        raise EchelonError(*dict.fromkeys(faults))
    return config


# --- what the experiment declares ---


def _find_name_clashes(user_experiment: UserExperiment | None) -> list[Fault]:
    """Return a fault for each setting of an experiment that has the name of one of ours."""
    if user_experiment is None:
        return []
    if user_experiment.settings is not None:
        record = read_settings_class(user_experiment.settings)
        names, declares = list(record.fields), f"{record.name} declares"
    else:
        names = sorted(user_experiment.names or ()) if user_experiment.has_exact_names else []
        declares = f"{user_experiment.entry.rpartition(':')[2]} reads"
    return [
        Fault(
            f"{declares} a setting {name!r}, but {name} is a setting of Echelon, which "
            f"{name}=VALUE would set instead",
            f"rename yours, for example to {'data_seed' if name == 'seed' else f'my_{name}'}",
        )
        for name in names
        if name in (*SECTIONS, "entry")
    ]


def _declare_experiment(
    user_experiment: UserExperiment | None, tree: dict[str, Any]
) -> ExperimentSettings:
    """Return what may be set of the experiment. The file of a bundled one leaves `tree`."""
    if user_experiment is None:
        return _infer_settings(tree.pop("experiment", None) or {})
    if user_experiment.settings is not None:
        return ExperimentSettings(user_experiment.entry, user_experiment.settings)
    return _extend_names(user_experiment, tree.get("experiment") or {})


def _extend_names(user_experiment: UserExperiment, values: Mapping[str, Any]) -> ExperimentSettings:
    """Return the settings that an experiment without a class reads, and those that it has."""
    names = user_experiment.names
    known = None if names is None else names | {str(name) for name in values}
    return ExperimentSettings(user_experiment.entry, None, known)


def _infer_settings(values: Mapping[str, Any]) -> ExperimentSettings:
    """Return the settings of a bundled experiment, whose file declares types by its values:
    `lr: 0.1` is a number."""
    fields = [
        (
            str(name),
            _infer_hint(value),
            dataclasses.field(default_factory=functools.partial(copy.deepcopy, value)),
        )
        for name, value in values.items()
        if name != "entry"
    ]
    return ExperimentSettings(values.get("entry"), dataclasses.make_dataclass("Settings", fields))


def _infer_hint(value: Any) -> Any:
    if isinstance(value, list):
        return list[Any]
    return type(value) if isinstance(value, (bool, int, float, str)) else Any


# --- overrides ---


def _parse_overrides(overrides: Sequence[str], faults: list[Fault]) -> Iterator[Override]:
    """Yield the overrides that can be parsed, and add a fault for each of the others."""
    parser = OverridesParser.create()
    for text in overrides:
        try:
            override = parser.parse_override(quote_plain_word(text))
        except HydraException as error:
            faults.append(_make_syntax_fault(text, str(error).splitlines()[0]))
            continue
        if not override.key_or_group:
            faults.append(Fault(f"{text!r} is not an override: it has no key", "write KEY=VALUE"))
        elif override.is_sweep_override():
            faults.append(
                Fault(
                    f"{text!r} has several values, but one run has one",
                    "give a single value",
                )
            )
        elif "${" in text:  # it could copy a secret into files that others can read
            faults.append(
                Fault(
                    f"{text!r} is an interpolation, but values must be plain data",
                    "write the value",
                )
            )
        else:
            yield override


def _make_syntax_fault(text: str, reason: str) -> Fault:
    key = text.partition("=")[0]
    if not key.isascii():
        return Fault(
            f"{text!r}: the name of a setting has letters from a to z, and {key!r} has others",
            "rename the setting",
        )
    return Fault(
        f"{text!r} is not an override: {reason}",
        "write KEY=VALUE, and quote special characters: 'KEY=\"a b\"'",
    )


def _add_override(given: GivenValues, override: Override, faults: list[Fault]) -> None:
    """Add one override of a single value to the values."""
    key = override.key_or_group
    if override.is_delete():
        faults.append(Fault(f"~{key} deletes a setting", f"set it to null: {key}=null"))
        return
    value = override.value()
    path = tuple(key.split("."))
    if path == ("notify",):  # notify=[mail,slack] is short for its only setting that is often typed
        path = ("notify", "to")
    if path in _LISTS_OF_ONE and not isinstance(value, list):
        value = [] if value in (None, "none") else [value]
    given.set_value(path, value, f"{key}={format_value(value)}")
    if override.is_add() and expand_path(path)[0] == "experiment":
        given.added_names.add(expand_path(path)[1])


def _select_group_overrides(
    parsed: Sequence[Override], folders: Sequence[Path], faults: list[Fault]
) -> dict[str, str]:
    """Return the overrides that choose a file of a config group, checked against the files there
    are. One that chooses no file of a user's group is empty: the file's own choice stands."""
    known = {p.name for f in folders for p in f.iterdir() if p.is_dir() and p.name[0] not in "._"}
    chosen: dict[str, str] = {}
    for override in parsed:
        group = override.key_or_group
        if group not in known:
            continue
        options = {p.stem for f in folders for p in (f / group).glob("*.yaml")}
        value = override.value()
        names = value if isinstance(value, list) else [value]
        wrong = [str(name) for name in names if str(name) not in options]
        faults += [
            Fault(f"{group}={name}: there is no such {group}", suggest_nearest(name, options))
            for name in wrong[:1]
        ]
        chosen[group] = _FALLBACK_OPTIONS.get(group, "") if wrong else override.input_line or ""
    return chosen


_FALLBACK_OPTIONS = {
    "experiment": "experiment=own",
    "launch": "launch=inline",
    "trainer": "trainer=default",
    "track": "track=[wandb,tensorboard]",
}
"""Valid choices in place of wrong ones, so that the remaining faults are found too."""


# --- files ---


def _add_files(given: GivenValues, tree: Mapping[str, Any]) -> list[SettingPath]:
    """Add the values of the files, and return the paths of those that are interpolations."""
    interpolated = []
    for path, value in iter_leaves(tree):
        if value in ({}, "???"):  # "???" is OmegaConf's mark of a value that is still to be given
            continue
        given.set_value(path, value, f"{'.'.join(path)} in the configuration files")
        if "${" in str(value):
            interpolated.append(expand_path(path))
    return interpolated


def _resolve_interpolations(
    given: GivenValues,
    paths: Sequence[SettingPath],
    settings: ExperimentSettings,
    faults: list[Fault],
) -> None:
    """Replace the interpolations of files, such as ${trainer.epochs}, by what they refer to.

    They may refer to any setting, so all others are converted first.
    """
    raw = {path: given.get_value(*path) for path in paths}
    raw = {path: value for path, value in raw.items() if "${" in str(value)}
    if not raw:
        return
    others = GivenValues()
    others.added_names = given.added_names
    for path, value in given.iter_leaves():
        if path not in raw:
            others.set_value(path, value)
    tree: Any = OmegaConf.create(convert_config(others, settings, []).to_dict())
    for path, value in raw.items():
        OmegaConf.update(tree, ".".join(path), value, force_add=True)
    for path in raw:
        _, label = given.find_label(path)
        try:
            value = functools.reduce(operator.getitem, path, tree)
            is_node = OmegaConf.is_config(value)
            value = OmegaConf.to_container(value, resolve=True) if is_node else value
            given.set_value(path, value, label)
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            faults.append(Fault(f"{label}: {reason}", "write the value, or fix the interpolation"))
            given.remove(*path)

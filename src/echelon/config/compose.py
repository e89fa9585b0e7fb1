"""Composes the configuration from files and overrides, and reports all faults together.

Hydra parses the overrides and composes the config groups. Each single value is then applied on its
own, because Hydra stops at the first mistake.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, IntegerNode, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from echelon.config.defaults_files import NO_DEFAULTS, FileDefaults
from echelon.config.schema import Config, build_config, flatten
from echelon.config.validate import find_faults
from echelon.errors import EchelonError, Fault, suggest_nearest

GROUPS = ("experiment", "launch", "trainer", "track")
BUNDLED_CONF_DIR = Path(__file__).parent.parent / "conf"


@dataclass(frozen=True)
class UserExperiment:
    """An experiment in a user's file: where it is and which settings it declares."""

    entry: str
    """FILE.py:FUNCTION."""
    settings: Mapping[str, Any] | type | None
    """A dataclass or a mapping of defaults; None if the experiment accepts any setting."""


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
    faults: list[Fault] = []
    # 1. Overrides that choose a file of a group (launch=slurm) come first: Hydra composes them.
    parsed = list(_parse_overrides(overrides, faults))
    folders = [d for d in (conf_dir, BUNDLED_CONF_DIR) if d is not None]
    groups = _select_group_overrides(parsed, folders, faults)
    if user_experiment is not None:
        groups.setdefault("experiment", "experiment=own")
    tree = _compose_groups(list(groups.values()), conf_dir, faults)
    # 2. From here on types are checked. User defaults go below what was typed.
    base = _merge_files_into_schema(tree, user_experiment, faults)
    for key, default in defaults.select_for_launcher(base.launch.kind).items():
        _set_value(base, key, default.value, f"{default.location}: {key}", faults, free=False)
    # 3. Single values, each on its own, so that every fault is found.
    for override in parsed:
        if override.key_or_group not in groups:
            _apply_override(
                base,
                override,
                free=user_experiment is not None and user_experiment.settings is None,
                faults=faults,
            )
    return _validate(base, faults, program)


def recompose(config: Config, overrides: Sequence[str], name: str, folder: Path) -> Config:
    """Return the configuration of an existing run with a few values changed; it stays in its
    folder."""
    faults: list[Fault] = []
    base = _create_schema_tree(dict(config.experiment))
    unchanged = ("experiment", "rank", "program")
    values = {k: v for k, v in config.to_dict().items() if k not in unchanged}
    values["run"] = {"name": name, "dir": str(folder)}
    values["world_size"] = values["master"] = None
    base.merge_with(values)
    parsed = list(_parse_overrides(overrides, faults))
    groups = _select_group_overrides(parsed, [BUNDLED_CONF_DIR], faults)
    if groups.pop("experiment", None):
        faults.append(Fault("a run cannot change its experiment", "start a new run: echelon train"))
    tree = _compose_groups(list(groups.values()), None, faults) if groups else {}
    for group in groups:
        base[group] = _create_schema_tree({})[group]
        for key, value in flatten({group: OmegaConf.to_container(tree[group])}).items():
            _set_value(base, key, value, f"{key} of {groups[group]}", faults, free=False)
    for override in parsed:
        if override.key_or_group not in GROUPS:
            _apply_override(base, override, free=False, faults=faults)
    return _validate(base, faults, config.program)


def apply_values(
    config: Config, values: Mapping[str, Any], user_experiment: UserExperiment | None
) -> Config:
    """Return the configuration with values from an untrusted source, checked against what is
    declared.

    `user_experiment` is given if the experiment is not a bundled one.
    """
    faults: list[Fault] = []
    declared = user_experiment.settings if user_experiment is not None else None
    settings = (
        _create_typed_nodes(OmegaConf.create(config.experiment))
        if declared is None
        else OmegaConf.structured(declared)
    )
    base = _create_schema_tree(settings)
    base.merge_with(config.to_dict())
    for key, value in values.items():
        label = f"{key}={_format_value(value)}"
        free = user_experiment is not None and declared is None
        _set_value(base, key, _coerce_whole_float(base, key, value), label, faults, free)
    return _validate(base, faults, config.program)


def _coerce_whole_float(base: DictConfig, key: str, value: Any) -> Any:
    """Return 8 for 8.0 if the setting is an integer: sweep engines produce floats."""
    parent, _, name = (key if key.partition(".")[0] in base else f"experiment.{key}").rpartition(
        "."
    )
    within = OmegaConf.select(base, parent) if parent else base
    node = within._get_node(name) if isinstance(within, DictConfig) else None
    whole = isinstance(node, IntegerNode) and isinstance(value, float) and value.is_integer()
    return int(value) if whole else value


def _validate(base: DictConfig, faults: list[Fault], program: Sequence[str] = ()) -> Config:
    """Return the frozen configuration, or raise all faults: those so far and those of
    `find_faults`."""
    config = _build_frozen_config(base, faults)
    if program:  # set here, so that OmegaConf does not resolve ${...} in a user's command
        config = dataclasses.replace(config, program=list(program), experiment={})
    faults.extend(find_faults(config))
    if faults:
        raise EchelonError(*dict.fromkeys(faults))
    return config


def _parse_overrides(overrides: Sequence[str], faults: list[Fault]) -> Iterator[Override]:
    """Yield the overrides that can be parsed, and add a fault for each of the others."""
    parser = OverridesParser.create()
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            faults.append(
                Fault(
                    f"{text!r} is not an override: {str(error).splitlines()[0]}",
                    "write KEY=VALUE, and quote special characters: 'KEY=\"a b\"'",
                )
            )
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


def _select_group_overrides(
    parsed: Sequence[Override], folders: Sequence[Path], faults: list[Fault]
) -> dict[str, str]:
    """Return the overrides that choose a file of a config group, checked against the files there
    are."""
    known = {p.name for f in folders for p in f.iterdir() if p.is_dir() and p.name[0] not in "._"}
    chosen: dict[str, str] = {}
    for override in parsed:
        group = override.key_or_group
        if group not in known:
            continue
        options = {p.stem for f in folders for p in (f / group).glob("*.yaml")}
        value = override.value()
        for name in value if isinstance(value, list) else [value]:
            if str(name) not in options:
                faults.append(
                    Fault(
                        f"{group}={name}: there is no such {group}",
                        suggest_nearest(str(name), options),
                    )
                )
                break
        else:
            chosen[group] = override.input_line or ""
            continue
        chosen[group] = ""
    return {group: text for group, text in chosen.items() if text} | {
        group: f"{group}={_get_fallback_option(group)}"
        for group, text in chosen.items()
        if not text
    }


def _get_fallback_option(group: str) -> str:
    """Return a valid choice in place of a wrong one, so that the remaining faults are found too."""
    fallback = {
        "experiment": "own",
        "launch": "inline",
        "trainer": "default",
        "track": "[wandb,tensorboard]",
    }
    return fallback.get(group, "null")


def _compose_groups(overrides: list[str], conf_dir: Path | None, faults: list[Fault]) -> DictConfig:
    """Return what Hydra composes from the chosen files, or raise with the reason."""
    try:
        composed = _run_hydra(tuple(overrides), conf_dir).copy()
    except (HydraException, OmegaConfBaseException) as error:
        location = (conf_dir / "config.yaml") if conf_dir else BUNDLED_CONF_DIR
        raise EchelonError(
            *faults,
            Fault(
                f"{location} does not compose: {error}", "fix that file, or the override it names"
            ),
        ) from error
    OmegaConf.set_struct(composed, False)
    return composed


@functools.cache  # a thousand runs of one command differ in single values only
def _run_hydra(overrides: tuple[str, ...], conf_dir: Path | None) -> DictConfig:
    """Call Hydra's compose. Cached, because a thousand runs of one multirun differ only in single
    values."""
    primary = "config" if conf_dir and (conf_dir / "config.yaml").exists() else "echelon"
    search = ("hydra.searchpath=[pkg://echelon.conf]",) if conf_dir else ()
    with _isolate_hydra(conf_dir or BUNDLED_CONF_DIR):
        return hydra_compose(primary, [*search, *overrides])


@contextlib.contextmanager
def _isolate_hydra(folder: Path) -> Iterator[None]:
    """Initialise Hydra for a folder, and restore its global state afterwards for a caller who uses
    Hydra too."""
    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = before


def _merge_files_into_schema(
    tree: DictConfig, user_experiment: UserExperiment | None, faults: list[Fault]
) -> DictConfig:
    """Return the schema as an OmegaConf tree with the values of the files in it."""
    if user_experiment is None:
        settings = _create_typed_nodes(tree.pop("experiment", None) or {})
    else:
        settings = (
            OmegaConf.structured(user_experiment.settings)
            if user_experiment.settings is not None
            else {}
        )
    base = _create_schema_tree(settings)
    if user_experiment is not None:
        base.experiment.entry = user_experiment.entry
    free = user_experiment is not None and user_experiment.settings is None
    for key, value in _flatten_node(tree).items():
        _set_value(base, key, value, f"{key} in the configuration files", faults, free)
    return base


def _create_schema_tree(settings: Any) -> DictConfig:
    """Return the schema as an OmegaConf tree in which `experiment` holds typed settings."""
    open_config = dataclasses.make_dataclass(
        "OpenConfig", [("experiment", Any, None)], bases=(Config,), frozen=True
    )
    base: DictConfig = OmegaConf.structured(open_config)
    _unlock(base)
    base.experiment = settings
    _unlock(base)
    return base


def _unlock(node: DictConfig) -> None:
    """Make a tree writable.

    Frozen dataclasses become read-only nodes. Whether an undeclared key may be added to an
    experiment is decided by `_set_value`, not by OmegaConf's struct flag.
    """
    OmegaConf.set_readonly(node, False)
    OmegaConf.set_struct(node, False)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            _unlock(child)


def _create_typed_nodes(settings: Mapping[str, Any]) -> DictConfig:
    """Return settings as typed nodes: a YAML file declares types by its values, so `lr: 0.1` is a
    float."""
    fields: list[Any] = [
        (str(k), type(v) if isinstance(v, (bool, int, float, str)) else Any, v)
        for k, v in settings.items()
        if not isinstance(v, (DictConfig, ListConfig))
    ]
    node: DictConfig = OmegaConf.structured(dataclasses.make_dataclass("Settings", fields))
    _unlock(node)
    node.merge_with({k: v for k, v in settings.items() if k not in node})
    return node


def _flatten_node(tree: DictConfig) -> dict[str, Any]:
    """Return every value by its dotted key, with interpolations as they are written."""
    plain = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(plain, dict)
    return flatten({str(key): value for key, value in plain.items()})


def _apply_override(base: DictConfig, override: Override, free: bool, faults: list[Fault]) -> None:
    """Apply one override of a single value."""
    key = override.key_or_group
    if override.is_delete():
        faults.append(Fault(f"~{key} deletes a setting", f"set it to null: {key}=null"))
        return
    value = override.value()
    _set_value(
        base, key, value, f"{key}={_format_value(value)}", faults, free=free or override.is_add()
    )


def _format_value(value: Any) -> str:
    """Return a value as it would be typed."""
    return "null" if value is None else str(value).lower() if value in (True, False) else str(value)


def _set_value(
    base: DictConfig, key: str, value: Any, label: str, faults: list[Fault], free: bool
) -> None:
    """Set one value, or add a fault that begins with `label`.

    `free` allows keys that the experiment does not declare.
    """
    known = _flatten_node(base).keys()
    top = key.partition(".")[0]
    if top not in base:  # `lr=0.1` is short for `experiment.lr=0.1`
        key = f"experiment.{key}"
    inside_experiment = key.startswith("experiment.")
    if key not in known and not (inside_experiment and free) and not _is_inside_mapping(base, key):
        names = {k.removeprefix("experiment.") for k in known} - {"entry"}
        hint = suggest_nearest(key.removeprefix("experiment."), names)
        faults.append(Fault(f"{label}: there is no such setting", hint))
        return
    flag = isinstance(OmegaConf.select(base, key), bool)
    if flag and isinstance(value, (int, float)) and value not in (0, 1):  # OmegaConf: any is true
        faults.append(Fault(f"{label}: not true or false", f"write {key}=true or {key}=false"))
        return
    try:
        OmegaConf.update(base, key, value, merge=True, force_add=inside_experiment)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        hint = f"give a value of that kind; the default is {_format_default(base, key)}"
        if reason.endswith("Integer") and isinstance(value, float) and value.is_integer():
            hint = f"write {key}={value:.0f}"
        if OmegaConf.is_list(OmegaConf.select(base, key)):
            reason, hint = "not a list", f"write '{key}=[{'' if value is None else value}]'"
        faults.append(Fault(f"{label}: {reason}", hint))


def _is_inside_mapping(base: DictConfig, key: str) -> bool:
    """Return whether the key is inside a mapping that an experiment declares; such a mapping may
    have any keys."""
    parent = key.rpartition(".")[0]
    if not parent.startswith("experiment."):
        return False
    return isinstance(OmegaConf.select(base, parent), DictConfig)


def _format_default(base: DictConfig, key: str) -> str:
    return _format_value(OmegaConf.select(base, key))


def _build_frozen_config(base: DictConfig, faults: list[Fault]) -> Config:
    """Return the tree as a frozen Config."""
    try:
        plain = OmegaConf.to_container(base, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        raise EchelonError(
            *faults,
            Fault(f"{key} has no value: {str(error).splitlines()[0]}", f"give one: {key}=VALUE"),
        ) from error
    assert isinstance(plain, dict)
    return build_config({str(k): v for k, v in plain.items()})

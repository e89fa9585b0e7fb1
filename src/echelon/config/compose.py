"""Compose a configuration once from files and overrides, and report every fault together.

Hydra parses the overrides and composes the groups; each single value is then applied on its own,
because Hydra stops at the first mistake and a person would rather hear of all of them.
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

from echelon.config.check import faults_of
from echelon.config.defaults import NONE, Defaults
from echelon.config.schema import Config, build, flatten
from echelon.errors import EchelonError, Fault, nearest

GROUPS = ("experiment", "launch", "trainer", "track")
OUR_FILES = Path(__file__).parent.parent / "conf"


@dataclass(frozen=True)
class OwnExperiment:
    """An experiment of the user's: where it is and which settings it declares."""

    entry: str
    """FILE.py:FUNCTION."""
    declared: Mapping[str, Any] | type | None
    """A dataclass or a mapping of defaults; None: any setting is taken."""


def compose(
    overrides: Sequence[str],
    own: OwnExperiment | None = None,
    conf_dir: Path | None = None,
    program: Sequence[str] = (),
    defaults: Defaults = NONE,
) -> Config:
    """The frozen configuration, or one EchelonError with every fault."""
    faults: list[Fault] = []
    parsed = list(_parse(overrides, faults))
    folders = [d for d in (conf_dir, OUR_FILES) if d is not None]
    groups = _split_groups(parsed, folders, faults)
    if own is not None:
        groups.setdefault("experiment", "experiment=own")
    tree = _compose_groups(list(groups.values()), conf_dir, faults)
    base = _typed(tree, own, faults)
    for key, default in defaults.for_launcher(base.launch.kind).items():
        _set(base, key, default.value, f"{default.where}: {key}", faults, free=False)
    for override in parsed:
        if override.key_or_group not in groups:
            _apply(base, override, free=own is not None and own.declared is None, faults=faults)
    return _checked(base, faults, program)


def recompose(config: Config, overrides: Sequence[str], name: str, folder: Path) -> Config:
    """The configuration of an old run with a few values changed, still in its folder."""
    faults: list[Fault] = []
    base = _open_config(dict(config.experiment))
    kept = ("experiment", "rank", "program")
    ours = {k: v for k, v in config.to_dict().items() if k not in kept}
    ours["run"] = {"name": name, "dir": str(folder)}
    ours["world_size"] = ours["master"] = None
    base.merge_with(ours)
    parsed = list(_parse(overrides, faults))
    groups = _split_groups(parsed, [OUR_FILES], faults)
    if groups.pop("experiment", None):
        faults.append(Fault("a run keeps its experiment", "start a new run: echelon train"))
    tree = _compose_groups(list(groups.values()), None, faults) if groups else {}
    for group in groups:
        base[group] = _open_config({})[group]
        for key, value in flatten({group: OmegaConf.to_container(tree[group])}).items():
            _set(base, key, value, f"{key} of {groups[group]}", faults, free=False)
    for override in parsed:
        if override.key_or_group not in GROUPS:
            _apply(base, override, free=False, faults=faults)
    return _checked(base, faults, config.program)


def with_values(config: Config, values: Mapping[str, Any], own: OwnExperiment | None) -> Config:
    """The same with a few values from outside in it, held to what is declared; `own` where the
    experiment is not one of ours."""
    faults: list[Fault] = []
    declared = own.declared if own is not None else None
    settings = (
        _nodes_typed_by_value(OmegaConf.create(config.experiment))
        if declared is None
        else OmegaConf.structured(declared)
    )
    base = _open_config(settings)
    base.merge_with(config.to_dict())
    for key, value in values.items():
        shown = f"{key}={_shown(value)}"
        free = own is not None and declared is None
        _set(base, key, _whole(base, key, value), shown, faults, free)
    return _checked(base, faults, config.program)


def _whole(base: DictConfig, key: str, value: Any) -> Any:
    """A sweep's steps of 8.0 are meant for an integer as well."""
    parent, _, name = (key if key.partition(".")[0] in base else f"experiment.{key}").rpartition(
        "."
    )
    within = OmegaConf.select(base, parent) if parent else base
    node = within._get_node(name) if isinstance(within, DictConfig) else None
    whole = isinstance(node, IntegerNode) and isinstance(value, float) and value.is_integer()
    return int(value) if whole else value


def _checked(base: DictConfig, faults: list[Fault], program: Sequence[str] = ()) -> Config:
    config = _freeze(base, faults)
    if program:  # its words are its own: nothing in them is ours to resolve
        config = dataclasses.replace(config, program=list(program), experiment={})
    faults.extend(faults_of(config))
    if faults:
        raise EchelonError(*dict.fromkeys(faults))
    return config


def _parse(overrides: Sequence[str], faults: list[Fault]) -> Iterator[Override]:
    parser = OverridesParser.create()
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            faults.append(
                Fault(
                    f"{text!r} is no override: {str(error).splitlines()[0]}",
                    "write KEY=VALUE, with quotes around what is special: 'KEY=\"a b\"'",
                )
            )
            continue
        if not override.key_or_group:
            faults.append(Fault(f"{text!r} is no override: it names no key", "write KEY=VALUE"))
        elif override.is_sweep_override():
            faults.append(
                Fault(f"{text!r} names several values, and one run has one", "give a single value")
            )
        elif "${" in text:  # it would be resolved into files that others read: a secret, say
            faults.append(
                Fault(f"{text!r} is an interpolation, and values are plain data", "write the value")
            )
        else:
            yield override


def _split_groups(
    parsed: Sequence[Override], folders: Sequence[Path], faults: list[Fault]
) -> dict[str, str]:
    """The overrides that choose a file of a group, checked against the files that are there."""
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
                    Fault(f"{group}={name}: there is no such {group}", nearest(str(name), options))
                )
                break
        else:
            chosen[group] = override.input_line or ""
            continue
        chosen[group] = ""
    return {group: text for group, text in chosen.items() if text} | {
        group: f"{group}={_fallback(group)}" for group, text in chosen.items() if not text
    }


def _fallback(group: str) -> str:
    """Something valid to go on with, so that the remaining faults are found too."""
    fallback = {
        "experiment": "own",
        "launch": "inline",
        "trainer": "default",
        "track": "[wandb,tensorboard]",
    }
    return fallback.get(group, "null")


def _compose_groups(overrides: list[str], conf_dir: Path | None, faults: list[Fault]) -> DictConfig:
    try:
        composed = _composed(tuple(overrides), conf_dir).copy()
    except (HydraException, OmegaConfBaseException) as error:
        where = (conf_dir / "config.yaml") if conf_dir else OUR_FILES
        raise EchelonError(
            *faults,
            Fault(f"{where} does not compose: {error}", "mend that file, or the override it names"),
        ) from error
    OmegaConf.set_struct(composed, False)
    return composed


@functools.cache  # a thousand runs of one command differ in single values only
def _composed(overrides: tuple[str, ...], conf_dir: Path | None) -> DictConfig:
    primary = "config" if conf_dir and (conf_dir / "config.yaml").exists() else "echelon"
    search = ("hydra.searchpath=[pkg://echelon.conf]",) if conf_dir else ()
    with _hydra(conf_dir or OUR_FILES):
        return hydra_compose(primary, [*search, *overrides])


@contextlib.contextmanager
def _hydra(folder: Path) -> Iterator[None]:
    """Hydra keeps global state; a caller who uses Hydra too must find its own again."""
    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = before


def _typed(tree: DictConfig, own: OwnExperiment | None, faults: list[Fault]) -> DictConfig:
    """The schema with the files' values in it: types are checked from here on."""
    if own is None:
        settings = _nodes_typed_by_value(tree.pop("experiment", None) or {})
    else:
        settings = OmegaConf.structured(own.declared) if own.declared is not None else {}
    base = _open_config(settings)
    if own is not None:
        base.experiment.entry = own.entry
    free = own is not None and own.declared is None
    for key, value in _leaves(tree).items():
        _set(base, key, value, f"{key} in the configuration files", faults, free)
    return base


def _open_config(settings: Any) -> DictConfig:
    """The schema, with an experiment's settings where Config has a plain mapping."""
    open_config = dataclasses.make_dataclass(
        "OpenConfig", [("experiment", Any, None)], bases=(Config,), frozen=True
    )
    base: DictConfig = OmegaConf.structured(open_config)
    _thaw(base)
    base.experiment = settings
    _thaw(base)
    return base


def _thaw(node: DictConfig) -> None:
    """Frozen dataclasses become read-only nodes, and adding an undeclared key to an experiment is
    decided by us, not by OmegaConf."""
    OmegaConf.set_readonly(node, False)
    OmegaConf.set_struct(node, False)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            _thaw(child)


def _nodes_typed_by_value(settings: Mapping[str, Any]) -> DictConfig:
    """A yaml file declares types by its values: `lr: 0.1` is a float and stays one."""
    fields: list[Any] = [
        (str(k), type(v) if isinstance(v, (bool, int, float, str)) else Any, v)
        for k, v in settings.items()
        if not isinstance(v, (DictConfig, ListConfig))
    ]
    node: DictConfig = OmegaConf.structured(dataclasses.make_dataclass("Settings", fields))
    _thaw(node)
    node.merge_with({k: v for k, v in settings.items() if k not in node})
    return node


def _leaves(tree: DictConfig) -> dict[str, Any]:
    """Every value by its dotted key, interpolations as they are written."""
    plain = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(plain, dict)
    return flatten({str(key): value for key, value in plain.items()})


def _apply(base: DictConfig, override: Override, free: bool, faults: list[Fault]) -> None:
    key = override.key_or_group
    if override.is_delete():
        faults.append(Fault(f"~{key} deletes a setting", f"set it to null: {key}=null"))
        return
    value = override.value()
    _set(base, key, value, f"{key}={_shown(value)}", faults, free=free or override.is_add())


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if value in (True, False) else str(value)


def _set(
    base: DictConfig, key: str, value: Any, shown: str, faults: list[Fault], free: bool
) -> None:
    known = _leaves(base).keys()
    top = key.partition(".")[0]
    if top not in base:  # `lr=0.1` is short for `experiment.lr=0.1`
        key = f"experiment.{key}"
    inside_experiment = key.startswith("experiment.")
    if key not in known and not (inside_experiment and free) and not _inside_mapping(base, key):
        names = {k.removeprefix("experiment.") for k in known} - {"entry"}
        hint = nearest(key.removeprefix("experiment."), names)
        faults.append(Fault(f"{shown}: there is no such setting", hint))
        return
    flag = isinstance(OmegaConf.select(base, key), bool)
    if flag and isinstance(value, (int, float)) and value not in (0, 1):  # OmegaConf: any is true
        faults.append(Fault(f"{shown}: not true or false", f"write {key}=true or {key}=false"))
        return
    try:
        OmegaConf.update(base, key, value, merge=True, force_add=inside_experiment)
    except OmegaConfBaseException as error:
        found = str(error).splitlines()[0]
        hint = f"give a value of that kind; the default is {_default_of(base, key)}"
        if found.endswith("Integer") and isinstance(value, float) and value.is_integer():
            hint = f"write {key}={value:.0f}"
        if OmegaConf.is_list(OmegaConf.select(base, key)):
            found, hint = "not a list", f"write '{key}=[{'' if value is None else value}]'"
        faults.append(Fault(f"{shown}: {found}", hint))


def _inside_mapping(base: DictConfig, key: str) -> bool:
    """Whether the key lies in a mapping that an experiment declared, whose keys are its own."""
    parent = key.rpartition(".")[0]
    if not parent.startswith("experiment."):
        return False
    return isinstance(OmegaConf.select(base, parent), DictConfig)


def _default_of(base: DictConfig, key: str) -> str:
    return _shown(OmegaConf.select(base, key))


def _freeze(base: DictConfig, faults: list[Fault]) -> Config:
    try:
        plain = OmegaConf.to_container(base, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        raise EchelonError(
            *faults,
            Fault(f"{key} has no value: {str(error).splitlines()[0]}", f"give one: {key}=VALUE"),
        ) from error
    assert isinstance(plain, dict)
    return build({str(k): v for k, v in plain.items()})

"""Config groups, composed by Hydra from the bundled files and a user's, and what can be wrong with
them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from echelon.errors import EchelonError, Fault, suggest_nearest

BUNDLED_CONF_DIR = Path(__file__).parent.parent / "conf"


def compose_groups(
    groups: Mapping[str, str], conf_dir: Path | None, faults: list[Fault]
) -> dict[str, Any]:
    """Return what Hydra composes from the chosen files as plain data, or raise with the reason.

    Interpolations are left as they are written.
    """
    try:
        composed = _run_hydra(tuple(filter(None, groups.values())), conf_dir)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise EchelonError(*faults, _explain_hydra_error(error, groups, conf_dir)) from None
    plain = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _explain_hydra_error(
    error: Exception, groups: Mapping[str, str], conf_dir: Path | None
) -> Fault:
    """Return a fault that says what is wrong with a user's files, or with what was chosen."""
    file = (conf_dir or BUNDLED_CONF_DIR) / "config.yaml"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        where = f"{error.problem_mark.name}:{error.problem_mark.line + 1}"
        return Fault(f"{where} cannot be read: {error.problem}", "fix that line")
    if conf_dir and not _has_defaults_line(file):
        return Fault(
            f"{file} has no line `defaults`, so Echelon's own settings are not in it",
            "begin it with:  defaults: [echelon, _self_]",
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        name = error.missing_cfg_file
        near = f"; {suggest_nearest(str(name), error.options)}" if error.options else ""
        return Fault(
            f"{file} names {name} in its defaults, but there is no such file",
            f"write {file.parent / name}.yaml, or choose another{near}",
        )
    for group, text in groups.items():
        if f"Could not override '{group}'" in str(error):
            return Fault(
                f"{text}: {file} does not list {group} in its defaults",
                f"add `- {group}: {text.partition('=')[2]}` there, or type +{text}",
            )
    reason = " ".join(str(error).split())
    return Fault(f"{file} does not compose: {reason}", "fix that file, or the override it names")


def _has_defaults_line(file: Path) -> bool:
    tree = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    return isinstance(tree, dict) and "defaults" in tree


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

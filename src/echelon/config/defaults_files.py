"""Defaults of a user and of a project, from `echelon.yaml` files; overrides take precedence.

Values of text settings are read as text, because YAML parses 4:00:00 as a number of seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import stat
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from echelon.config.schema import LaunchConfig, NotifyConfig
from echelon.config.validate import SEVERAL_NODES_KEYS, find_unused_keys
from echelon.errors import EchelonError, Fault, suggest_nearest
from echelon.utils.os_errors import format_os_error_reason

FILE_NAME = "echelon.yaml"
"""The same name in a project's folder and in the user's configuration folder."""
_VARIABLES = {"wandb.entity": "WANDB_ENTITY", "wandb.project": "WANDB_PROJECT"}
"""Settings of wandb, by the environment variable that carries each to it."""
_SHORT_KEYS = {"secrets": "launch.secrets", "notify": "notify.to"}
"""Shorter names for the same settings."""
GPU_HOUR_PRICE = "cost.gpu_hour_price"
"""What an hour of a GPU costs, for `echelon cost`: a number, perhaps with a currency behind it."""
_SECRET_NAME = re.compile(r"key|token|passw|secret|credential", re.IGNORECASE)
"""Names of settings that suggest a secret."""
_TOKEN = r"(wandb_v1_|sk-|gh[ps]_|hf_)[A-Za-z0-9_-]{16,}"
_SECRET_VALUE = re.compile(rf"[0-9a-fA-F]{{32,}}|{_TOKEN}")


class DefaultValue(NamedTuple):
    """A value and where it was read."""

    value: Any
    location: str
    """FILE:LINE."""


@dataclass(frozen=True)
class FileDefaults:
    """The defaults of all files together; a project's take precedence over a user's."""

    launch: Mapping[str, DefaultValue]
    """Settings of the launcher, by their dotted keys."""
    variables: Mapping[str, str]
    """Environment variables, to be set unless they are set already."""
    others: Mapping[str, DefaultValue] = field(default_factory=dict)
    """News and prices, by their dotted keys."""

    def select_for_launcher(self, kind: str) -> dict[str, DefaultValue]:
        """Return the defaults without those that only other launchers read.

        Typed by hand they would be a mistake; as a default of all runs they are not.
        """
        other = set(find_unused_keys(kind))
        if kind == "inline":
            other |= {"procs", "max_restarts"}
        if kind in ("inline", "local"):
            other |= set(SEVERAL_NODES_KEYS)
        kept = {k: v for k, v in self.launch.items() if k.split(".")[1] not in other}
        news = {k: v for k, v in self.others.items() if k.startswith("notify.")}
        if kind == "slurm" and (to := news.get("notify.to")):  # jobs have no desktop
            news["notify.to"] = to._replace(value=[c for c in to.value if c != "desktop"])
        return kept | news


NO_DEFAULTS = FileDefaults({}, {})


def load_defaults(env: Mapping[str, str], folders: Sequence[Path]) -> FileDefaults:
    """Read the user's file and those in the folders; raise one EchelonError with all faults."""
    launch: dict[str, DefaultValue] = {}
    variables: dict[str, str] = {}
    others: dict[str, DefaultValue] = {}
    faults: list[Fault] = []
    for file in find_files(env, folders):
        for key, value in _read_file(file, faults):
            if key in _VARIABLES:
                variables[_VARIABLES[key]] = str(value.value)
            else:
                key = _SHORT_KEYS.get(key, key)
                (launch if key.startswith("launch.") else others)[key] = value
    if secrets_file := launch.get("launch.secrets"):
        folder = Path(secrets_file.location.rpartition(":")[0]).parent
        path = folder / Path(str(secrets_file.value)).expanduser()
        launch["launch.secrets"] = secrets_file._replace(value=str(path))
    if faults:
        raise EchelonError(*faults)
    return FileDefaults(launch, variables, others)


def find_files(env: Mapping[str, str], folders: Sequence[Path]) -> list[Path]:
    """Return the files that exist, the one of highest precedence last."""
    candidates = [folder / FILE_NAME for folder in (find_user_folder(env), *folders)]
    return list(dict.fromkeys(path.absolute() for path in candidates if path.is_file()))


def find_user_folder(env: Mapping[str, str]) -> Path:
    """Return the folder of the user's own file."""
    home = env.get("XDG_CONFIG_HOME") or os.path.join(env.get("HOME", "~"), ".config")
    return Path(home) / "echelon"


def _read_file(file: Path, faults: list[Fault]) -> Iterator[tuple[str, DefaultValue]]:
    """Yield the settings of a file, and add a fault for each line that is wrong."""
    import yaml

    try:
        tree = yaml.compose(file.read_text(encoding="utf-8"), yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark else str(file)
        why = getattr(error, "problem", None) or str(error)
        faults.append(Fault(f"{where} cannot be read: {why}", "fix that line"))
        return
    if tree is None:
        return
    if not isinstance(tree, yaml.MappingNode):
        faults.append(
            Fault(f"{file} is not a mapping of settings", "write lines such as partition: gpu")
        )
        return
    for key, node in _iter_leaves(tree, ""):
        where = f"{file}:{node.start_mark.line + 1}"
        if (fault := _check_entry(key, node, where)) is not None:
            faults.append(fault)
        else:
            yield key, DefaultValue(_parse_value(key, node), where)


def _list_known_keys() -> set[str]:
    """Return the settings that may have a default."""
    return {*_read_types(), *_VARIABLES, *_SHORT_KEYS, GPU_HOUR_PRICE} - {"launch.kind"}


@functools.cache
def _read_types() -> dict[str, str]:
    """Return the settings that are fields of the schema, and their types as texts."""
    return {**_list_types("launch", LaunchConfig), **_list_types("notify", NotifyConfig)}


def _list_types(prefix: str, section: Any) -> dict[str, str]:
    types: dict[str, str] = {}
    for name, hint in typing.get_type_hints(section).items():
        key = f"{prefix}.{name}"
        types |= _list_types(key, hint) if dataclasses.is_dataclass(hint) else {key: str(hint)}
    return types


def _iter_leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield each value of a YAML tree by its dotted key."""
    import yaml

    if not isinstance(node, yaml.MappingNode):
        yield prefix.rstrip("."), node
        return
    for key, value in node.value:
        yield from _iter_leaves(value, f"{prefix}{key.value}.")


def _check_entry(key: str, node: Any, location: str) -> Fault | None:
    """Return the fault of one setting: a secret, an unknown key, or a mapping where a value
    belongs."""
    import yaml

    texts = [n.value for n in (node.value if isinstance(node, yaml.SequenceNode) else [node])]
    has_secret_value = any(isinstance(t, str) and _SECRET_VALUE.search(t) for t in texts)
    has_secret_name = key not in _list_known_keys() and _SECRET_NAME.search(key.rpartition(".")[2])
    if has_secret_value or has_secret_name:
        return Fault(
            f"{location}: {key or 'a value'} looks like a secret, but others may read this file",
            "put it into a file of KEY=VALUE lines with mode 0600, and set secrets: PATH",
        )
    if key not in _list_known_keys():
        return Fault(
            f"{location}: there is no default {key!r}", suggest_nearest(key, _list_known_keys())
        )
    if isinstance(node, yaml.MappingNode):
        return Fault(f"{location}: {key} is not a section", f"write {key}: VALUE")
    return None


def _parse_value(key: str, node: Any) -> Any:
    """Return the value as the schema declares it; texts and lists of texts stay as written."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        return [str(item.value) for item in node.value]
    key = _SHORT_KEYS.get(key, key)
    hint = _read_types().get(key, "str")
    if key.startswith("notify.") and "list" in hint:  # one is short for a list of one
        return [] if node.value in ("", "none") else [str(node.value)]
    is_text = "str" in hint and "list" not in hint and "int" not in hint
    if is_text and node.tag != "tag:yaml.org,2002:null":
        return str(node.value)
    loader = yaml.SafeLoader("")
    return loader.construct_object(node)


# --- secrets ---


def is_likely_secret(text: str) -> bool:
    """Return whether a word of a command looks like a secret, by its form or by the name before it.

    A plain hash does not count: it may be the id of a commit.
    """
    name, given, value = text.partition("=")
    if given and _SECRET_NAME.search(name) and _SECRET_VALUE.search(value):
        return True
    return re.search(rf"(^|[=\s]){_TOKEN}($|\s)", text) is not None


def read_secrets(file: str) -> dict[str, str]:
    """Return the variables in a file of KEY=VALUE lines that nobody else may read."""
    path = Path(file).expanduser()
    try:
        status = path.stat()
        if stat.S_IMODE(status.st_mode) not in (0o600, 0o400) or status.st_uid != os.getuid():
            raise EchelonError(
                Fault(
                    f"launch.secrets={file} has a mode other than 0600 and 0400, or is not yours",
                    f"chmod 600 {path}",
                )
            )
        lines = [line.removesuffix("\r") for line in os.fsdecode(path.read_bytes()).split("\n")]
    except OSError as error:
        why = format_os_error_reason(error)
        raise EchelonError(Fault(f"launch.secrets={file}: {why}", "fix the path")) from None
    pairs = (line.partition("=") for line in lines if re.match(r"[A-Za-z_]\w*=", line, re.ASCII))
    return {key: value for key, _, value in pairs}

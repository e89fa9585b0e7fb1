"""YAML as plain data with the line of every value, so that a fault can say where it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.utils.os_errors import format_os_error_reason

KeyPath: TypeAlias = "tuple[str | int, ...]"
"""The keys that lead to a value, such as ("parameters", "lr", "values", 0)."""

_EXPONENT_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""Numbers such as 1e-4, which are text to YAML 1.1 and so to PyYAML: it wants 1.0e-4."""
_MAX_CHARACTERS = 1 << 20
_YAML_TAG_PREFIX = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class LocatedYaml:
    """A YAML file as plain data, and the line of each value."""

    path: Path
    data: Any
    lines: dict[KeyPath, int]
    notes: list[str] = field(default_factory=list)
    """Values that were read as something else than YAML says, for the user to see."""

    def locate(self, *keys: str | int) -> str:
        """Return FILE:LINE of a value, or of the innermost value that exists on the way to it."""
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return f"{self.path}:{self.lines.get(keys, 1)}"


def load_yaml(path: Path) -> LocatedYaml:
    """Read a file; EchelonError if it cannot be read or is not plain YAML."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = format_os_error_reason(error)
        raise EchelonError(
            Fault(f"{path} cannot be read: {reason}", "give the file of a sweep"),
            exit=ExitCode.USAGE if path.exists() else ExitCode.NOT_FOUND,
        ) from None
    return parse_yaml(text, path)


def parse_yaml(text: str, path: Path) -> LocatedYaml:
    """Parse the text of a file; EchelonError if it is not plain YAML."""
    if len(text) > _MAX_CHARACTERS:
        raise EchelonError(
            Fault(f"{path} has {len(text)} characters", "a sweep's file has fewer than a million")
        )
    located = LocatedYaml(path, None, {})
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        data = _convert_node(node, (), located) if node is not None else None
    except yaml.YAMLError as error:
        raise EchelonError(_make_syntax_fault(path, error)) from None
    except RecursionError:
        raise EchelonError(
            Fault(f"{path} is nested without end", "leave the anchors out")
        ) from None
    return LocatedYaml(path, data, located.lines, located.notes)


def _make_syntax_fault(path: Path, error: yaml.YAMLError) -> Fault:
    mark = getattr(error, "problem_mark", None)
    where = f"{path}:{mark.line + 1}" if mark else str(path)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return Fault(f"{where}: not YAML: {problem}", "fix that line")


def _convert_node(node: yaml.Node, keys: KeyPath, into: LocatedYaml) -> Any:
    """Return a node as plain data, and note its lines and those of all within it."""
    into.lines[keys] = node.start_mark.line + 1
    _require_plain_tag(node)
    if isinstance(node, yaml.MappingNode):
        return dict(_convert_pairs(node, keys, into))
    if isinstance(node, yaml.SequenceNode):
        return [_convert_node(child, (*keys, i), into) for i, child in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode)
    if node.style is None and node.tag.endswith(":str") and _EXPONENT_NUMBER.fullmatch(node.value):
        number = float(node.value)
        into.notes.append(f"{into.locate(*keys)}: {node.value} is read as the number {number:g}")
        return number
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node)
    finally:
        loader.dispose()


def _require_plain_tag(node: yaml.Node) -> None:
    """Refuse tags such as !!python/object: a file of somebody else must not run code."""
    kind = node.tag.removeprefix(_YAML_TAG_PREFIX)
    if kind == node.tag or kind.startswith("python/"):
        raise yaml.MarkedYAMLError(
            problem=f"{kind} asks for an object, and values are plain data",
            problem_mark=node.start_mark,
        )


def _convert_pairs(
    node: yaml.MappingNode, keys: KeyPath, into: LocatedYaml
) -> Iterator[tuple[str, Any]]:
    known_keys: set[str] = set()
    for key_node, child in node.value:
        key = str(key_node.value)
        if key in known_keys:
            raise yaml.MarkedYAMLError(
                problem=f"{key!r} is here twice", problem_mark=key_node.start_mark
            )
        known_keys.add(key)
        child_keys = (*keys, key)
        value = _convert_node(child, child_keys, into)
        # The line of the key, where a person looks, not that of a value that begins below it.
        into.lines[child_keys] = key_node.start_mark.line + 1
        yield key, value

"""YAML as plain data, with the line of everything, so that a fault can say where it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from echelon.errors import EchelonError, Exit, Fault
from echelon.utils.os_errors import describe_os_error

KeyPath: TypeAlias = "tuple[str | int, ...]"
"""The way to a value: parameters, lr, values, 0."""

_EXPONENT_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""What YAML 1.1, and so PyYAML, takes for text: it wants 1.0e-4."""
_MAX_CHARACTERS = 1 << 20
_YAML_TAG_PREFIX = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class LocatedYaml:
    """A file as it was read."""

    path: Path
    data: Any
    lines: dict[KeyPath, int]
    notes: list[str] = field(default_factory=list)

    def locate(self, *keys: str | int) -> str:
        """FILE:LINE of a value, or of what it would be in."""
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return f"{self.path}:{self.lines.get(keys, 1)}"


def load_yaml(path: Path) -> LocatedYaml:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = describe_os_error(error)
        raise EchelonError(
            Fault(f"{path} cannot be read: {reason}", "give the file of a sweep"),
            exit=Exit.USAGE if path.exists() else Exit.NOT_FOUND,
        ) from None
    return parse_yaml(text, path)


def parse_yaml(text: str, path: Path) -> LocatedYaml:
    if len(text) > _MAX_CHARACTERS:
        raise EchelonError(
            Fault(f"{path} has {len(text)} characters", "a sweep's file has fewer than a million")
        )
    marked = LocatedYaml(path, None, {})
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        data = _convert_node(node, (), marked) if node is not None else None
    except yaml.YAMLError as error:
        raise EchelonError(_syntax_fault(path, error)) from None
    except RecursionError:
        raise EchelonError(
            Fault(f"{path} is nested without end", "leave the anchors out")
        ) from None
    return LocatedYaml(path, data, marked.lines, marked.notes)


def _syntax_fault(path: Path, error: yaml.YAMLError) -> Fault:
    mark = getattr(error, "problem_mark", None)
    where = f"{path}:{mark.line + 1}" if mark else str(path)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return Fault(f"{where}: no YAML: {problem}", "mend that line")


def _convert_node(node: yaml.Node, keys: KeyPath, into: LocatedYaml) -> Any:
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
                problem=f"{key!r} stands here twice", problem_mark=key_node.start_mark
            )
        known_keys.add(key)
        here = (*keys, key)
        value = _convert_node(child, here, into)
        into.lines[here] = key_node.start_mark.line + 1
        yield key, value

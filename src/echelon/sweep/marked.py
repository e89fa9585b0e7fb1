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

Keys: TypeAlias = "tuple[str | int, ...]"
"""The way to a value: parameters, lr, values, 0."""

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""What YAML 1.1, and so PyYAML, takes for text: it wants 1.0e-4."""
_LARGEST = 1 << 20
_YAML = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Marked:
    """A file as it was read."""

    path: Path
    data: Any
    lines: dict[Keys, int]
    notes: list[str] = field(default_factory=list)

    def at(self, *keys: str | int) -> str:
        """FILE:LINE of a value, or of what it would be in."""
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return f"{self.path}:{self.lines.get(keys, 1)}"


def load(path: Path) -> Marked:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = describe_os_error(error)
        raise EchelonError(
            Fault(f"{path} cannot be read: {reason}", "give the file of a sweep"),
            exit=Exit.USAGE if path.exists() else Exit.NOT_FOUND,
        ) from None
    return parse(text, path)


def parse(text: str, path: Path) -> Marked:
    if len(text) > _LARGEST:
        raise EchelonError(
            Fault(f"{path} has {len(text)} characters", "a sweep's file has fewer than a million")
        )
    marked = Marked(path, None, {})
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        data = _plain(node, (), marked) if node is not None else None
    except yaml.YAMLError as error:
        raise EchelonError(_not_yaml(path, error)) from None
    except RecursionError:
        raise EchelonError(
            Fault(f"{path} is nested without end", "leave the anchors out")
        ) from None
    return Marked(path, data, marked.lines, marked.notes)


def _not_yaml(path: Path, error: yaml.YAMLError) -> Fault:
    mark = getattr(error, "problem_mark", None)
    where = f"{path}:{mark.line + 1}" if mark else str(path)
    said = getattr(error, "problem", None) or str(error).splitlines()[0]
    return Fault(f"{where}: no YAML: {said}", "mend that line")


def _plain(node: yaml.Node, keys: Keys, into: Marked) -> Any:
    into.lines[keys] = node.start_mark.line + 1
    _require_data(node)
    if isinstance(node, yaml.MappingNode):
        return dict(_pairs(node, keys, into))
    if isinstance(node, yaml.SequenceNode):
        return [_plain(child, (*keys, i), into) for i, child in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode)
    if node.style is None and node.tag.endswith(":str") and _NUMBER.fullmatch(node.value):
        number = float(node.value)
        into.notes.append(f"{into.at(*keys)}: {node.value} is read as the number {number:g}")
        return number
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node)
    finally:
        loader.dispose()


def _require_data(node: yaml.Node) -> None:
    kind = node.tag.removeprefix(_YAML)
    if kind == node.tag or kind.startswith("python/"):
        raise yaml.MarkedYAMLError(
            problem=f"{kind} asks for an object, and values are plain data",
            problem_mark=node.start_mark,
        )


def _pairs(node: yaml.MappingNode, keys: Keys, into: Marked) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for key_node, child in node.value:
        key = str(key_node.value)
        if key in seen:
            raise yaml.MarkedYAMLError(
                problem=f"{key!r} stands here twice", problem_mark=key_node.start_mark
            )
        seen.add(key)
        here = (*keys, key)
        value = _plain(child, here, into)
        into.lines[here] = key_node.start_mark.line + 1
        yield key, value

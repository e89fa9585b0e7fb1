"""The settings that an experiment's file declares, read from its text: it is never imported.

Importing it takes seconds, because it imports torch. What only running it would tell is left out.
"""

from __future__ import annotations

import ast
from typing import Any


def list_functions(file: str) -> list[str]:
    """Return the public functions at the top level of a file; none if it cannot be read."""
    return [
        node.name
        for node in _parse(file).body
        if isinstance(node, ast.FunctionDef) and node.name[0] != "_"
    ]


def read_declared_settings(file: str, function: str) -> dict[str, Any]:
    """Return the settings of a function by their dotted names, as `words.json` has them: those of
    the class of its first parameter, else those that it reads."""
    body = _parse(file).body
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == function and node.args.args:
            first = node.args.args[0]
            declared = classes.get(ast.unparse(first.annotation) if first.annotation else "")
            if declared is not None:
                return _read_class(declared, classes, "", ())
            return {name: {} for name in _list_attributes(node, first.arg)}
    return {}


def _parse(file: str) -> ast.Module:
    try:
        with open(file, encoding="utf-8") as opened:
            return ast.parse(opened.read())
    except (OSError, ValueError, SyntaxError):  # half written, or not there
        return ast.Module([], [])


def _read_class(
    node: ast.ClassDef, classes: dict[str, ast.ClassDef], prefix: str, seen: tuple[str, ...]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in node.bases:
        if (parent := classes.get(ast.unparse(base))) is not None and parent.name not in seen:
            found |= _read_class(parent, classes, prefix, (*seen, node.name))
    for field in node.body:
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        name, hint = f"{prefix}{field.target.id}", ast.unparse(field.annotation)
        if hint in classes and hint not in seen:
            found |= _read_class(classes[hint], classes, f"{name}.", (*seen, node.name))
            continue
        setting: dict[str, Any] = {"takes": choices} if (choices := _list_choices(field)) else {}
        if field.value is not None:
            setting["help"] = ast.unparse(field.value)
        found[name] = setting
    return found


def _list_choices(field: ast.AnnAssign) -> list[str]:
    """Return the values of a field that is true or false, or a Literal."""
    hint = field.annotation
    if isinstance(hint, ast.Name) and hint.id == "bool":
        return ["true", "false"]
    if isinstance(hint, ast.Subscript) and ast.unparse(hint.value).endswith("Literal"):
        items = hint.slice.elts if isinstance(hint.slice, ast.Tuple) else [hint.slice]
        return [str(item.value) for item in items if isinstance(item, ast.Constant)]
    return []


def _list_attributes(function: ast.FunctionDef, parameter: str) -> list[str]:
    """Return the attributes of a parameter that a function reads."""
    found = [
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == parameter
    ]
    return list(dict.fromkeys(found))

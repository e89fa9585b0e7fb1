"""The settings as help: read from the schema's source, where each is documented under itself."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

_SECTIONS = {"RunChoice": "run", "Trainer": "trainer", "Launch": "launch", "Track": "track"}


def described() -> str:
    tree = ast.parse(Path(__file__).with_name("schema.py").read_text())
    lines: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in _SECTIONS:
            lines += _section(_SECTIONS[node.name], node)
    return "\n".join(lines)


def _section(prefix: str, node: ast.ClassDef) -> Iterator[str]:
    for field, following in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            default = ast.unparse(field.value) if field.value else ""
            yield f"  {prefix}.{field.target.id}={_short(default)}"
            doc = _docstring(following)
            if doc:
                yield textwrap.fill(doc, 88, initial_indent="      ", subsequent_indent="      ")


def _short(default: str) -> str:
    """`field(default_factory=lambda: Every(epochs=1))` reads `(epochs=1)`."""
    if "Every(" in default:
        return default[default.index("Every(") + 5 : -1]
    return "null" if default == "None" else default.strip("'")


def _docstring(node: ast.stmt) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""

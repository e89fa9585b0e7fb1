"""The settings as help: read from the schema's source, where each is documented under itself."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

_SECTIONS = {
    "Trainer": "trainer.",
    "ReplicaChoice": "replica.",
    "Launch": "launch.",
    "Track": "track.",
    "Wandb": "track.wandb.",
    "TensorBoard": "track.tensorboard.",
    "RunChoice": "run.",
    "Config": "",
}


def described() -> str:
    tree = ast.parse(Path(__file__).with_name("schema.py").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    lines = [line for name, prefix in _SECTIONS.items() for line in _section(prefix, classes[name])]
    return "\n".join(lines)


def _section(prefix: str, node: ast.ClassDef) -> Iterator[str]:
    for field, following in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        default = ast.unparse(field.value) if field.value else ""
        if "default_factory" in default and not any(w in default for w in ("Every(", "=list")):
            continue  # a section of its own
        name = f"{prefix}{field.target.id}"
        name = "launch" if name == "launch.kind" else name  # launch=local chooses the file
        yield f"  {name}{_shown(default)}"
        doc = _docstring(following)
        if doc:
            yield textwrap.fill(doc, 80, initial_indent="      ", subsequent_indent="      ")


def _shown(default: str) -> str:
    """`field(default_factory=lambda: Every(epochs=1))` reads `.epochs=1`."""
    if "Every(" in default:
        return "." + default[default.index("Every(") + 6 :].rstrip(")") + "  (or .steps, .minutes)"
    if "=list" in default:
        return "=[]"
    return "=" + {"None": "null", "False": "false", "True": "true"}.get(default, default.strip("'"))


def _docstring(node: ast.stmt) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""

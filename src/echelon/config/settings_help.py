"""The settings as help: read from the schema's source, where each is documented under itself."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

_SECTION_PREFIXES = {
    "TrainerConfig": "trainer.",
    "ReplicaConfig": "replica.",
    "LaunchConfig": "launch.",
    "TrackConfig": "track.",
    "WandbConfig": "track.wandb.",
    "TensorBoardConfig": "track.tensorboard.",
    "RunConfig": "run.",
    "Config": "",
}


def render_settings() -> str:
    tree = ast.parse(Path(__file__).with_name("schema.py").read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    lines = [
        line
        for name, prefix in _SECTION_PREFIXES.items()
        for line in _render_section(prefix, classes[name])
    ]
    return "\n".join(lines)


def render_user_settings(name: str, settings: Mapping[str, Any] | type | None) -> str:
    """What a user's experiment declares."""
    if isinstance(settings, type):
        values = {field.name: _read_default(field) for field in fields(settings)}
    else:
        values = dict(settings or {})
    return _add_title(
        name, [f"  {key}{_format_default(repr(value))}" for key, value in values.items()]
    )


def _read_default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return "???" if field.default is MISSING else field.default


def render_bundled_settings(name: str) -> str:
    """Read from its file, where each setting is explained beside itself."""
    file = Path(__file__).parents[1] / "conf" / "experiment" / f"{name}.yaml"
    if not name.isidentifier() or not file.is_file():
        return ""  # to train it says so, with the names there are
    text = file.read_text(encoding="utf-8")
    text = text.rpartition("\nexperiment:\n")[2]  # of a file that sets more
    text = textwrap.dedent(text.partition("\n\n")[0])
    lines = []
    for key, value, why in re.findall(r"^(\w+): (.*?)(?: +# (.*))?$", text, re.MULTILINE):
        if key != "entry":
            lines += [f"  {key}={value}", *([f"      {why}"] if why else [])]
    return _add_title(name, lines)


def _add_title(name: str, lines: list[str]) -> str:
    return "\n".join(["", "", f"settings of {name}:", *lines]) if lines else ""


def _render_section(prefix: str, node: ast.ClassDef) -> Iterator[str]:
    for field, following in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        default = ast.unparse(field.value) if field.value else ""
        if "default_factory" in default and not any(w in default for w in ("Interval(", "=list")):
            continue  # a section of its own
        name = f"{prefix}{field.target.id}"
        name = "launch" if name == "launch.kind" else name  # launch=local chooses the file
        yield f"  {name}{_format_default(default)}"
        doc = _read_docstring(following)
        if doc:
            yield textwrap.fill(doc, 80, initial_indent="      ", subsequent_indent="      ")


def _format_default(default: str) -> str:
    """`field(default_factory=lambda: Interval(epochs=1))` reads `.epochs=1`."""
    if "Interval(" in default:
        return (
            "." + default[default.index("Interval(") + 9 :].rstrip(")") + "  (or .steps, .minutes)"
        )
    if "=list" in default:
        return "=[]"
    return "=" + {"None": "null", "False": "false", "True": "true"}.get(default, default.strip("'"))


def _read_docstring(node: ast.stmt) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""

"""The settings as help text: names and defaults from the schema, explanations from its source.

Each setting is documented by the string under it in `schema.py`. Python does not keep such strings,
so the source is parsed, which takes about 20 ms and is done only when help is printed.
`docstring_parser` was considered: it parses the source in the same way, so it would add a
dependency and save eight lines. A separate table of explanations would drift from the schema.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from echelon.config import schema
from echelon.config.schema import Interval

_SECTIONS: dict[str, type] = {
    "trainer.": schema.TrainerConfig,
    "replica.": schema.ReplicaConfig,
    "launch.": schema.LaunchConfig,
    "track.": schema.TrackConfig,
    "track.wandb.": schema.WandbConfig,
    "track.tensorboard.": schema.TensorBoardConfig,
    "run.": schema.RunConfig,
    "": schema.Config,
}
"""In the order in which they are printed, by the prefix of their settings."""


def render_settings() -> str:
    """Return the help on all settings of Echelon, without those of an experiment."""
    source = Path(schema.__file__).read_text(encoding="utf-8")
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    return "\n".join(
        line
        for prefix, section in _SECTIONS.items()
        for line in _render_section(prefix, section, _read_field_docs(classes[section.__name__]))
    )


def render_user_settings(name: str, settings: Mapping[str, Any] | type | None) -> str:
    """Return the help on the settings that a user's experiment declares, with a heading."""
    if isinstance(settings, type):
        values = {field.name: _read_default(field) for field in fields(settings)}
    else:
        values = dict(settings or {})
    return _add_title(name, [f"  {key}{_format_default(value)}" for key, value in values.items()])


def render_bundled_settings(name: str) -> str:
    """Return the help on the settings of a bundled experiment, from the comments in its YAML file.

    Returns nothing if there is no such experiment: training it then reports which ones there are.
    """
    file = Path(__file__).parents[1] / "conf" / "experiment" / f"{name}.yaml"
    if not name.isidentifier() or not file.is_file():
        return ""
    text = file.read_text(encoding="utf-8")
    text = text.rpartition("\nexperiment:\n")[2]  # a file that also sets the trainer's
    text = textwrap.dedent(text.partition("\n\n")[0])
    lines = []
    for key, value, comment in re.findall(r"^(\w+): (.*?)(?: +# (.*))?$", text, re.MULTILINE):
        if key != "entry":
            lines += [f"  {key}={value}", *([f"      {comment}"] if comment else [])]
    return _add_title(name, lines)


def _add_title(name: str, lines: list[str]) -> str:
    return "\n".join(["", "", f"settings of {name}:", *lines]) if lines else ""


def _render_section(prefix: str, section: type, docs: Mapping[str, str]) -> Iterator[str]:
    for field in fields(section):
        default = _read_default(field)
        if isinstance(default, dict) or (is_dataclass(default) and type(default) is not Interval):
            continue  # a section of its own, or the experiment's settings
        name = f"{prefix}{field.name}"
        name = "launch" if name == "launch.kind" else name  # launch=local chooses the file
        yield f"  {name}{_format_default(default)}"
        if doc := docs.get(field.name):
            yield textwrap.fill(doc, 80, initial_indent="      ", subsequent_indent="      ")


def _read_default(field: Field[Any]) -> Any:
    """Return the default of a field; ??? if it has none, which is OmegaConf's mark for that."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return "???" if field.default is MISSING else field.default


def _format_default(value: Any) -> str:
    """Return `=VALUE` as it would be typed; an interval is shown as `.epochs=1`."""
    if isinstance(value, Interval):
        parts = ", ".join(f"{unit}={n}" for unit, n in vars(value).items() if n is not None)
        return f".{parts}  (or .steps, .minutes)"
    if value is None:
        return "=null"
    if isinstance(value, bool):
        return f"={value}".lower()
    return f"={value}"


def _read_field_docs(node: ast.ClassDef) -> dict[str, str]:
    """Return the string under each field of a class, as one line."""
    docs = {}
    for field, following in zip(node.body, node.body[1:], strict=False):
        is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if is_field and isinstance(following, ast.Expr):
            assert isinstance(following.value, ast.Constant)
            docs[field.target.id] = " ".join(str(following.value.value).split())  # type: ignore[attr-defined]
    return docs

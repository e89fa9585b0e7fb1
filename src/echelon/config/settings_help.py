"""The settings as help text: names and defaults from the classes, explanations from their source.

Each setting is documented by the string under it, in `schema.py` and in a user's own dataclass.
Python does not keep such strings, so the source is parsed, which takes about 20 ms and is done only
when help is printed. `docstring_parser` was considered: it parses the source in the same way, so it
would add a dependency and save eight lines. A separate table would drift from the schema.
"""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

from echelon.config import schema
from echelon.config.scalar_types import describe_hint, format_value, is_choice
from echelon.config.schema import Interval
from echelon.config.settings_classes import (
    SettingsField,
    is_settings_class,
    list_union_members,
    read_settings_class,
)
from echelon.config.typed_values import CLASS_KEY
from echelon.errors import EchelonError, Fault, suggest_nearest

GROUPS: dict[str, tuple[type, ...]] = {
    "trainer": (schema.TrainerConfig, schema.EarlyStopConfig),
    "replica": (schema.ReplicaConfig,),
    "launch": (schema.LaunchConfig, schema.KubernetesConfig),
    "track": (schema.TrackConfig, schema.WandbConfig, schema.TensorBoardConfig),
    "notify": (schema.NotifyConfig, schema.MailConfig),
    "run": (schema.RunConfig,),
}
"""The groups of settings in the order in which they are printed, with their classes."""
_PREFIXES = {
    "EarlyStopConfig": "trainer.early_stop.",
    "KubernetesConfig": "launch.k8s.",
    "WandbConfig": "track.wandb.",
    "TensorBoardConfig": "track.tensorboard.",
    "MailConfig": "notify.mail.",
}
_MOST_USED = (
    *("experiment", "trainer.epochs", "trainer.batch_size", "trainer.schedule"),
    *("trainer.precision", "launch", "launch.procs", "track", "run.name", "seed"),
)
"""What the short help lists; everything else is one word away."""
_CHOSEN_FILES = {
    "experiment": (
        "toy",
        "What to train: toy, transformer, movielens, movielens_dot, movielens_ranking, or "
        "FILE.py:FUNCTION. Its own settings are given by their bare names: lr=0.1.",
    ),
    "track": (
        "jsonl",
        "Where metrics go beside metrics.jsonl: `wandb`, `tensorboard` or `[wandb,tensorboard]`.",
    ),
}
"""Settings that choose a file and are no field of the schema, with their defaults."""
_MAX_WIDTH = 100


class SettingHelp(NamedTuple):
    """One setting as help shows it."""

    name: str
    """As it is typed, trainer.epochs."""
    default: str
    """With its equals sign, =3."""
    text: str
    """What it does; may be empty."""

    def render(self, width: int) -> str:
        """Return the setting and below it what it does."""
        indent = " " * 6
        filled = textwrap.fill(self.text, width, initial_indent=indent, subsequent_indent=indent)
        return f"  {self.name}{self.default}" + (f"\n{filled}" if self.text else "")

    def has_word(self, word: str) -> bool:
        """Return whether the name or the text has a word in it."""
        return word.lower() in f"{self.name}{self.default} {self.text}".lower()


class ExperimentHelp(NamedTuple):
    """The settings of an experiment."""

    name: str
    settings: list[SettingHelp]


# --- pages ---


def get_help_width() -> int:
    """Return how wide help may be: as the terminal, and no wider than is easy to read."""
    return min(shutil.get_terminal_size().columns, _MAX_WIDTH)


def render_overview(experiment: ExperimentHelp) -> str:
    """Return the experiment's own settings, the ones that most runs change, and where more are."""
    width = get_help_width()
    by_name = {setting.name: setting for setting in list_settings()}
    by_name["experiment"] = by_name["experiment"]._replace(default=f"={experiment.name}")
    lines = {
        **_summarize_groups(experiment),
        "all": "    every setting",
        "WORD": "    settings with this word in their name or their help",
    }
    column = max(map(len, lines)) + len("  --help ") + 2
    more = [
        textwrap.fill(
            text,
            width,
            initial_indent=f"  --help {name}".ljust(column),
            subsequent_indent=" " * (column + 4),
        )
        for name, text in lines.items()
    ]
    sections = [
        _render_section(f"settings of {experiment.name}", experiment.settings, width),
        _render_section("most used", [by_name[name] for name in _MOST_USED], width),
        "\n".join(["more settings:", *more]),
    ]
    return "\n\n".join(section for section in sections if section)


def render_topic(topic: str, experiment: ExperimentHelp) -> str:
    """Return the help on one group, on all settings, or on those that a word is found in.

    Raises an EchelonError with the nearest names if there is none.
    """
    width, ours = get_help_width(), list_settings()
    title, own = f"settings of {experiment.name}", experiment.settings
    if topic == "all":
        found = [(title, own), *((name, _select_group(name, ours)) for name in (*GROUPS, "other"))]
    elif topic in ("experiment", experiment.name):
        found = [(title, own)]
    elif topic in (*GROUPS, "other"):
        found = [(topic, _select_group(topic, ours))]
    else:
        word = topic.removeprefix("--").partition("=")[0]
        found = [
            (title, [setting for setting in own if setting.has_word(word)]),
            (f"settings with {word!r}", [setting for setting in ours if setting.has_word(word)]),
        ]
    sections = [_render_section(title, settings, width) for title, settings in found if settings]
    if not sections:
        known = [setting.name for setting in [*own, *ours]]
        raise EchelonError(
            Fault(
                f"no setting has {topic!r} in its name or in its help",
                suggest_nearest(topic, [*known, *(n.rpartition(".")[2] for n in known), *GROUPS]),
            )
        )
    return "\n\n".join(sections)


def _render_section(title: str, settings: Sequence[SettingHelp], width: int) -> str:
    if not settings:
        return ""
    return "\n".join([f"{title}:", *(setting.render(width) for setting in settings)])


def _summarize_groups(experiment: ExperimentHelp) -> dict[str, str]:
    """Return one line on each group: how many settings it has, and what they are about."""
    ours = list_settings()
    first_lines = {
        name: " ".join((inspect.getdoc(classes[0]) or "").split()).partition(". ")[0]
        for name, classes in GROUPS.items()
    }
    about = {
        "experiment": f"Those of {experiment.name}.",
        **first_lines,
        "other": "The experiment, the seed, and ranks that are started by hand.",
    }
    counts = {name: len(_select_group(name, ours)) for name in (*GROUPS, "other")}
    counts["experiment"] = len(experiment.settings)
    return {name: f"{counts[name]:>2}  {text.rstrip('.')}" for name, text in about.items()}


def _select_group(name: str, settings: Sequence[SettingHelp]) -> list[SettingHelp]:
    """Return the settings of a group; those of no group are `other`."""
    if name == "other":
        return [s for s in settings if s.name.partition(".")[0] not in GROUPS]
    return [s for s in settings if s.name.partition(".")[0] == name]


# --- our settings ---


def list_settings() -> list[SettingHelp]:
    """Return all settings of Echelon, without those of an experiment."""
    docs = _read_docs(Path(schema.__file__).read_text(encoding="utf-8"))
    chosen = {
        name: SettingHelp(name, f"={default}", text)
        for name, (default, text) in _CHOSEN_FILES.items()
    }
    found = [chosen["experiment"]]
    for group, classes in GROUPS.items():
        found += [chosen[group]] if group in chosen else []
        for section in classes:
            prefix = _PREFIXES.get(section.__name__, f"{group}.")
            found += _iter_section(prefix, section, docs[section.__name__])
    return [*found, *_iter_section("", schema.Config, docs["Config"])]


def _iter_section(prefix: str, section: type, docs: dict[str, str]) -> Iterator[SettingHelp]:
    """Yield the settings of one class of the schema."""
    for field in fields(section):
        make = read_settings_class(section).fields[field.name].make_default
        default = make() if make is not None else None
        if isinstance(default, dict) or (is_dataclass(default) and type(default) is not Interval):
            continue  # a section of its own, or the experiment's settings
        name = f"{prefix}{field.name}"
        name = "launch" if name == "launch.kind" else name  # launch=local chooses the file
        yield SettingHelp(name, _format_default(default), docs.get(field.name, ""))


def _format_default(value: Any) -> str:
    """Return `=VALUE` as it would be typed; an interval is shown as `.epochs=1`."""
    if isinstance(value, Interval):
        parts = ", ".join(f"{unit}={n}" for unit, n in vars(value).items() if n is not None)
        return f".{parts}  (or .steps, .minutes)"
    if isinstance(value, (tuple, set, frozenset)):
        return f"=[{', '.join(map(format_value, value))}]"
    return f"={format_value(value)}"


# --- an experiment's settings ---


def describe_user_settings(
    entry: str, settings: type | None, names: frozenset[str] | None
) -> ExperimentHelp:
    """Return the settings that a user's experiment declares; without a class, those it reads."""
    name = entry.rpartition("/")[2]
    if settings is None:
        return ExperimentHelp(name, [SettingHelp(n, "=…", "") for n in sorted(names or ())])
    return ExperimentHelp(name, list(_iter_record(settings, "", None, ())))


def _iter_record(
    hint: Any, prefix: str, instance: Any, seen: tuple[Any, ...]
) -> Iterator[SettingHelp]:
    """Yield the settings of a record and of the records in it.

    `instance` is the default of the whole record, if there is one.
    """
    record = read_settings_class(hint)
    docs = _read_class_docs(record.cls)
    values = {} if instance is None else record.read_values(instance)
    for field in record.fields.values():
        name = f"{prefix}{field.name}"
        has_default = field.name in values or field.make_default is not None
        default = values.get(field.name, field.make_default() if field.make_default else None)
        members = list_union_members(field.hint)
        records = [m for m in members if is_settings_class(m) and m not in (*seen, hint)]
        inner = [r for r in records if type(default) is read_settings_class(r).cls] or records[:1]
        if not inner or (default is None and has_default):
            yield _describe_field(field, name, default, has_default, docs.get(field.name, ""))
            continue
        if len(records) > 1:
            choices = ", ".join(read_settings_class(r).name for r in records)
            text = f"{docs.get(field.name, '')} One of {choices}.".strip()
            yield SettingHelp(f"{name}.{CLASS_KEY}", f"={read_settings_class(inner[0]).name}", text)
        shown = set()
        for each in [*inner, *(r for r in records if r not in inner)]:
            value = default if each in inner and has_default else None
            for setting in _iter_record(each, f"{name}.", value, (*seen, hint)):
                note = "" if each in inner else f"({read_settings_class(each).name}) "
                if setting.name not in shown:
                    yield setting._replace(text=f"{note}{setting.text}".strip())
                shown.add(setting.name)


def _describe_field(
    field: SettingsField, name: str, default: Any, has_default: bool, text: str
) -> SettingHelp:
    """Return one field of a record, with the values that it may have where they are listed."""
    members = list_union_members(field.hint)
    is_listed = any(is_choice(member) or is_settings_class(member) for member in members)
    kind = describe_hint(field.hint)
    choices = f"{kind[:1].upper()}{kind[1:]}."
    shown = _format_default(default) if has_default else "=…  (required)"
    return SettingHelp(name, shown, " ".join([text, choices] if is_listed else [text]).strip())


def describe_bundled_settings(name: str) -> ExperimentHelp:
    """Return the settings of a bundled experiment, from the comments in its YAML file.

    There are none if there is no such experiment: training it then reports which ones there are.
    """
    file = Path(__file__).parents[1] / "conf" / "experiment" / f"{name}.yaml"
    if not name.isidentifier() or not file.is_file():
        return ExperimentHelp(name, [])
    text = file.read_text(encoding="utf-8")
    text = text.rpartition("\nexperiment:\n")[2]  # a file that also sets the trainer's
    text = textwrap.dedent(text.partition("\n\n")[0])
    found = re.findall(r"^(\w+): (.*?)(?: +# (.*))?$", text, re.MULTILINE)
    return ExperimentHelp(
        name, [SettingHelp(key, f"={value}", doc) for key, value, doc in found if key != "entry"]
    )


# --- sources ---


def _read_class_docs(cls: Any) -> dict[str, str]:
    """Return what is written under or behind each field of a class and of those it inherits."""
    docs: dict[str, str] = {}
    for base in reversed(getattr(cls, "__mro__", (cls,))):
        if is_settings_class(base):
            try:
                found = _read_docs(textwrap.dedent(inspect.getsource(base)))
            except (OSError, TypeError, SyntaxError):  # made by a function, or typed into a prompt
                continue
            docs |= next(iter(found.values()), {})
    return docs


def _read_docs(source: str) -> dict[str, dict[str, str]]:
    """Return the texts of the fields of every class in a source, each as one line.

    A text is the string under a field, or else the comment behind it.
    """
    lines = source.splitlines()
    docs: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        docs[node.name] = {}
        for field, following in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            behind = lines[(field.end_lineno or 0) - 1].encode()[field.end_col_offset or 0 :]
            text = behind.decode().partition("#")[2].strip()
            match following:
                case ast.Expr(value=ast.Constant(value=str(under))):
                    text = " ".join(under.split())
            if text:
                docs[node.name][field.target.id] = text
    return docs

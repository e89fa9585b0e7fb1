"""Write what completion knows of the command line: commands, options and settings.

    python scripts/write_completion_words.py            writes src/echelon/completion/words.json
    python scripts/write_completion_words.py --check    ends with 1 where the file says otherwise

Completion has to answer in milliseconds and can import neither parsers nor settings, so a file of
the package has what they say. It is written by this and by nobody else.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src"
sys.path.insert(0, str(SOURCE))

from echelon.cli import RECIPE_COMMANDS, SUBCOMMANDS, run_command  # noqa: E402
from echelon.commands.arguments import LazyEpilogParser  # noqa: E402
from echelon.config import schema  # noqa: E402
from echelon.config.settings_help import (  # noqa: E402
    GROUPS,
    describe_bundled_settings,
    list_settings,
)

FILE = SOURCE / "echelon/completion/words.json"
MAX_HELP = 60
INNER_COMMANDS = {
    "sweep show": "the results of a sweep",
    "setup cluster": "an echelon.yaml for a Slurm cluster",
    "data look": "what is in files of samples",
    "data check": "read every sample, and name those that cannot be",
    "data pack": "write samples as shards",
}
"""Commands of commands whose parser is found by running them; argparse's own are found without."""
KINDS = {
    **dict.fromkeys(("RUN", "run"), "run"),
    **dict.fromkeys(("KEY=VALUE", "overrides", "settings", "override"), "setting"),
    **dict.fromkeys(("FILE", "PATH", "file", "configs"), "file"),
    **dict.fromkeys(("DIR", "FOLDER", "dir", "source"), "folder"),
    **dict.fromkeys(("HOST", "host"), "host"),
    **{"hosts": "hosts", "sweep": "sweep"},
}
"""Kinds of values by the metavar or else the name of an argument."""
OWN_KINDS: dict[tuple[str, str], str | list[str]] = {
    ("sweep show", "name"): "sweep",
    ("scale", "setting"): ["nodes="],
    ("board", "host"): "",
    ("data pack", "sources"): "file",
    ("plot", "output"): "file",
    **{(f"env {verb}", "where"): ["cache", "source"] for verb in ("build", "show")},
    **{(f"env {verb}", "python"): "file" for verb in ("build", "show")},
    ("env build", "builder"): ["podman", "apptainer", "ch-image"],
    ("train", "help"): ["all", "experiment", *GROUPS, "other"],
}
"""The same by command and argument, where the rules above do not hold."""
SETTING_KINDS = {
    **dict.fromkeys(("run.dir", "track.tensorboard.folder"), "folder"),
    **dict.fromkeys(("launch.hostfile", "launch.secrets", "launch.container"), "file"),
    **{"run.name": "run name", "launch.after": "run name", "trainer.resume": "snapshot"},
    **{"experiment": "experiment", "launch.login": "host", "launch.hosts": "hosts"},
}
LISTS = {
    "track": ("jsonl", "wandb", "tensorboard"),
    "notify.to": schema.NEWS_CHANNELS,
    "notify.events": schema.NEWS_EVENTS,
}
"""Settings that are lists of choices."""


class ParserFound(Exception):
    """Raised in the place of parsing."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def find_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command: it is run until it parses its words."""

    def stop(parser: argparse.ArgumentParser, *given: Any, **more: Any) -> Any:
        if parser.prog != f"echelon {command}":
            return parse(parser, *given, **more)
        raise ParserFound(parser)

    parse = argparse.ArgumentParser.parse_known_args
    LazyEpilogParser.parse_known_args = stop  # type: ignore[method-assign]
    LazyEpilogParser.parse_known_intermixed_args = stop  # type: ignore[method-assign]
    try:
        run_command(command.split())
    except ParserFound as found:
        return found.parser
    finally:
        del LazyEpilogParser.parse_known_args
        del LazyEpilogParser.parse_known_intermixed_args
    raise AssertionError(f"echelon {command} has no parser")


def describe_command(command: str, parser: argparse.ArgumentParser, summary: str) -> dict[str, Any]:
    """Return a command as the file has it."""
    options, positional = {}, []
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction):
            continue
        said = describe_argument(command, action)
        if not action.option_strings:
            positional.append(said)
        for name in action.option_strings:
            options[name] = {"help": shorten(action.help or ""), **said}
    return {"summary": summary, "options": options, "positional": positional}


def describe_argument(command: str, action: argparse.Action) -> dict[str, Any]:
    """Return what an argument takes: choices, or a kind of values; nothing if it is a flag."""
    if action.nargs == 0:
        return {}
    names = (action.metavar, action.dest)
    takes: Any = next((KINDS[str(name)] for name in names if str(name) in KINDS), "")
    takes = OWN_KINDS.get((command, action.dest), list(map(str, action.choices or ())) or takes)
    said: dict[str, Any] = {"takes": takes}
    if action.nargs in ("?", "*"):
        said["optional"] = True
    if action.nargs in ("*", "+"):
        said["many"] = True
    return said


def shorten(text: str) -> str:
    """Return the first sentence of a help text, in one line that a menu can show."""
    line = " ".join(text.split()).partition(". ")[0].replace("%%", "%").rstrip(".")
    return line if len(line) <= MAX_HELP else line[: MAX_HELP - 1].rstrip() + "…"


def describe_commands() -> dict[str, Any]:
    """Return all commands but those that scripts call."""
    typed = {
        name: command.summary
        for name, command in {**SUBCOMMANDS, **RECIPE_COMMANDS}.items()
        if not command.summary.endswith("call this")
    }
    found = {}
    for name, summary in {**typed, **INNER_COMMANDS}.items():
        parser = find_parser(name)
        found[name] = describe_command(name, parser, summary)
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                helps = {choice.dest: choice.help for choice in action._choices_actions}
                for inner, inner_parser in action.choices.items():
                    path = f"{name} {inner}"
                    found[path] = describe_command(path, inner_parser, shorten(helps[inner] or ""))
    return found


def describe_settings() -> dict[str, Any]:
    """Return all settings but those of experiments."""
    units = [field.name for field in fields(schema.Interval)]
    found = {}
    for setting in list_settings():
        if setting.default.startswith("."):  # an interval
            found |= {f"{setting.name}.{u}": {"help": shorten(setting.text)} for u in units}
            continue
        default = setting.default[1:]
        key = "launch.kind" if setting.name == "launch" else setting.name
        said: dict[str, Any] = {"help": shorten(f"[{default}] {setting.text}")}
        if default in ("true", "false"):
            said["takes"] = ["true", "false"]
        elif key in LISTS:
            said |= {"takes": list(LISTS[key]), "list": True}
        elif key == "track.wandb.mode":
            said["takes"] = list(schema.WANDB_MODES)
        elif takes := schema.CHOICES.get(key) or SETTING_KINDS.get(key):
            said["takes"] = takes if isinstance(takes, str) else list(takes)
        found[setting.name] = said
    return found


def describe_groups() -> dict[str, str]:
    """Return what the groups of settings are about, and the groups in them."""
    found = {name: shorten(classes[0].__doc__ or "") for name, classes in GROUPS.items()}
    sections = {"trainer.early_stop": schema.EarlyStopConfig, "launch.k8s": schema.KubernetesConfig}
    sections |= {"track.wandb": schema.WandbConfig, "notify.mail": schema.MailConfig}
    sections |= {"track.tensorboard": schema.TensorBoardConfig}
    return found | {name: shorten(section.__doc__ or "") for name, section in sections.items()}


def describe_experiments() -> dict[str, Any]:
    """Return the bundled experiments and their settings."""
    names = sorted(p.stem for p in (SOURCE / "echelon/conf/experiment").glob("*.yaml"))
    return {
        name: {
            setting.name: {"help": shorten(f"[{setting.default[1:].strip()}] {setting.text}")}
            for setting in describe_bundled_settings(name).settings
        }
        for name in names
        if name != "own"
    }


def main() -> int:
    table = {
        "commands": describe_commands(),
        "settings": describe_settings(),
        "groups": describe_groups(),
        "experiments": describe_experiments(),
    }
    text = json.dumps(table, indent=1, ensure_ascii=False) + "\n"
    if sys.argv[1:] != ["--check"]:
        FILE.write_text(text, encoding="utf-8")
        return 0
    if FILE.exists() and FILE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{FILE} says otherwise than the code\n  hint: make completion-words", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

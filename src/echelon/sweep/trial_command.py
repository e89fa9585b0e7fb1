"""What a trial runs: an experiment with overrides, or another program with arguments.

An experiment of Echelon gets its parameters as overrides KEY=VALUE in Hydra's grammar. Any other
program is started as wandb's agent would start it, by a command with macros such as ${args}.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from echelon.config.untrusted import check_values
from echelon.errors import EchelonError, Fault
from echelon.sweep.sweep_file import SweepFile

METRICS_VARIABLE = "ECHELON_METRICS"
"""A program that is not an experiment appends a line of JSON to this file after each evaluation."""
DEFAULT_COMMAND = ("${env}", "${interpreter}", "${program}", "${args}")
"""wandb's own, for a sweep without `command`."""
_MACRO = re.compile(r"\$\{([^}]*)\}")
_KNOWN_MACROS = (
    *("env", "interpreter", "program", "args", "args_no_hyphens", "args_no_boolean_flags"),
    *("args_json", "args_no_equals"),
)
_VARIABLE_MACRO = re.compile(r"envvar:([A-Z0-9_]+)")
_PLAIN_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED_WORDS = ("null", "true", "false", "nan", "inf")


# --- which of the two ---


class TrialTarget(NamedTuple):
    """What all trials of a sweep run."""

    overrides: list[str]
    """Of every trial; the experiment is among them."""
    program: list[str]
    """The command of another program, with macros; empty for an experiment."""


def resolve_target(file: SweepFile, overrides: Sequence[str]) -> TrialTarget:
    """Decide what the trials run: by the command line, else by `program` and `command`."""
    names_experiment = any(word.startswith("experiment=") for word in overrides)
    if names_experiment or (file.program is None and file.command is None):
        return TrialTarget(list(overrides), [])
    echelon_overrides = _find_echelon_overrides(file)
    if echelon_overrides is not None:
        return TrialTarget([*echelon_overrides, *overrides], [])
    template = list(file.command or DEFAULT_COMMAND)
    faults = [fault for word in template for fault in _find_macro_faults(file, word)]
    if "${program}" in template and file.program is None:
        faults.append(Fault(f"{file.path}: the command has ${{program}}", "add  program: FILE"))
    if faults:
        raise EchelonError(*faults)
    program = [(file.program or word) if word == "${program}" else word for word in template]
    return TrialTarget(list(overrides), program)


def _find_echelon_overrides(file: SweepFile) -> list[str] | None:
    """Return the overrides that name an experiment of Echelon; None for another program."""
    command = [word for word in file.command or () if not _MACRO.fullmatch(word)]
    if "echelon" in command and command[command.index("echelon") + 1 :][:1] == ["train"]:
        return command[command.index("echelon") + 2 :]
    path = _find_program_file(file)
    if path is None or path.suffix != ".py":
        return None
    function = _find_experiment_function(path)
    arguments = [word for word in command if "=" in word]
    return [f"experiment={path}:{function}", *arguments] if function else None


def _find_program_file(file: SweepFile) -> Path | None:
    """Look where wandb's agent would find it, then beside the sweep's file."""
    for folder in (Path.cwd(), file.path.absolute().parent):
        if file.program and (folder / file.program).is_file():
            return folder / file.program
    return None


def _find_experiment_function(path: Path) -> str | None:
    """Return the name of the function that a file gives to echelon.main, without running it."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("echelon.main", "main"):
            match node.args:
                case [ast.Name(id=name), *_]:
                    return name
    return None


# --- overrides of an experiment ---


def format_overrides(parameters: Mapping[str, Any]) -> list[str]:
    """Return overrides KEY=VALUE, or raise EchelonError for what a sweep may not set.

    Whether the keys exist is left to the composition, which knows the nearest names.
    """
    return [
        f"{key}={format_override_value(value)}" for key, value in check_values(parameters).items()
    ]


def format_override_value(value: Any) -> str:
    """Write a value so that Hydra's grammar reads the same value back.

    Text is quoted unless it is a plain word, so that nothing in it is special.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        is_plain = _PLAIN_WORD.fullmatch(value) and value.lower() not in _RESERVED_WORDS
        return value if is_plain else _quote(value)
    assert isinstance(value, Sequence)
    return f"[{','.join(format_override_value(item) for item in value)}]"


def _quote(text: str) -> str:
    """In Hydra's grammar a backslash is special only before a quote."""
    slashes = re.sub(r"(\\+)(?='|$)", r"\1\1", text)
    return "'" + slashes.replace("'", "\\'") + "'"


def format_short_value(value: Any) -> str:
    """Write a value for people: four digits are enough."""
    return f"{value:.4g}" if isinstance(value, float) else format_override_value(value)


def describe_parameters(parameters: Mapping[str, Any]) -> str:
    """Write parameters on one line for people."""
    return " ".join(f"{key}={format_short_value(value)}" for key, value in parameters.items())


# --- arguments of a program ---


def _find_macro_faults(file: SweepFile, word: str) -> list[Fault]:
    return [
        Fault(
            f"{file.path}: the command has the unknown macro ${{{macro}}}",
            f"known: {', '.join(_KNOWN_MACROS)}, envvar:NAME",
        )
        for macro in _MACRO.findall(word)
        if macro not in _KNOWN_MACROS and not _VARIABLE_MACRO.fullmatch(macro)
    ]


def expand_macros(
    template: Sequence[str],
    parameters: Mapping[str, Any],
    extra_macros: Mapping[str, list[str]] | None = None,
) -> list[str]:
    """Return the words of a program. Each is one argument: nothing passes through a shell.

    `extra_macros` adds macros and replaces those of the same name.
    """
    macros = _build_list_macros(parameters) | dict(extra_macros or {})
    words: list[str] = []
    for word in template:
        whole = _MACRO.fullmatch(word)
        if whole and whole[1] in macros:
            words += macros[whole[1]]
        else:
            words.append(_MACRO.sub(_expand_variable, word))
    return words


def _build_list_macros(parameters: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the macros that expand to any number of words, as wandb defines them."""
    texts = {key: _format_argument_value(value) for key, value in parameters.items()}
    flags = [
        f"--{key}" if parameters[key] is True else f"--{key}={text}"
        for key, text in texts.items()
        if parameters[key] is not False
    ]
    return {
        "env": [],  # /usr/bin/env, which only a shell needs
        "interpreter": [sys.executable],
        "args": [f"--{key}={text}" for key, text in texts.items()],
        "args_no_hyphens": [f"{key}={text}" for key, text in texts.items()],
        "args_no_boolean_flags": flags,
        "args_no_equals": [word for key, text in texts.items() for word in (f"--{key}", text)],
        "args_json": [json.dumps(dict(parameters))],
    }


def _format_argument_value(value: Any) -> str:
    return json.dumps(value) if isinstance(value, list) else str(value)


def _expand_variable(macro: re.Match[str]) -> str:
    variable = _VARIABLE_MACRO.fullmatch(macro[1])
    return os.environ.get(variable[1], "") if variable else macro[0]

"""What a sweep runs: an experiment, whose settings the parameters are, or somebody else's program,
which is given them as wandb's agent would."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from echelon.errors import EchelonError, Fault
from echelon.sweep.sweep_file import SweepFile

METRICS_VARIABLE = "ECHELON_METRICS"
"""A program of another kind appends a line of JSON to this file after each evaluation."""
_DEFAULT_COMMAND = ("${env}", "${interpreter}", "${program}", "${args}")
_MACRO = re.compile(r"\$\{([^}]*)\}")
_KNOWN_MACROS = (
    *("env", "interpreter", "program", "args", "args_no_hyphens", "args_no_boolean_flags"),
    *("args_json", "args_no_equals"),
)
_VARIABLE_MACRO = re.compile(r"envvar:([A-Z0-9_]+)")


class TrialTarget(NamedTuple):
    overrides: list[str]
    """Overrides, that of the experiment among them."""
    program: list[str]
    """With macros; empty for an experiment."""


def resolve_target(file: SweepFile, words: Sequence[str]) -> TrialTarget:
    """By the command line, then by `program` and `command`."""
    named = any(word.startswith("experiment=") for word in words)
    if named or (file.program is None and file.command is None):
        return TrialTarget(list(words), [])
    own = _find_echelon_overrides(file)
    if own is not None:
        return TrialTarget([*own, *words], [])
    template = list(file.command or _DEFAULT_COMMAND)
    faults = [fault for word in template for fault in _macro_faults(file, word)]
    if "${program}" in template and file.program is None:
        faults.append(Fault(f"{file.path}: the command has ${{program}}", "add  program: FILE"))
    if faults:
        raise EchelonError(*faults)
    return TrialTarget(
        list(words), [(file.program or w) if w == "${program}" else w for w in template]
    )


def _find_echelon_overrides(file: SweepFile) -> list[str] | None:
    """The overrides by which an experiment of Echelon's is meant; None: another program."""
    command = [word for word in file.command or () if not _MACRO.fullmatch(word)]
    if "echelon" in command and command[command.index("echelon") + 1 :][:1] == ["train"]:
        return command[command.index("echelon") + 2 :]
    path = _find_program(file)
    if path is None or path.suffix != ".py":
        return None
    function = _find_main_function(path)
    rest = [word for word in command if "=" in word]
    return [f"experiment={path}:{function}", *rest] if function else None


def _find_program(file: SweepFile) -> Path | None:
    """Where wandb's agent would find it, or beside the sweep's file."""
    for folder in (Path.cwd(), file.path.absolute().parent):
        if file.program and (folder / file.program).is_file():
            return folder / file.program
    return None


def _find_main_function(path: Path) -> str | None:
    """The function that a file gives to echelon.main, without running the file."""
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


def _macro_faults(file: SweepFile, word: str) -> list[Fault]:
    return [
        Fault(
            f"{file.path}: the command has the unknown macro ${{{macro}}}",
            f"known: {', '.join(_KNOWN_MACROS)}, envvar:NAME",
        )
        for macro in _MACRO.findall(word)
        if macro not in _KNOWN_MACROS and not _VARIABLE_MACRO.fullmatch(macro)
    ]


def expand_macros(template: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """The words of a program. Each is one argument: nothing passes through a shell."""
    words: list[str] = []
    lists = _expand_list_macros(values)
    for word in template:
        whole = _MACRO.fullmatch(word)
        if whole and whole[1] in lists:
            words += lists[whole[1]]
        else:
            words.append(_MACRO.sub(_expand_variable, word))
    return words


def _expand_list_macros(values: Mapping[str, Any]) -> dict[str, list[str]]:
    pairs = {key: _format_argument(value) for key, value in values.items()}
    no_flags = [
        f"--{key}" if values[key] is True else f"--{key}={text}"
        for key, text in pairs.items()
        if values[key] is not False
    ]
    return {
        "env": [],  # /usr/bin/env, for a shell's sake
        "interpreter": [sys.executable],
        "args": [f"--{key}={text}" for key, text in pairs.items()],
        "args_no_hyphens": [f"{key}={text}" for key, text in pairs.items()],
        "args_no_boolean_flags": no_flags,
        "args_no_equals": [word for key, text in pairs.items() for word in (f"--{key}", text)],
        "args_json": [json.dumps(dict(values))],
    }


def _format_argument(value: Any) -> str:
    return json.dumps(value) if isinstance(value, list) else str(value)


def _expand_variable(macro: re.Match[str]) -> str:
    found = _VARIABLE_MACRO.fullmatch(macro[1])
    return os.environ.get(found[1], "") if found else macro[0]

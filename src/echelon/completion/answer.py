"""What may stand at the end of a command line that is being typed.

Commands, options and settings come from `words.json`, names of runs and sweeps from their folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

WORDS_FILE = os.path.join(os.path.dirname(__file__), "words.json")
_MAX_SIGNS = 500
"""So many folders are looked into for what they hold; of more, all are taken for runs."""
_RUN_SIGN = "config.json"
_SWEEP_SIGNS = ("sweep.json", "server.json")


class Candidate(NamedTuple):
    """A word that may stand there, and in a few words what it is.

    One that ends with = . : / or , is gone on with: shells put no blank behind it.
    """

    text: str
    about: str = ""


class Answer(NamedTuple):
    """What may stand there."""

    candidates: list[Candidate]
    paths: str = "words"
    """`files` or `folders` where the shell is to add those; else `words`."""


class TypedLine:
    """The words of a command line before the one that is completed, and what they are about."""

    def __init__(self, table: dict[str, Any], words: Sequence[str]) -> None:
        commands = table["commands"]
        path = " ".join(words[:2]) if " ".join(words[:2]) in commands else "".join(words[:1])
        self.table = table
        self.name = path
        self.command: dict[str, Any] | None = commands.get(path)
        self.rest = list(words[len(path.split()) :] if self.command else words)

    @property
    def is_program(self) -> bool:
        """Whether the words of another program have begun, behind `--`."""
        return "--" in self.rest

    def find_option(self, word: str) -> dict[str, Any] | None:
        """Return an option of the command by what was typed, or by a beginning that is its own."""
        options: dict[str, Any] = self.command["options"] if self.command else {}
        found = [name for name in options if word.startswith("--") and name.startswith(word)]
        name = word if word in options else found[0] if len(found) == 1 else ""
        return options.get(name)

    def list_positional(self) -> list[str]:
        """Return the words that are neither options nor values of options."""
        found, skips = [], False
        for word in self.rest:
            if skips:
                skips = False
            elif word.startswith("-"):
                option = self.find_option(word)
                skips = option is not None and "takes" in option and not option.get("optional")
            else:
                found.append(word)
        return found

    def find_value(self, setting: str, option: str, default: str) -> str:
        """Return the value of a setting or of an option where one of the two was typed."""
        value = default
        for word, following in zip(self.rest, [*self.rest[1:], ""], strict=False):
            if word.startswith((f"{setting}=", f"{option}=")):
                value = word.partition("=")[2]
            elif word == option:
                value = following or default
        return value

    @property
    def runs_folder(self) -> str:
        """The folder of all runs."""
        return os.path.expanduser(self.find_value("run.dir", "--dir", "runs"))


def complete(words: Sequence[str]) -> Answer:
    """Return what may stand in the place of the last of these words, which may be empty.

    The words are those behind `echelon`; each candidate is a whole word.
    """
    *before, current = words
    with open(WORDS_FILE, encoding="utf-8") as file:
        line = TypedLine(json.load(file), before)
    return _keep_matches(_complete_word(line, current), current)


def _keep_matches(answer: Answer, current: str) -> Answer:
    return answer._replace(candidates=[c for c in answer.candidates if c.text.startswith(current)])


def _complete_word(line: TypedLine, current: str) -> Answer:
    if line.command is None:
        return Answer([] if line.rest else list(_iter_commands(line.table["commands"])))
    if line.is_program:
        return Answer([], "files")
    option = line.find_option(line.rest[-1]) if line.rest else None
    is_option_value = option is not None and "takes" in option
    if option is not None and is_option_value and not option.get("optional"):
        return _complete_values(line, option, "", current)
    if current.startswith("--") and "=" in current:
        name, _, value = current.partition("=")
        given = line.find_option(name)
        return _complete_values(line, given, f"{name}=", value) if given else Answer([])
    if current.startswith("-"):
        return Answer([Candidate(n, o["help"]) for n, o in line.command["options"].items()])
    answer = _complete_positional(line, current)
    if option is not None and is_option_value:  # its value may be left out
        more = _complete_values(line, option, "", current)
        return Answer([*more.candidates, *answer.candidates], answer.paths)
    return answer


def _iter_commands(commands: dict[str, Any]) -> Iterator[Candidate]:
    yield from (Candidate(n, c["summary"]) for n, c in commands.items() if " " not in n)
    yield Candidate("--help", "all commands")
    yield Candidate("--version", "of Echelon, Python, torch, CUDA and Slurm")


def _complete_positional(line: TypedLine, current: str) -> Answer:
    """Complete a word that is no option: a command of the command, a run, a setting."""
    assert line.command is not None
    typed = line.list_positional()
    candidates: list[Candidate] = []
    if not line.rest:
        inner = f"{line.name} "
        candidates = [
            Candidate(name.removeprefix(inner), command["summary"])
            for name, command in line.table["commands"].items()
            if name.startswith(inner)
        ]
    paths = "words"
    places = line.command["positional"]
    for index, place in enumerate(places):
        is_last = index == len(places) - 1
        if index < len(typed) and not (is_last and place.get("many")):
            continue
        answer = _complete_values(line, place, "", current)
        known = {c.text for c in candidates}
        candidates += [c for c in answer.candidates if c.text not in known]
        paths = answer.paths if answer.paths != "words" else paths
        if not place.get("optional") or answer.paths != "words":
            break
    return Answer(candidates, paths)


# --- values ---


def _complete_values(line: TypedLine, taker: dict[str, Any], prefix: str, value: str) -> Answer:
    """Complete a value of an option, a setting or a place of the command.

    `taker` says what it takes: a list of choices, or the name of a kind of values.
    """
    takes = taker.get("takes", "")
    found = [] if isinstance(takes, str) else [Candidate(choice) for choice in takes]
    if taker.get("list") and value.startswith("["):
        start = max(value.rfind(","), 0) + 1
        ends = [f"{c.text}{end}" for c in found for end in ",]"]
        return Answer([Candidate(f"{prefix}{value[:start]}{end}") for end in ends])
    paths = "words"
    if takes in ("file", "folder"):
        paths = f"{takes}s"
    elif takes == "setting":
        return _complete_setting(line, value)
    elif isinstance(takes, str) and takes:
        found += _LISTERS[takes](line, value)
    return Answer([Candidate(f"{prefix}{c.text}", c.about) for c in found], paths)


def _complete_setting(line: TypedLine, word: str) -> Answer:
    """Complete KEY=VALUE, or a key: of all settings, the groups first."""
    settings = {**line.table["settings"], **_find_experiment_settings(line)}
    key, equals, value = word.partition("=")
    bare = key.lstrip("+~")
    if equals:
        setting = settings.get(bare)
        return _complete_values(line, setting, f"{key}=", value) if setting else Answer([])
    sign = key[: len(key) - len(bare)]
    groups = line.table["groups"]
    depth = bare.count(".")
    found = {}
    for name, setting in settings.items():
        parts = name.split(".")
        if not name.startswith(bare):
            continue
        if len(parts) - 1 <= depth:
            found[f"{sign}{name}="] = setting.get("help", "")
        else:
            group = ".".join(parts[: depth + 1])
            found[f"{sign}{group}."] = groups.get(group, "")
    return Answer([Candidate(text, about) for text, about in found.items()])


def _find_experiment_settings(line: TypedLine) -> dict[str, Any]:
    """Return the settings of the experiment that the line chooses: toy by default."""
    chosen = line.find_value("experiment", "", "toy")
    file, colon, function = chosen.rpartition(":")
    if not colon:
        found: dict[str, Any] = line.table["experiments"].get(chosen, {})
        return found
    from echelon.completion.file_settings import read_declared_settings

    return read_declared_settings(os.path.expanduser(file), function)


# --- names on this machine ---


def _list_runs(line: TypedLine, value: str) -> list[Candidate]:
    names = _list_folders(line.runs_folder, value, (_RUN_SIGN,))
    return [Candidate("latest", "the run that trained last"), *map(Candidate, names)]


def _list_run_names(line: TypedLine, value: str) -> list[Candidate]:
    return [Candidate(n) for n in _list_folders(line.runs_folder, value, (_RUN_SIGN,))]


def _list_sweeps(line: TypedLine, value: str) -> list[Candidate]:
    return [Candidate(n) for n in _list_folders(line.runs_folder, value, _SWEEP_SIGNS)]


def _list_folders(root: str, prefix: str, signs: Sequence[str]) -> list[str]:
    """Return the folders in a folder that begin with a prefix and hold one of some files."""
    names = sorted(name for name in _iter_folders(root) if name.startswith(prefix))
    if len(names) > _MAX_SIGNS:
        return names
    return [n for n in names if any(os.path.exists(os.path.join(root, n, s)) for s in signs)]


def _iter_folders(root: str) -> Iterator[str]:
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                is_shown = entry.name[0] != "." and entry.name.isprintable()
                if is_shown and entry.is_dir(follow_symlinks=False):
                    yield entry.name
    except OSError:
        return


def _list_snapshots(line: TypedLine, value: str) -> list[Candidate]:
    """Complete trainer.resume: auto, never, and snapshots of runs, RUNS/NAME/snapshots/best."""
    found = [
        Candidate("auto", "this run's newest valid snapshot"),
        Candidate("never", "begin anew"),
    ]
    if "/snapshots/" in value:
        folder = value.rpartition("/")[0]
        names = sorted(_iter_folders(os.path.expanduser(folder)), reverse=True)
        names = ["best"] * os.path.exists(os.path.join(os.path.expanduser(folder), "best")) + names
        return [Candidate(f"{folder}/{name}") for name in names]
    root = line.runs_folder
    runs = _list_folders(root, value.removeprefix(f"{root}/") if "/" in value else "", (_RUN_SIGN,))
    return [*found, *(Candidate(f"{root}/{name}/snapshots/", "of a run") for name in runs)]


def _list_experiments(line: TypedLine, value: str) -> list[Candidate]:
    """Complete experiment=: the bundled ones, and FILE.py:FUNCTION."""
    file, colon, _ = value.rpartition(":")
    if colon:
        from echelon.completion.file_settings import list_functions

        names = list_functions(os.path.expanduser(file))
        return [Candidate(f"{file}:{name}") for name in names]
    found = [Candidate(name, "comes with Echelon") for name in line.table["experiments"]]
    folder = value.rpartition("/")[0] + "/" * ("/" in value)
    try:
        with os.scandir(os.path.expanduser(folder) or ".") as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                if entry.name[0] != "." and entry.is_dir():
                    found.append(Candidate(f"{folder}{entry.name}/"))
                elif entry.name.endswith(".py"):
                    found.append(Candidate(f"{folder}{entry.name}:", "your file"))
    except OSError:
        pass
    return found


def _list_hosts(line: TypedLine, value: str) -> list[Candidate]:
    """Complete a name of ssh's configuration; patterns are none."""
    try:
        with open(os.path.expanduser("~/.ssh/config"), encoding="utf-8", errors="replace") as file:
            lines = [text.split() for text in file]
    except OSError:
        return []
    names = [name for words in lines if words and words[0].lower() == "host" for name in words[1:]]
    return [Candidate(name) for name in dict.fromkeys(names) if not set(name) & set("*?!")]


def _list_several_hosts(line: TypedLine, value: str) -> list[Candidate]:
    """Complete the last of several hosts: a,b or [a,b]."""
    start = max(value.rfind(","), value.rfind("[")) + 1
    hosts = [f"{value[:start]}{host.text}" for host in _list_hosts(line, value)]
    if value.startswith("["):
        return [Candidate(f"{host}{end}") for host in hosts for end in ",]"]
    return [Candidate(host) for host in hosts]


_LISTERS = {
    "run": _list_runs,
    "run name": _list_run_names,
    "sweep": _list_sweeps,
    "snapshot": _list_snapshots,
    "experiment": _list_experiments,
    "host": _list_hosts,
    "hosts": _list_several_hosts,
}
"""What returns the values of each kind that are on this machine."""

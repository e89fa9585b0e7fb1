"""Reading requirements files as pip does, with the place of every line kept for messages.

All that pip and uv are given is what was read and checked here: includes followed, comments and
continuations resolved, `-e` dropped, options taken out. So a byte-order mark, UTF-16 of a
PowerShell redirection or a circular include never reach them.
"""

from __future__ import annotations

import codecs
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from echelon.envs.indexes import hidden, insecure, plain_http
from echelon.errors import Fault, nearest
from echelon.utils.os_errors import describe_os_error

_ONE_LETTER = {
    "-r": "--requirement",
    "-c": "--constraint",
    "-e": "--editable",
    "-i": "--index-url",
    "-f": "--find-links",
}
_SWITCHES = ("--no-index", "--pre", "--prefer-binary", "--require-hashes")
_VALUED = (
    *("--requirement", "--constraint", "--editable", "--index-url", "--extra-index-url"),
    *("--find-links", "--trusted-host", "--no-binary", "--only-binary", "--use-feature"),
)
_URL = re.compile(r"^(?:[\w.-]+\s*(?:\[[^]]*\])?\s*@\s*)?((?:\w+\+)?[a-z][\w.-]*:.*)$", re.I)
_ARCHIVES = (".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tar")


class Wanted(NamedTuple):
    """One requirement and where it stands."""

    text: str
    """For pip and uv, as one line."""
    file: Path
    number: int

    @property
    def name(self) -> str:
        """Canonical; empty where the line does not tell, as for a path."""
        found = re.match(r"[A-Za-z0-9][\w.-]*", self.text)
        is_path = self.text.startswith((".", "/")) or re.match(r"(\w+\+)?\w+:", self.text)
        return canonicalize_name(found[0]) if found and not is_path else ""

    def where(self, source: Path) -> str:
        return f"{shown(self.file, source)}:{self.number}"


@dataclass
class Read:
    """All that a requirements file and its includes say."""

    files: list[Path] = field(default_factory=list)
    wanted: list[Wanted] = field(default_factory=list)
    constraints: list[Wanted] = field(default_factory=list)
    options: list[tuple[str, str]] = field(default_factory=list)
    """Of indexes; to be merged with pip's own."""
    urls: list[tuple[str, str]] = field(default_factory=list)
    """Each URL that something would be fetched from, and where it stands."""
    local: list[Path] = field(default_factory=list)
    """Projects and archives of the source that are installed."""
    variables: set[str] = field(default_factory=set)
    """The ${NAMES} that occur."""
    besides: str = ""
    """What else decides, as text."""
    faults: list[Fault] = field(default_factory=list)


class _Place(NamedTuple):
    file: Path
    number: int
    source: Path
    constraint: bool

    def __str__(self) -> str:
        return f"{shown(self.file, self.source)}:{self.number}"


def read(file: Path, source: Path, environ: Mapping[str, str]) -> Read:
    found = Read()
    _read_file(file, source, environ, False, (), found)
    return found


def add_line(
    found: Read, line: str, file: Path, number: int, source: Path, environ: Mapping[str, str]
) -> None:
    """One that stands in a file of another kind."""
    _line(line, _Place(file, number, source, False), environ, (file,), found)


def check_urls(found: Read, trusted: Iterable[str]) -> list[Fault]:
    """After all options are known: a later --trusted-host vouches for an earlier line."""
    hosts = [*trusted, *(value for name, value in found.options if name == "--trusted-host")]
    return [insecure(url, where) for url, where in found.urls if plain_http(url, hosts)]


def shown(file: Path, source: Path) -> str:
    return str(file.relative_to(source)) if file.is_relative_to(source) else str(file)


def decoded(data: bytes) -> str:
    """pip's rule: what the byte-order mark says, else UTF-8. Raises UnicodeDecodeError."""
    for mark, encoding in (
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
    ):
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding)
    return data.decode("utf-8")


def within(path: str, source: Path) -> Path | None:
    """A local path, resolved; None where it leaves the source, whose copy would not have it."""
    resolved = Path(os.path.realpath(source / path))
    return resolved if resolved.is_relative_to(Path(os.path.realpath(source))) else None


def outside(path: str, where: str) -> Fault:
    return Fault(
        f"{where}: {path} is outside of the source folder, so the copy that a job runs from "
        "would not have it",
        "move it into the source folder, or publish it to an index or as a wheel",
    )


# --- a file ---


def _read_file(
    file: Path,
    source: Path,
    environ: Mapping[str, str],
    constraint: bool,
    above: tuple[Path, ...],
    found: Read,
) -> None:
    if file not in found.files:
        found.files.append(file)
    try:
        text = decoded(file.read_bytes())
    except (OSError, UnicodeDecodeError) as error:
        is_os_error = isinstance(error, OSError)
        reason = describe_os_error(error) if is_os_error else "it is not UTF-8 text"
        found.faults.append(
            Fault(f"{shown(file, source)} cannot be read: {reason}", "mend the file")
        )
        return
    if "\0" in text:  # no path or name has one
        what = f"{shown(file, source)} is no text file: it has a zero byte in it"
        found.faults.append(Fault(what, "mend the file"))
        return
    for number, raw in _logical_lines(text):
        _line(raw, _Place(file, number, source, constraint), environ, (*above, file), found)


def _line(
    raw: str, place: _Place, environ: Mapping[str, str], above: tuple[Path, ...], found: Read
) -> None:
    line = _expanded(raw, place, environ, found)
    if line.startswith("-"):
        _option(line, place, environ, above, found)
    else:
        _requirement(line, place, found)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Continuations joined, comments cut; a comment between ends the joining, as with pip."""
    joined, first = "", 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        is_comment = line.lstrip().startswith("#")
        first = first or number
        if line.endswith("\\") and not is_comment:
            joined += line[:-1].strip() + " "
            continue
        whole = re.sub(r"(^|\s+)#.*$", "", joined + (line.lstrip() if joined else line)).strip()
        if whole:
            yield first, whole
        joined, first = "", 0


def _expanded(line: str, place: _Place, environ: Mapping[str, str], found: Read) -> str:
    for name in re.findall(r"\$\{([A-Z0-9_]+)\}", line):
        found.variables.add(name)
        if name in environ:
            line = line.replace(f"${{{name}}}", environ[name])
        else:
            found.faults.append(
                Fault(f"{place}: the variable {name} is not set", f"set it, or edit {place}")
            )
    return line


def _option(
    line: str, place: _Place, environ: Mapping[str, str], above: tuple[Path, ...], found: Read
) -> None:
    try:
        words = shlex.split(line)
    except ValueError as error:
        found.faults.append(Fault(f"{place}: {hidden(line)!r}: {error}", "mend the line"))
        return
    while words:
        name, value, words = _taken(words)
        if (name == "--requirement" and value) or (name == "--constraint" and value):
            _include(value, place, environ, name == "--constraint", above, found)
        elif name == "--editable" and value:
            _local(value, place, found)
        elif name in _SWITCHES or (name in _VALUED and value):
            _index(name, value, place, found)
        else:
            known = (
                f"give {name} a value" if name in _VALUED else nearest(name, [*_SWITCHES, *_VALUED])
            )
            found.faults.append(
                Fault(f"{place}: {hidden(line)!r} is no option of a requirements file", known)
            )
            return


def _taken(words: list[str]) -> tuple[str, str, list[str]]:
    """The first option with its value, spelt -rFILE, -r FILE, --x=VALUE or --x VALUE."""
    word, rest = words[0], words[1:]
    name, equals, value = word.partition("=")
    if word[:2] in _ONE_LETTER and not word.startswith("--"):
        name, value = _ONE_LETTER[word[:2]], word[2:].removeprefix("=")
        equals = value
    if name in _VALUED and not equals and rest:
        value, rest = rest[0], rest[1:]
    return name, value, rest


def _include(
    value: str,
    place: _Place,
    environ: Mapping[str, str],
    constraint: bool,
    above: tuple[Path, ...],
    found: Read,
) -> None:
    if re.match(r"(https?|file):", value):
        what = f"{place}: {hidden(value)} is elsewhere, so that it cannot be told when it changes"
        found.faults.append(Fault(what, "keep a copy of it in the source folder"))
        return
    relative = os.path.relpath(place.file.parent / value, place.source)
    target = within(relative, place.source)
    if target is None:
        found.faults.append(outside(value, str(place)))
        return
    target = Path(os.path.normpath(place.source / relative))
    if target in above:
        chain = " → ".join(shown(f, place.source) for f in (*above[above.index(target) :], target))
        found.faults.append(
            Fault(f"{place}: the files include each other in a circle: {chain}", "break it")
        )
    elif not os.path.isfile(target):  # pathlib raises for a name that is too long
        found.faults.append(
            Fault(
                f"{place}: {value} is included, and there is no such file",
                f"make it, or edit {place}",
            )
        )
    else:
        _read_file(target, place.source, environ, constraint, above, found)


def _index(name: str, value: str, place: _Place, found: Read) -> None:
    if name == "--find-links" and "://" not in value:
        value = _folder_of_links(value, place, found)
    if name in ("--index-url", "--extra-index-url", "--find-links"):
        found.urls.append((value, str(place)))
    found.options.append((name, value))


def _folder_of_links(value: str, place: _Place, found: Read) -> str:
    """An absolute one is a place of the machine, like an index; a relative one is the source's."""
    if os.path.isabs(value):
        return value
    beside = place.file.parent / value
    relative = os.path.relpath(
        beside if os.path.exists(beside) else place.source / value, place.source
    )
    folder = within(relative, place.source)
    if folder is None:
        found.faults.append(outside(value, str(place)))
        return value
    found.local.append(folder)
    return folder.as_uri()


def _requirement(line: str, place: _Place, found: Read) -> None:
    bare = re.split(r"\s+--?[a-z]", line, maxsplit=1)[0].strip()
    marker_less = bare.partition(" ;")[0].strip()
    if url := _URL.match(bare):
        _url(url[1], line, place, found)
    elif (
        os.sep in marker_less.partition("@")[0]
        or marker_less.startswith(".")
        or marker_less.endswith(_ARCHIVES)
    ):
        _local(line, place, found)
    else:
        try:
            Requirement(bare)
        except InvalidRequirement as error:
            reason = str(error).splitlines()[0]
            found.faults.append(
                Fault(
                    f"{place}: {hidden(bare)!r} is no requirement: {reason}",
                    "a line is a name with optional versions (numpy>=1.24,<3), a path in the "
                    "source, or a URL",
                )
            )
            return
        _add(line, place, found)


def _url(url: str, line: str, place: _Place, found: Read) -> None:
    if url.lower().startswith("file:"):
        found.faults.append(outside(url, str(place)))
        return
    found.urls.append((url, str(place)))
    _add(line, place, found)


def _local(text: str, place: _Place, found: Read) -> None:
    """A project or archive of the source. `-e` is gone by now: a link back to the source would
    make jobs see later edits."""
    if _URL.match(text) and "://" in text:
        _url(_URL.match(text)[1], text, place, found)  # type: ignore[index]
        return
    bare = re.split(r"\s+(?:--?[a-z]|;)", text, maxsplit=1)[0].strip()
    path = re.sub(r"\[[^]/]*\]$", "", bare)
    target = within(path, place.source)
    if target is None:
        found.faults.append(outside(path, str(place)))
    elif not os.path.exists(target):
        found.faults.append(
            Fault(f"{place}: there is no {path} in the source folder", f"make it, or edit {place}")
        )
    else:
        found.local.append(target)
        inside = os.path.relpath(target, os.path.realpath(place.source))
        start = "." if inside == "." else f"./{inside}"
        _add(start + text[len(path) :], place, found)


def _add(line: str, place: _Place, found: Read) -> None:
    to = found.constraints if place.constraint else found.wanted
    to.append(Wanted(line, place.file, place.number))

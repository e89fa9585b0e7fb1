"""Reading requirements files as pip does, remembering the location of every line for messages.

pip and uv are given only what was read and checked here: includes are followed, comments and
continuations resolved, `-e` dropped, options collected. So a byte-order mark, UTF-16 from a
PowerShell redirection or a circular include never reaches them.
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

from echelon.environments.package_indexes import hide_passwords, is_insecure, make_insecure_fault
from echelon.errors import Fault, suggest_nearest
from echelon.utils.os_errors import format_os_error_reason

_SHORT_OPTIONS = {
    "-r": "--requirement",
    "-c": "--constraint",
    "-e": "--editable",
    "-i": "--index-url",
    "-f": "--find-links",
}
_SWITCHES = ("--no-index", "--pre", "--prefer-binary", "--require-hashes")
_OPTIONS_WITH_VALUE = (
    *("--requirement", "--constraint", "--editable", "--index-url", "--extra-index-url"),
    *("--find-links", "--trusted-host", "--no-binary", "--only-binary", "--use-feature"),
)
_URL_PATTERN = re.compile(
    r"^(?:[\w.-]+\s*(?:\[[^]]*\])?\s*@\s*)?((?:\w+\+)?[a-z][\w.-]*:.*)$", re.I
)
"""A URL, or `name @ URL`."""
_ARCHIVE_SUFFIXES = (".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tar")


class RequirementLine(NamedTuple):
    """One requirement and where it is written."""

    text: str
    """The requirement as one line for pip and uv."""
    file: Path
    line_number: int

    @property
    def name(self) -> str:
        """The canonical package name; empty if the line does not name one, as for a path."""
        found = re.match(r"[A-Za-z0-9][\w.-]*", self.text)
        is_path = self.text.startswith((".", "/")) or re.match(r"(\w+\+)?\w+:", self.text)
        return canonicalize_name(found[0]) if found and not is_path else ""

    def format_location(self, source: Path) -> str:
        """Return FILE:LINE, relative to the source folder."""
        return f"{format_relative_path(self.file, source)}:{self.line_number}"


@dataclass
class ParsedDependencies:
    """Everything that a dependency file and the files it includes say."""

    files: list[Path] = field(default_factory=list)
    requirements: list[RequirementLine] = field(default_factory=list)
    constraints: list[RequirementLine] = field(default_factory=list)
    options: list[tuple[str, str]] = field(default_factory=list)
    """Index options, to be merged with pip's own settings."""
    urls: list[tuple[str, str]] = field(default_factory=list)
    """Each URL that something would be downloaded from, and its location."""
    local_paths: list[Path] = field(default_factory=list)
    """Projects and archives inside the source folder that are installed."""
    variables: set[str] = field(default_factory=set)
    """Names of the ${VARIABLES} that occur; their values are part of the cache key."""
    extra_key: str = ""
    """Anything else that the cache key depends on, as text."""
    faults: list[Fault] = field(default_factory=list)


class _LineContext(NamedTuple):
    """Where a line is written; `str()` gives FILE:LINE for messages."""

    file: Path
    line_number: int
    source: Path
    is_constraint: bool

    def __str__(self) -> str:
        return f"{format_relative_path(self.file, self.source)}:{self.line_number}"


def read_requirements(file: Path, source: Path, environ: Mapping[str, str]) -> ParsedDependencies:
    """Return everything that a requirements file and the files it includes say."""
    parsed = ParsedDependencies()
    _parse_file(file, source, environ, False, (), parsed)
    return parsed


def add_line(
    parsed: ParsedDependencies,
    line: str,
    file: Path,
    number: int,
    source: Path,
    environ: Mapping[str, str],
) -> None:
    """Parse a requirement that is written in a file of another kind, such as environment.yml."""
    _parse_line(line, _LineContext(file, number, source, False), environ, (file,), parsed)


def find_insecure_url_faults(
    parsed: ParsedDependencies, trusted_hosts: Iterable[str]
) -> list[Fault]:
    """Return a fault for every insecure URL. Called when all options are known, as a later
    --trusted-host also covers an earlier line."""
    hosts = [*trusted_hosts, *(value for name, value in parsed.options if name == "--trusted-host")]
    return [
        make_insecure_fault(url, where) for url, where in parsed.urls if is_insecure(url, hosts)
    ]


def format_relative_path(file: Path, source: Path) -> str:
    """Return the path relative to the source folder, if it is inside."""
    return str(file.relative_to(source)) if file.is_relative_to(source) else str(file)


def decode_text(data: bytes) -> str:
    """Return the text, decoded by pip's rule: as the byte-order mark says, else UTF-8. Raises
    UnicodeDecodeError."""
    for mark, encoding in (
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
    ):
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding)
    return data.decode("utf-8")


def resolve_within(path: str, source: Path) -> Path | None:
    """Return the real path, or None if it is outside of the source folder: a copy of the source
    would lack it."""
    resolved = Path(os.path.realpath(source / path))
    return resolved if resolved.is_relative_to(Path(os.path.realpath(source))) else None


def make_outside_fault(path: str, location: str) -> Fault:
    """Return the fault for a path outside of the source folder."""
    return Fault(
        f"{location}: {path} is outside of the source folder, so the copy that a job runs in "
        "would not have it",
        "move it into the source folder, or publish it to an index or as a wheel",
    )


# --- files and lines ---


def _parse_file(
    file: Path,
    source: Path,
    environ: Mapping[str, str],
    is_constraint: bool,
    including: tuple[Path, ...],
    parsed: ParsedDependencies,
) -> None:
    """Parse a file and the files it includes. `including` is the chain of files that led to it."""
    if file not in parsed.files:
        parsed.files.append(file)
    try:
        text = decode_text(file.read_bytes())
    except (OSError, UnicodeDecodeError) as error:
        is_os_error = isinstance(error, OSError)
        reason = format_os_error_reason(error) if is_os_error else "it is not UTF-8 text"
        parsed.faults.append(
            Fault(f"{format_relative_path(file, source)} cannot be read: {reason}", "fix the file")
        )
        return
    if "\0" in text:  # no path or name contains one
        what = f"{format_relative_path(file, source)} is not a text file: it contains a zero byte"
        parsed.faults.append(Fault(what, "fix the file"))
        return
    for number, raw in _iter_logical_lines(text):
        _parse_line(
            raw,
            _LineContext(file, number, source, is_constraint),
            environ,
            (*including, file),
            parsed,
        )


def _parse_line(
    raw: str,
    context: _LineContext,
    environ: Mapping[str, str],
    including: tuple[Path, ...],
    parsed: ParsedDependencies,
) -> None:
    """Parse one logical line: an option or a requirement."""
    line = _expand_variables(raw, context, environ, parsed)
    if line.startswith("-"):
        _parse_options(line, context, environ, including, parsed)
    else:
        _parse_requirement(line, context, parsed)


def _iter_logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text, with continuations joined and comments removed. As with pip, a
    comment line ends a continuation."""
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


def _expand_variables(
    line: str, context: _LineContext, environ: Mapping[str, str], parsed: ParsedDependencies
) -> str:
    """Return the line with ${NAME} replaced; add a fault for a variable that is not set."""
    for name in re.findall(r"\$\{([A-Z0-9_]+)\}", line):
        parsed.variables.add(name)
        if name in environ:
            line = line.replace(f"${{{name}}}", environ[name])
        else:
            parsed.faults.append(
                Fault(f"{context}: the variable {name} is not set", f"set it, or edit {context}")
            )
    return line


def _parse_options(
    line: str,
    context: _LineContext,
    environ: Mapping[str, str],
    including: tuple[Path, ...],
    parsed: ParsedDependencies,
) -> None:
    """Parse a line of options, of which there may be several."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        parsed.faults.append(Fault(f"{context}: {hide_passwords(line)!r}: {error}", "fix the line"))
        return
    while words:
        name, value, words = _split_option(words)
        if (name == "--requirement" and value) or (name == "--constraint" and value):
            _read_include(value, context, environ, name == "--constraint", including, parsed)
        elif name == "--editable" and value:
            _add_local_path(value, context, parsed)
        elif name in _SWITCHES or (name in _OPTIONS_WITH_VALUE and value):
            _add_index_option(name, value, context, parsed)
        else:
            known = (
                f"give {name} a value"
                if name in _OPTIONS_WITH_VALUE
                else suggest_nearest(name, [*_SWITCHES, *_OPTIONS_WITH_VALUE])
            )
            parsed.faults.append(
                Fault(
                    f"{context}: {hide_passwords(line)!r} is not an option of a requirements file",
                    known,
                )
            )
            return


def _split_option(words: list[str]) -> tuple[str, str, list[str]]:
    """Return the first option, its value and the remaining words. It may be written -rFILE, -r
    FILE, --x=VALUE or --x VALUE."""
    word, rest = words[0], words[1:]
    name, equals, value = word.partition("=")
    if word[:2] in _SHORT_OPTIONS and not word.startswith("--"):
        name, value = _SHORT_OPTIONS[word[:2]], word[2:].removeprefix("=")
        equals = value
    if name in _OPTIONS_WITH_VALUE and not equals and rest:
        value, rest = rest[0], rest[1:]
    return name, value, rest


def _read_include(
    value: str,
    context: _LineContext,
    environ: Mapping[str, str],
    is_constraint: bool,
    including: tuple[Path, ...],
    parsed: ParsedDependencies,
) -> None:
    """Read the file of a -r or -c option, if it is inside the source and not already being read."""
    if re.match(r"(https?|file):", value):
        what = f"{context}: {hide_passwords(value)} is not in the source folder"
        what += ", so a change of it would go unnoticed"
        parsed.faults.append(Fault(what, "keep a copy of it in the source folder"))
        return
    relative = os.path.relpath(context.file.parent / value, context.source)
    target = resolve_within(relative, context.source)
    if target is None:
        parsed.faults.append(make_outside_fault(value, str(context)))
        return
    target = Path(os.path.normpath(context.source / relative))
    if target in including:
        chain = " → ".join(
            format_relative_path(f, context.source)
            for f in (*including[including.index(target) :], target)
        )
        parsed.faults.append(
            Fault(
                f"{context}: the files include each other in a circle: {chain}",
                "remove one of the includes",
            )
        )
    elif not os.path.isfile(target):  # pathlib raises for a name that is too long
        parsed.faults.append(
            Fault(
                f"{context}: {value} is included, but does not exist",
                f"create it, or edit {context}",
            )
        )
    else:
        _parse_file(target, context.source, environ, is_constraint, including, parsed)


def _add_index_option(
    name: str, value: str, context: _LineContext, parsed: ParsedDependencies
) -> None:
    """Record an option about indexes."""
    if name == "--find-links" and "://" not in value:
        value = _resolve_find_links(value, context, parsed)
    if name in ("--index-url", "--extra-index-url", "--find-links"):
        parsed.urls.append((value, str(context)))
    parsed.options.append((name, value))


def _resolve_find_links(value: str, context: _LineContext, parsed: ParsedDependencies) -> str:
    """Return the address of a --find-links folder.

    An absolute path belongs to the machine, like an index; a relative one must be inside the
    source.
    """
    if os.path.isabs(value):
        return value
    beside = context.file.parent / value
    relative = os.path.relpath(
        beside if os.path.exists(beside) else context.source / value, context.source
    )
    folder = resolve_within(relative, context.source)
    if folder is None:
        parsed.faults.append(make_outside_fault(value, str(context)))
        return value
    parsed.local_paths.append(folder)
    return folder.as_uri()


def _parse_requirement(line: str, context: _LineContext, parsed: ParsedDependencies) -> None:
    """Record a requirement: a URL, a local path or a name with versions."""
    bare = re.split(r"\s+--?[a-z]", line, maxsplit=1)[0].strip()
    marker_less = bare.partition(" ;")[0].strip()
    if url := _URL_PATTERN.match(bare):
        _add_url(url[1], line, context, parsed)
    elif (
        os.sep in marker_less.partition("@")[0]
        or marker_less.startswith(".")
        or marker_less.endswith(_ARCHIVE_SUFFIXES)
    ):
        _add_local_path(line, context, parsed)
    else:
        try:
            Requirement(bare)
        except InvalidRequirement as error:
            reason = str(error).splitlines()[0]
            parsed.faults.append(
                Fault(
                    f"{context}: {hide_passwords(bare)!r} is not a requirement: {reason}",
                    "write a name with optional versions (numpy>=1.24,<3), a path in the "
                    "source, or a URL",
                )
            )
            return
        _add_requirement(line, context, parsed)


def _add_url(url: str, line: str, context: _LineContext, parsed: ParsedDependencies) -> None:
    """Record a requirement that is a URL; file: URLs are refused."""
    if url.lower().startswith("file:"):
        parsed.faults.append(make_outside_fault(url, str(context)))
        return
    parsed.urls.append((url, str(context)))
    _add_requirement(line, context, parsed)


def _add_local_path(text: str, context: _LineContext, parsed: ParsedDependencies) -> None:
    """Record a project or archive of the source folder.

    `-e` was already dropped: a link back to the source would let a job see later edits.
    """
    if _URL_PATTERN.match(text) and "://" in text:
        _add_url(_URL_PATTERN.match(text)[1], text, context, parsed)  # type: ignore[index]
        return
    bare = re.split(r"\s+(?:--?[a-z]|;)", text, maxsplit=1)[0].strip()
    path = re.sub(r"\[[^]/]*\]$", "", bare)
    target = resolve_within(path, context.source)
    if target is None:
        parsed.faults.append(make_outside_fault(path, str(context)))
    elif not os.path.exists(target):
        parsed.faults.append(
            Fault(
                f"{context}: there is no {path} in the source folder",
                f"create it, or edit {context}",
            )
        )
    else:
        parsed.local_paths.append(target)
        inside = os.path.relpath(target, os.path.realpath(context.source))
        start = "." if inside == "." else f"./{inside}"
        _add_requirement(start + text[len(path) :], context, parsed)


def _add_requirement(line: str, context: _LineContext, parsed: ParsedDependencies) -> None:
    """Append the line to the constraints or to the requirements."""
    target = parsed.constraints if context.is_constraint else parsed.requirements
    target.append(RequirementLine(line, context.file, context.line_number))

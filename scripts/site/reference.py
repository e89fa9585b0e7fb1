"""The reference pages, read from the code: commands, settings, exit codes, files of a run, Python.

Nothing here is written by hand, so these pages say what the code says. Modules of the package are
imported where they are fast; the Python API is read from its source, because its modules import
torch.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import echelon
import echelon.data
from echelon import cli, errors
from echelon.config import settings_help
from echelon.runs.run_folder import Run

ROOT = Path(__file__).parents[2]

_HELP_WIDTH = 82
_SECOND_WORDS = {
    "sweep": ("show",),
    "notify": ("test",),
    "data": ("look", "check", "pack", "movielens"),
    "env": ("build", "show", "clean"),
    "setup": ("cluster",),
}
"""Commands of two words with a help page of their own."""
_FOR_SCRIPTS = "this"
"""The last word of a summary such as `be one node of a run; scripts call this`."""


# --- commands ---


def render_commands() -> str:
    """Return all commands with their help pages, those that only scripts call at the end."""
    names = sorted(cli.SUBCOMMANDS, key=lambda n: cli.SUBCOMMANDS[n].summary.endswith(_FOR_SCRIPTS))
    rows = [f"| [`{name}`](#{name}) | {cli.SUBCOMMANDS[name].summary} |" for name in names]
    sections = [
        f"## `echelon {name}` {{ #{name} }}\n\n```text\n{read_help([name])}\n```\n"
        + "".join(_render_second(name, word) for word in _SECOND_WORDS.get(name, ()))
        for name in names
    ]
    return "\n".join(["| command | what it does |", "|---|---|", *rows, "", *sections])


def _render_second(name: str, word: str) -> str:
    text = read_help([name, word])
    return f"\n### `echelon {name} {word}` {{ #{name}-{word} }}\n\n```text\n{text}\n```\n"


def read_help(words: list[str]) -> str:
    """Return what `echelon WORDS --help` prints on a terminal of a fixed width."""
    printed = io.StringIO()
    width = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(_HELP_WIDTH)
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            cli.run_command([*words, "--help"])
    finally:
        os.environ.pop("COLUMNS")
        if width is not None:
            os.environ["COLUMNS"] = width
    return printed.getvalue().rstrip()


# --- settings ---


def render_settings() -> str:
    """Return all settings in their groups, each with its default and what it does."""
    settings = settings_help.list_settings()
    groups = [*settings_help.GROUPS, "other"]
    return "\n".join(_render_group(name, settings) for name in groups)


def _render_group(name: str, settings: list[settings_help.SettingHelp]) -> str:
    def is_in_group(setting: settings_help.SettingHelp) -> bool:
        first = setting.name.partition(".")[0]
        return first == name if name != "other" else first not in settings_help.GROUPS

    classes = settings_help.GROUPS.get(name)
    about = " ".join((inspect.getdoc(classes[0]) or "").split()) if classes else "Of the whole run."
    rows = []
    for setting in filter(is_in_group, settings):
        default = setting.default
        if default.startswith("."):  # of an interval, with its units
            default = f"{default.partition('  ')[0]} (or `.steps`, `.minutes`)"
            default = f"`{default.partition(' ')[0]}`{default[len(default.partition(' ')[0]) :]}"
        else:
            default = f"`{default.removeprefix('=')}`" if default != "=" else ""
        text = _escape_cell(setting.text)
        rows.append(f"| `{setting.name}`{{ #{setting.name} }} | {_escape_cell(default)} | {text} |")
    table = "\n".join(["| setting | default | what it does |", "|---|---|---|", *rows])
    return f"## {name} {{ #{name}-group }}\n\n{about}\n\n{table}\n"


def _escape_cell(text: str) -> str:
    """Return a text for a cell of a table: nothing but code is taken for Markdown or HTML."""
    parts = text.split("`")
    quoted = [re.sub(r"([*|]|__)", r"\\\1", part) for part in parts[::2]]
    parts[::2] = [re.sub(r"<(?=\w)", "&lt;", part) for part in quoted]
    return "`".join(parts)


# --- exit codes ---


def render_exit_codes() -> str:
    """Return a table of the exit codes with the sentences under them in the code."""
    docs = _read_strings_below(Path(errors.__file__), "ExitCode")
    docs["OK"] = "Finished."
    rows = [f"| `{int(code)}` | `{code.name}` | {docs[code.name]} |" for code in errors.ExitCode]
    return "\n".join(["| code | name | meaning |", "|---|---|---|", *rows])


def _read_strings_below(file: Path, class_name: str) -> dict[str, str]:
    """Return the strings under the members of a class, by name."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name).body
    found = {}
    for member, below in itertools.pairwise(body):
        match member, below:
            case (
                ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
    return found


# --- files of a run ---


def render_run_files() -> str:
    """Return every path that the code knows in a run folder, first those that are for people."""
    files = dict(_iter_run_files())
    shown = {p: t for p, t in files.items() if not _is_hidden(p)}
    hidden = {p: t for p, t in files.items() if _is_hidden(p)}
    return "\n\n".join(
        [
            _render_paths(shown),
            "## Hidden files\n\nThese are for Echelon's own processes. They may change.",
            _render_paths(hidden),
        ]
    )


def _is_hidden(path: str) -> bool:
    return path.rpartition("/")[2].startswith(".") or path.endswith(
        (".stack", ".stacks", ".stamps")
    )


def _iter_run_files() -> Iterator[tuple[str, str]]:
    root = Path("/runs/NAME")
    run = Run(root)
    for name, member in vars(Run).items():
        is_property = isinstance(member, property)
        function = member.fget if isinstance(member, property) else member
        if not name.endswith(("_file", "_folder", "_answer_of_rank")) or name.startswith("read_"):
            continue
        if name == "submission_file":  # it is looked for, beside the folder too
            path: str | None = "submission.json"
        elif is_property:
            path = os.path.relpath(getattr(run, name), root)
        else:
            words = list(inspect.signature(function).parameters)[1:]
            if "config" in words:
                continue
            path = os.path.relpath(getattr(run, name)(*(_PLACEHOLDERS[w] for w in words)), root)
        text = re.sub(r" See `[\w.]+`\.", "", " ".join((inspect.getdoc(function) or "").split()))
        text = re.sub(r"^Return the ", "The ", text)
        assert text, f"Run.{name} has no docstring"
        yield f"{path}/" if name.endswith("_folder") else path, text


_PLACEHOLDERS = {
    **{"node": "K", "rank": "N", "time_text": "TIME", "request_id": "ID"},
    **{"attempt": "ATTEMPT", "tracker": "TRACKER"},
}


def _render_paths(files: dict[str, str]) -> str:
    rows = [f"| `{path}` | {_escape_cell(text)} |" for path, text in sorted(files.items())]
    return "\n".join(["| file | what is in it |", "|---|---|", *rows])


# --- the Python API ---


def render_python_api() -> str:
    """Return the public names of `echelon`, `echelon.data` and `echelon.optim` with their
    docstrings."""
    core = [name for name in echelon.__all__ if name in echelon._MODULE_OF]
    parts = [_render_object(f"echelon.{name}", echelon._MODULE_OF[name], name) for name in core]
    parts += [
        _render_object(f"echelon.data.{name}", echelon.data._MODULE_OF[name], name)
        for name in echelon.data.__all__
    ]
    parts += [
        _render_object(f"echelon.optim.{name}", "echelon.optim", name)
        for name in ("RowAdam", "RowSGD")
    ]
    parts.append(_render_object("job", "echelon.python_api", "Job"))
    return "\n\n".join(parts)


_WITH_METHODS = ("Session", "TrainingInfo", "Job")
"""Classes whose methods users call; those of the others are called by Echelon and by torch."""


def _render_object(title: str, module: str, name: str) -> str:
    """Return a section on a function, or on a class with its public methods."""
    path = ROOT / "src" / Path(*module.split("."))
    file = path.with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    node = next(
        n for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == name
    )
    lines = [f"## `{title}` {{ #{title} }}"]
    if isinstance(node, ast.FunctionDef):
        lines += [
            _render_signature(title, node),
            _quote_prose(render_docstring(_read_docstring(node))),
        ]
        return "\n\n".join(lines)
    start = next((n for n in node.body if getattr(n, "name", "") == "__init__"), None)
    if isinstance(start, ast.FunctionDef) and title != "echelon.Session":
        lines.append(_render_signature(title, start, is_method=True))
    lines.append(_quote_prose(render_docstring(_read_docstring(node))))
    for method in node.body if name in _WITH_METHODS else ():
        if not isinstance(method, ast.FunctionDef) or method.name.startswith("_"):
            continue
        if not (text := _read_docstring(method)):
            continue
        decorators = [ast.unparse(each) for each in method.decorator_list]
        owner = title.rpartition(".")[2].lower() if title == "echelon.Session" else title
        full = f"{owner}.{method.name}"
        lines.append(f"### `{full}` {{ #{title}.{method.name} }}")
        if "property" not in decorators:
            lines.append(_render_signature(full, method, is_method=True))
        lines.append(_quote_prose(render_docstring(text)))
    return "\n\n".join(lines)


def _read_docstring(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Return a docstring without the indentation of its code, and with its own: where nothing but
    an example follows the first line, `inspect.cleandoc` would take away that too."""
    text = ast.get_docstring(node, clean=False) or ""
    return re.sub(rf"^ {{{node.col_offset + 4}}}", "", text, flags=re.MULTILINE).strip()


def _render_signature(title: str, node: ast.FunctionDef, is_method: bool = False) -> str:
    arguments = node.args
    if is_method:
        first = arguments.posonlyargs or arguments.args
        first.pop(0)
    given = ast.unparse(arguments)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    text = f"{title}({given}){returns}"
    if len(text) > 88:
        inner = [ast.unparse(arg) for arg in _split_arguments(arguments)]
        text = f"{title}(\n" + "".join(f"    {each},\n" for each in inner) + f"){returns}"
    return f"```python\n{text}\n```"


def _split_arguments(arguments: ast.arguments) -> list[ast.arguments]:
    """Return the arguments one by one, so that each can be on a line of its own."""

    def one(**fields: object) -> ast.arguments:
        empty = {"posonlyargs": [], "args": [], "kwonlyargs": [], "kw_defaults": [], "defaults": []}
        return ast.arguments(**{**empty, **fields})  # type: ignore[arg-type]

    plain = [*arguments.posonlyargs, *arguments.args]
    missing = len(plain) - len(arguments.defaults)
    found = [
        one(
            args=[arg],
            defaults=arguments.defaults[i - missing : i - missing + 1] if i >= missing else [],
        )
        for i, arg in enumerate(plain)
    ]
    if arguments.vararg:
        found.append(one(vararg=arguments.vararg))
    elif arguments.kwonlyargs:
        found.append(one(args=[ast.arg("*")]))
    for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(one(args=[arg], defaults=[default] if default else []))
    if arguments.kwarg:
        found.append(one(kwarg=arguments.kwarg))
    return found


_ENTRY = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*)  +(\S.*)$")


def render_docstring(text: str) -> str:
    """Return a docstring as Markdown: indented code becomes a block, and lines such as
    `model       The module to train.` become a list of definitions."""
    lines = text.expandtabs().splitlines()
    out: list[str] = []
    i = 0
    while i < len(lines):
        line = lines[i]
        if line in ("Parameters:", "Fields:"):
            out += [line, ""]
        elif entry := _ENTRY.match(line):
            column = entry.start(2)
            body = [entry[2]]
            while i + 1 < len(lines) and (
                not lines[i + 1].strip() or lines[i + 1].startswith("  ")
            ):
                i += 1
                body.append(lines[i][min(column, _count_blanks(lines[i])) :])
            names = ", ".join(f"`{name}`" for name in entry[1].split(", "))
            block = render_docstring("\n".join(body).rstrip())
            inner = "\n".join(f"    {each}" if each else "" for each in block.splitlines())
            out += ["", names, f":   {inner.lstrip()}", ""]
        elif line.startswith("    ") and (not out or not out[-1].strip()):
            code = []
            while i < len(lines) and (not lines[i].strip() or lines[i].startswith("    ")):
                code.append(lines[i][4:])
                i += 1
            out += ["```python", *"\n".join(code).rstrip().splitlines(), "```", ""]
            continue
        else:
            out.append(line)
        i += 1
    return "\n".join(out).strip()


def _count_blanks(line: str) -> int:
    return len(line) - len(line.lstrip()) if line.strip() else 0


def _quote_prose(text: str) -> str:
    """Return a text in which nothing but code is taken for Markdown or HTML."""
    parts = re.split(r"(^ *```python$.*?^ *```$|`[^`\n]+`)", text, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [
        re.sub(r"<(?=\w)", "&lt;", re.sub(r"([*]|__)", r"\\\1", part)) for part in parts[::2]
    ]
    return "".join(parts)


GENERATORS: dict[str, Callable[[], str]] = {
    "commands": render_commands,
    "settings": render_settings,
    "exit_codes": render_exit_codes,
    "run_files": render_run_files,
    "python_api": render_python_api,
}
"""By the name in `<!-- generated: NAME -->`."""

"""What README and the docs name is there: links, files, tests of promises, commands, settings,
names of the Python API."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from echelon import cli
from echelon.cli import SUBCOMMANDS
from echelon.commands.arguments import LazyEpilogParser
from echelon.config.settings_help import GROUPS, list_settings
from echelon.errors import ExitCode

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / name
    for name in (
        *("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"),
        *("benchmarks/README.md", "cluster/README.md"),
    )
] + sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md")])
_FILE = re.compile(r"(?:tests|examples|docs|benchmarks|scripts)/[\w/.-]*[\w/]")
_VERB = re.compile(r"^(?:\S+=\S+ )*echelon ([a-z][a-z-]*)|`echelon ([a-z][a-z-]*)", re.MULTILINE)
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(?:\$ )?(?:[A-Z_]+=\S* )*(echelon|python|torchrun|srun)(?=\s|$)(.*)")
_SETTING = re.compile(rf"(?<![\w./])(?:{'|'.join(GROUPS)})\.[a-z0-9_]+(?:\.[a-z_]+)*(?![\w/(])")
_UNITS = ("steps", "epochs", "minutes")
SETTINGS = {setting.name: setting.default for setting in list_settings()}
KNOWN_SETTINGS = (
    set(SETTINGS)
    | {
        f"{name}.{unit}"
        for name, default in SETTINGS.items()
        if default[0] == "."
        for unit in _UNITS
    }
    | {name.rpartition(".")[0] for name in SETTINGS}
    | {"launch.kind"}
)


def name_page(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=name_page)


@every_page
def test_links_files_and_commands_exist(page: Path) -> None:
    text = page.read_text()
    prose = _BLOCK.sub("", text)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", prose)]
    local = [link for link in links if link and "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []
    named = set(_FILE.findall(text))
    places = (ROOT, page.parent)
    assert [name for name in named if not any((place / name).exists() for place in places)] == []
    assert {a or b for a, b in _VERB.findall(text)} <= SUBCOMMANDS.keys()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_promise_has_a_test_that_exists() -> None:
    page = (ROOT / "docs/developers/promises.md").read_text()
    rows = re.findall(r"^\| ([A-E]\d(?: [A-E]\d)*) \|.*\| (.*) \|$", page, re.MULTILINE)
    promised = {number for numbers, _ in rows for number in numbers.split()}
    counts = {"A": 6, "B": 8, "C": 7, "D": 3, "E": 5}
    assert promised == {f"{k}{i}" for k, count in counts.items() for i in range(1, count + 1)}
    for numbers, tests in rows:
        folder = ROOT
        for name in re.findall(r"`([^`]+)`", tests):
            path = ROOT / name if "/" in name else folder / name  # a bare name: beside the last
            assert path.exists(), f"{numbers}: {name}"
            folder = path if path.is_dir() else path.parent


# --- commands and settings ---


class ParsedError(Exception):
    """The words of a command were taken; what it does with them is not of interest."""


@pytest.fixture
def only_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every command end where it has taken its words."""

    def stop(method: str) -> None:
        parse = getattr(argparse.ArgumentParser, method)

        def parse_and_stop(self: Any, words: list[str], *rest: Any) -> Any:
            found = parse(self, words, *rest)
            if self.prog == "echelon data":  # it takes its first word alone
                return found
            extra = found[1] if isinstance(found, tuple) else []
            assert [word for word in extra if word.startswith("-")] == []
            raise ParsedError

        monkeypatch.setattr(LazyEpilogParser, method, parse_and_stop)

    stop("parse_args")
    stop("parse_known_intermixed_args")


def find_commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields the command lines in the blocks of a page: as they are written, and their words."""
    for language, block in _BLOCK.findall(page.read_text()):
        if language not in ("", "bash", "console", "sh"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            if not (found := _COMMAND.fullmatch(line.rstrip())):
                continue
            lexer = shlex.shlex(found[2], posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = [found[1]]
            for word in lexer:
                if set(word) <= set("();<>|&"):
                    break
                words += [word] if word != "…" else []
            yield line, words


@every_page
@pytest.mark.usefixtures("only_parse")
def test_commands_are_taken(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line, words in find_commands(page):
        ours = words[: words.index("--")] if "--" in words else words
        settings = [w.partition("=")[0].lstrip("+~") for w in ours if "=" in w and w[0] != "-"]
        unknown = [n for n in settings if n.split(".")[0] in GROUPS and n not in KNOWN_SETTINGS]
        assert unknown == [], line
        if words[:2] == ["echelon", "train"]:
            plain = [w for w in words[2:] if w[0] != "-" and "=" not in w]
            assert len(plain) <= ("--help" in words), line
        if words[0] != "echelon" or words[1:2] in ([], ["COMMAND"]) or words[1][0] in "-0123456789":
            continue
        code = 2
        try:
            code = cli.run_command(words[1:])
        except ParsedError:
            code = 0
        except SystemExit as ended:  # --help, or words that are not known
            code = int(ended.code or 0)
        if code:
            pytest.fail(f"{line}\n{capsys.readouterr().err}")


@every_page
def test_settings_exist(page: Path) -> None:
    if page.name in ("architecture.md", "promises.md"):  # they name modules and tests as well
        return
    prose = re.findall(r"`([^`\n]+)`", _BLOCK.sub("", page.read_text()))
    named = {n for code in prose for n in _SETTING.findall(code) if not n.endswith((".py", ".md"))}
    assert {name for name in named if name not in KNOWN_SETTINGS} == set()


# --- Python ---

_PUBLIC = ("echelon", "echelon.data", "echelon.optim", "session")


@every_page
def test_python_is_python_and_uses_what_there_is(page: Path) -> None:
    import echelon

    for language, block in _BLOCK.findall(page.read_text()):
        if language != "python":
            continue
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in _PUBLIC:
                owner = ast.unparse(node.value)
                place: Any = echelon.Session if owner == "session" else echelon
                for part in owner.split(".")[1:]:
                    place = getattr(place, part)
                known = {*dir(place), *echelon.Session.__init__.__code__.co_names}
                assert node.attr in known, f"{owner}.{node.attr}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "echelon.Experiment":
                fields = set(inspect.signature(echelon.Experiment).parameters)
                assert {word.arg for word in node.keywords if word.arg} <= fields


# --- what is generated for the site ---


def load_site_module(name: str) -> ModuleType:
    """Return a module of scripts/site, which is no package."""
    folder = ROOT / "scripts" / "site"
    if f"site_{name}" in sys.modules:
        return sys.modules[f"site_{name}"]
    spec = importlib.util.spec_from_file_location(f"site_{name}", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    sys.modules[f"site_{name}"] = module
    return module


def test_the_reference_has_everything() -> None:
    reference = load_site_module("reference")
    settings = reference.render_settings()
    assert [name for name in SETTINGS if f"| `{name}`" not in settings] == []
    commands = reference.render_commands()
    assert [name for name in SUBCOMMANDS if f"usage: echelon {name}" not in commands] == []
    codes = {
        int(c) for c in re.findall(r"^\| `(\d+)` \|", reference.render_exit_codes(), re.MULTILINE)
    }
    assert codes == set(ExitCode)
    files = reference.render_run_files()
    assert "| `metrics.jsonl` |" in files
    assert "| `logs/rank-N.log` |" in files


def test_the_pictures_of_concepts_are_those_of_their_script() -> None:
    module = load_site_module("draw_concepts")
    for name, draw in module.PICTURES.items():
        assert (ROOT / "docs/pictures" / f"{name}.svg").read_text() == draw().render(), name

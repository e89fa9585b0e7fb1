"""What README and the docs name is there: links, files, tests of promises, verbs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from echelon.cli import SUBCOMMANDS
from echelon.errors import ExitCode

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [
    ROOT / name
    for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "cluster/README.md")
] + sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")])
_FILE = re.compile(r"(?:tests|examples|docs|benchmarks|scripts)/[\w/.-]*[\w/]")
_VERB = re.compile(r"^(?:\S+=\S+ )*echelon ([a-z-]+)|`echelon ([a-z-]+)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_files_and_commands_exist(page: Path) -> None:
    text = page.read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [link for link in links if link and "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []
    named = set(_FILE.findall(text))
    places = (ROOT, page.parent)
    assert [name for name in named if not any((place / name).exists() for place in places)] == []
    assert {a or b for a, b in _VERB.findall(text)} <= SUBCOMMANDS.keys()


def test_every_promise_has_a_test_that_exists() -> None:
    rows = re.findall(r"^\| ([A-E]\d(?: [A-E]\d)*) \|.*\| (.*) \|$", README, re.MULTILINE)
    promised = {number for numbers, _ in rows for number in numbers.split()}
    counts = {"A": 6, "B": 8, "C": 7, "D": 3, "E": 5}
    assert promised == {f"{k}{i}" for k, count in counts.items() for i in range(1, count + 1)}
    for numbers, tests in rows:
        folder = ROOT
        for name in re.findall(r"`([^`]+)`", tests):
            path = ROOT / name if "/" in name else folder / name  # a bare name: beside the last
            assert path.exists(), f"{numbers}: {name}"
            folder = path if path.is_dir() else path.parent


def test_every_exit_code_is_documented() -> None:
    section = README.partition("## Exit codes")[2].partition("\n## ")[0]
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}
    assert listed == set(ExitCode)

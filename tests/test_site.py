"""The documentation site: it builds strictly, all of its links lead somewhere, it needs nothing
from elsewhere, its search works from a disk, and the programs in its pages run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import require_browser, start_browser

ROOT = Path(__file__).parents[1]
_FILE_BLOCK = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """What a page of the site refers to, and where it can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        """What a browser fetches to show the page."""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(given.get("href", ""))
        elif "src" in given:
            self.loaded.append(given["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    command += ["--site-dir", str(folder)]
    environ = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "CI")}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_link_leads_somewhere_and_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    files = sorted(site.rglob("*.html"))
    pages = {file: Page(file.read_text(encoding="utf-8")) for file in files}
    broken: list[str] = []
    for file, page in pages.items():
        if file.name == "404.html":  # its links begin at the root of a server
            continue
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded and parts.scheme != "data":
                    broken.append(f"{file.relative_to(site)} loads {link}")
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if not target.is_file() or (
                parts.fragment
                and target in pages
                and unquote(parts.fragment) not in pages[target].anchors
            ):
                broken.append(f"{file.relative_to(site)}: {link}")
    assert broken == []
    assert len(pages) > 50
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//", style.read_text()), style


def test_the_search_works_from_a_disk(site: Path, tmp_path: Path) -> None:
    """Opened as a file, without a server; every request to elsewhere would be an error there."""
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    entries = json.loads(index.partition("=")[2].rstrip("; \n"))["docs"]
    assert any("trainer.batch_size" in entry["text"] for entry in entries)
    require_browser()
    found = "a.md-search-result__link"
    with start_browser(tmp_path) as browser:
        browser.command("Network.enable")
        browser.command("Network.setBlockedURLs", urls=["http://*", "https://*"])
        browser.open(f"file://{site}/index.html")
        browser.run("document.querySelector('#__search').click()")
        browser.type("input[data-md-component=search-query]", "ReduceLROnPlateau")
        links = browser.wait(
            "results",
            lambda: browser.run(
                f"return [...document.querySelectorAll('{found}')].map((e) => e.href)"
            ),
        )
        assert any("limits.html" in link for link in links), links
        assert browser.read_errors() == []


_RUN_ALL = """
import json, os, runpy, sys
import torch
for folder, file, words in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        os.chdir(folder)
        output = os.open(f"{file}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = [file, *words]
        sys.path[0] = folder
        code = 1
        try:
            runpy.run_path(file, run_name="__main__")
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, folder, file, flush=True)
"""
"""Runs programs one after the other, each in a fork of a process that has imported torch."""


def test_the_programs_in_pages_run(tmp_path: Path) -> None:
    programs = []
    for page in sorted((ROOT / "docs").glob("**/*.md")):
        folder = tmp_path / page.stem
        for name, code in _FILE_BLOCK.findall(page.read_text()):
            folder.mkdir(exist_ok=True)
            (folder / name).write_text(code)
            trains = "echelon.main(" in code
            programs.append(
                [str(folder), name, ["trainer.epochs=1", "run.name=a"] if trains else []]
            )
    assert len(programs) >= 7
    done = subprocess.run(
        [sys.executable, "-c", _RUN_ALL, json.dumps(programs)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ended = [line.split() for line in done.stdout.splitlines()]
    assert len(ended) == len(programs)
    for code, place, name in ended:
        assert code == "0", f"{name} of {place}:\n{Path(place, f'{name}.log').read_text()}"

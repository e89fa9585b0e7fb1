"""What the script of a page draws, read with node, without a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_SCRIPT = Path(__file__).with_name("page_dom.js")


@dataclass(frozen=True)
class PageElement:
    """An element that the script has made or filled."""

    tag: str
    attributes: dict[str, str]
    text: str
    written: list[tuple[str, float, float]]
    """Texts of a canvas, and where they were written."""
    classes: list[str]
    children: list[PageElement] = field(default_factory=list)

    def walk(self) -> Iterator[PageElement]:
        """Yield this element and all below it, in the order in which they are painted."""
        yield self
        for child in self.children:
            yield from child.walk()

    def find(self, tag: str, name: str = "") -> list[PageElement]:
        """Return elements by tag and class."""
        return [
            e
            for e in self.walk()
            if e.tag == tag and (not name or name in [*e.classes, *_split_class(e)])
        ]

    def __getitem__(self, name: str) -> float:
        return float(self.attributes[name])

    @property
    def all_text(self) -> str:
        return " ".join(e.text for e in self.walk() if e.text)


def _split_class(element: PageElement) -> list[str]:
    return element.attributes.get("class", "").split()


def read_page(
    path: Path, width: int, pointer: tuple[str, float, float] | None = None
) -> dict[str, PageElement]:
    """Return the elements of a page by id, after its script has run."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node here to run it")
    words = [node, str(_SCRIPT), str(path), str(width), *map(str, pointer or ())]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {name: _build_element(given) for name, given in json.loads(done.stdout).items()}


def run_chart_script(script_file: Path, expression: str) -> Any:
    """Return the value of an expression over the functions that all pages share."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node here to run it")
    script = "const document = {getElementById: () => ({textContent: '{}'})};\n"
    script += script_file.read_text() + f"\nconsole.log(JSON.stringify({expression}));"
    done = subprocess.run([node, "-e", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _build_element(given: dict[str, Any]) -> PageElement:
    children = [_build_element(child) for child in given["children"]]
    written = [(text, x, y) for text, x, y in given["written"]]
    return PageElement(
        given["tag"], given["attributes"], given["text"], written, given["classes"], children
    )

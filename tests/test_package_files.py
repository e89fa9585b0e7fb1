"""A wheel has every file of the package: those that are no Python are named in pyproject.toml."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import echelon

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
SOURCE = Path(echelon.__file__).parent


def test_every_file_is_in_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["echelon"]
    packed = {path for pattern in patterns for path in SOURCE.glob(pattern)}
    others = {p for p in SOURCE.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert others - packed == set()
    # A folder without __init__.py is no package: its modules would be left out.
    folders = {path.parent for path in SOURCE.rglob("*.py")}
    assert {folder for folder in folders if not (folder / "__init__.py").exists()} == set()


def test_code_of_others_comes_with_its_licence() -> None:
    bundled = [p for p in SOURCE.rglob("*.js") if "License" in p.read_text("utf-8")[:500]]
    names = {re.split(r"\.", path.name)[0] for path in bundled}
    assert names == {path.stem for path in (ROOT / "licenses").glob("*.txt")}

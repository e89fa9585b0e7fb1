"""Folders in a project that are not its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.utils.ignore import is_ignored


@pytest.mark.parametrize("name", [".git", ".venv", "__pycache__", "node_modules", "runs", "wandb"])
def test_caches_and_results_are_ignored(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert is_ignored(tmp_path / name)


@pytest.mark.parametrize("name", ["runs", "wandb", "venv"])
def test_a_package_is_source_whatever_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    assert not is_ignored(tmp_path / name)


def test_other_folders_are_source(tmp_path: Path) -> None:
    for name in ("src", "data", ".github", "run"):
        (tmp_path / name).mkdir()
        assert not is_ignored(tmp_path / name)

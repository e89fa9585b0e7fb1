"""Folders in a project that are not its source: neither copied, nor sent, nor hashed."""

from __future__ import annotations

from pathlib import Path

CACHE_FOLDERS = frozenset(
    {
        *(".git", ".hg", ".svn"),
        *(".venv", "venv", ".tox", ".nox", "node_modules"),
        *("__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".ipynb_checkpoints"),
        *(".eggs", ".DS_Store", ".echelon"),
    }
)
"""Made by tools, which can make them again."""
OUTPUT_FOLDERS = frozenset({"runs", "wandb"})
"""Results of trainings: large, and of no use to another one."""
IGNORED_FOLDERS = CACHE_FOLDERS | OUTPUT_FOLDERS


def is_ignored(path: Path) -> bool:
    """Return whether a folder (or a file, such as .DS_Store) inside a project is not part of its
    source.

    A Python package is source, whatever its name: ``runs/__init__.py`` makes ``runs`` one.
    """
    return path.name in IGNORED_FOLDERS and not (path / "__init__.py").exists()

"""Echelon's own code as it is here, by content: what a login node runs."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import io
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

import echelon

_BESIDE = ("packaging", "yaml")
"""Packages in Python alone that planning an environment needs. They lie apart from Echelon: jobs
have their own."""
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)""")
_MODULE_NAMES = {"hydra-core": "hydra", "pyyaml": "yaml"}


@functools.cache
def list_package_files() -> list[tuple[str, Path]]:
    """Return the files to send by their names there, in order."""
    return sorted([*_list_echelon(), *_list_beside()])


@functools.cache
def compute_package_digest() -> str:
    """Return the digest that names the code."""
    found = hashlib.sha256()
    for name, path in list_package_files():
        found.update(f"{name}\0{path.stat().st_size}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:32]


def pack_package() -> bytes:
    """Return the code as a compressed tar file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as tar:
        for name, path in list_package_files():
            tar.add(path, name, recursive=False)
    return buffer.getvalue()


def list_requirements(extra: str = "") -> list[str]:
    """Return what Echelon needs in the environment of a job, as lines of a requirements.txt; with
    an `extra` of Echelon also what that adds."""
    import importlib.metadata  # not at the top: every list would wait for it

    declared = importlib.metadata.requires("echelon") or []
    lines = [line for line in declared if not _EXTRA.search(line)]
    added = [line for line in declared if (m := _EXTRA.search(line)) and m[1] == extra]
    lines += [line.partition(";")[0].strip() for line in added]
    return [line.replace(" ", "") if ";" not in line else line for line in lines]


def list_required_modules(extra: str = "") -> list[str]:
    """Return the same as the names of modules."""
    from packaging.requirements import Requirement

    needed = [Requirement(line) for line in list_requirements(extra)]
    names = [each.name for each in needed if each.marker is None]
    return [_MODULE_NAMES.get(name.lower(), name) for name in names]


def _list_echelon() -> Iterator[tuple[str, Path]]:
    root = Path(echelon.__file__).parent
    for path in root.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield f"echelon/{path.relative_to(root)}", path


def _list_beside() -> Iterator[tuple[str, Path]]:
    for name in _BESIDE:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        root = Path(spec.origin).parent
        for path in root.rglob("*.py"):
            yield f"beside/{name}/{path.relative_to(root)}", path

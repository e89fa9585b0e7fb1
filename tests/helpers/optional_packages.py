"""Packages that only some tests need."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def require_package(name: str) -> None:
    """Skip the module that calls this where a package is missing.

    `pytest.importorskip` would import it in every process that collects tests, and in every rank
    that is forked for a function of the module.
    """
    if find_spec(name) is None:
        pytest.skip(f"the package {name} is not installed", allow_module_level=True)

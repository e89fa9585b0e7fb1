"""Fixtures of all tests; helper modules are in tests/helpers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """As in the ranks, so that what is computed here and there is added up in the same order."""
    torch.set_num_threads(1)


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    """An empty folder for what ranks write down (ECHELON_TEST_TRACE)."""
    folder = tmp_path / "trace"
    folder.mkdir()
    return folder

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from object_store_server import ObjectStoreServer, serve_object_store

from echelon.object_store.client import stop_store_process


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ObjectStoreServer]:
    """A bucket on a real server, which the environment leads to."""
    with serve_object_store() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
        yield server
        stop_store_process()

"""torch runs what it finds in its cache of compiled kernels, so that must not be a stranger's."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from other_users import STRANGER, give_away, make_open_folder, needs_root

from echelon.errors import EchelonError
from echelon.experiment.compilation import CompiledFunction
from echelon.runs.heartbeat import Heartbeat


@pytest.fixture
def tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder like /tmp, which is where torch keeps its kernels unless it is told otherwise."""
    with make_open_folder() as folder:
        folder.chmod(0o1777)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        yield folder


@needs_root
def test_a_strangers_cache_under_the_expected_name_is_refused(tmp: Path) -> None:
    from torch._inductor.runtime import runtime_utils  # slow to import

    CompiledFunction(abs, Heartbeat())
    folder = Path(runtime_utils.default_cache_dir())
    assert folder.parent == tmp
    folder.mkdir(exist_ok=True)
    CompiledFunction(abs, Heartbeat())
    give_away(folder)
    with pytest.raises(EchelonError) as caught:
        CompiledFunction(abs, Heartbeat())
    (fault,) = caught.value.faults
    assert fault.what.startswith(f"trainer.compile=true: {folder} belongs to {STRANGER}")
    assert "TORCHINDUCTOR_CACHE_DIR" in fault.do
    CompiledFunction(abs, Heartbeat(), "aot_eager")


def test_a_cache_of_ones_choice_is_looked_at_too(
    tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp / "open").mkdir()
    (tmp / "open").chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp / "open"))
    with pytest.raises(EchelonError, match="may be written by everybody"):
        CompiledFunction(abs, Heartbeat())

"""A fixture that replaces the NVIDIA driver with a stand-in."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from fake_nvml import FakeDriver, MakeDriver

from echelon.gpus import nvml


@pytest.fixture
def make_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeDriver:
    """Return a function from lines (see nvml.c) to a driver.

    This process, and what it starts with the driver's environment, then sees these GPUs.
    """
    if shutil.which("gcc") is None:
        pytest.skip("the stand-in for NVML is built with gcc")

    def make(*lines: str, newest: int = 3) -> FakeDriver:
        folder = Path(tempfile.mkdtemp(dir=tmp_path, prefix="driver-"))
        driver = FakeDriver(folder, *lines, newest=newest)
        monkeypatch.setattr(nvml, "LIBRARY", str(driver.library))
        return driver

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return make

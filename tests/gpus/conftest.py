"""A stage for machines that are not there."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from fake_nvml import Scene, Stage

from echelon.gpus import nvml


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """From the lines of a scene to a machine: this process, and what it starts with its
    environment, then sees these GPUs."""
    if shutil.which("gcc") is None:
        pytest.skip("the stand-in for NVML is built with gcc")

    def staged(*lines: str, newest: int = 3) -> Scene:
        folder = Path(tempfile.mkdtemp(dir=tmp_path, prefix="driver-"))
        scene = Scene(folder, *lines, newest=newest)
        monkeypatch.setattr(nvml, "LIBRARY", str(scene.library))
        return scene

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return staged

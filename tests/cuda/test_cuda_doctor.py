"""`echelon doctor` and `preflight` on a machine with an NVIDIA GPU: it is well, and really used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.errors import ExitCode

pytestmark = pytest.mark.gpu


def _report(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "echelon", *words, "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def _by_check(report: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {check["check"]: check for check in report["checks"]}


def test_doctor_passes_and_trains_on_every_gpu(tmp_path: Path) -> None:
    code, report = _report(tmp_path, "doctor")
    checks = _by_check(report)
    assert [c for c in report["checks"] if c["state"] == "fail"] == []
    assert code == ExitCode.OK
    assert f"built for CUDA {torch.version.cuda}" in checks["torch"]["found"]
    assert checks["driver"]["state"] == "ok"
    for index in range(torch.cuda.device_count()):
        name, (major, minor) = (
            torch.cuda.get_device_name(index),
            torch.cuda.get_device_capability(index),
        )
        assert checks[f"gpu {index}"]["found"] == f"{name}, compute capability {major}.{minor}"
        assert checks[f"step cuda:{index}"]["state"] == "ok"
    assert checks["all-reduce"]["found"].startswith("nccl across ")


def test_hidden_gpus_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    checks = _by_check(_report(tmp_path, "doctor", "--no-smoke")[1])
    assert checks["visible"]["state"] == "warn"
    assert checks["visible"]["do"] == "unset CUDA_VISIBLE_DEVICES"


def test_preflight_all_reduces_with_nccl(tmp_path: Path) -> None:
    code, report = _report(tmp_path, "preflight", "launch=local")
    assert code == ExitCode.OK, report
    checks = _by_check(report)
    assert checks["gpus"]["state"] in ("ok", "warn")
    assert checks["all-reduce"]["found"].startswith("nccl ")

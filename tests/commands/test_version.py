"""`echelon --version`: what a bug report needs."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import stat
from pathlib import Path

import pytest

import echelon
from echelon.cli import run_command


def test_it_tells_all_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho slurm 22.05.8\n")
    sbatch.chmod(sbatch.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert run_command(["--version", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["echelon"] == echelon.__version__
    assert told["python"] == platform.python_version()
    assert told["torch"] == importlib.metadata.version("torch")
    assert told["slurm"] == "22.05.8"
    assert run_command(["--version"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["echelon"] == echelon.__version__
    assert lines["slurm"] == "22.05.8"
    assert list(lines)[:3] == ["echelon", "python", "torch"]


def test_what_is_not_here_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(__import__("sys").modules, "torch", raising=False)
    run_command(["--version"])
    told = capsys.readouterr().out
    assert "torch    not installed\n" in told
    assert "slurm    none here\n" in told


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("__version__ = '2.4.0+cu121'\ncuda: Optional[str] = '12.1'\n", "12.1"),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", None),
        ("__version__ = '2.8.0'\ncuda = '12.8'\nhip = None\n", "12.8"),
    ],
)
def test_the_version_file_of_torch_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, cuda: str | None
) -> None:
    from echelon.commands.version import read_torch_version

    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('it is not to be imported')")
    (tmp_path / "torch/version.py").write_text(text)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(__import__("sys").modules, "torch", raising=False)
    assert read_torch_version().get("cuda") == cuda
    assert (read_torch_version()["__version__"] or "").startswith("2.")

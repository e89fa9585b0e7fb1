"""`make demo`: what it says while it installs, what it installs, and the picture it leaves."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = ("Makefile", "pyproject.toml", "constraints.txt")
PHASE = re.compile(r" *\d+ s  (.*)")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with an empty environment, whose Python is this one, and without any installer."""
    for name in FILES:
        shutil.copy2(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "src").symlink_to(ROOT / "src")
    write_program(tmp_path / ".venv/bin/python", f'exec {sys.executable} "$@"')
    write_program(tmp_path / ".venv/bin/pip", "exit 1")
    return tmp_path


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def run_demo(
    clone: Path, *words: str, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    environ = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("UV_", "MAKE", "MFLAGS"))},
        "PATH": f"{clone / 'bin'}:/usr/bin:/bin",
        "PYTHON": python,
        "PIP_FIND_LINKS": "/some/wheels",
    }
    return subprocess.run(
        words, cwd=clone, env=environ, capture_output=True, text=True, timeout=600, check=False
    )


def find_phases(output: str) -> list[str]:
    return [found[1] for line in output.splitlines() if (found := PHASE.fullmatch(line))]


def test_uv_installs_what_a_training_needs_from_where_pip_would(clone: Path) -> None:
    write_program(
        clone / "bin/uv",
        'printf "%s\\n" "$@" >given\necho "Resolved 25 packages in 1.2s"\n'
        'echo "Downloading torch (180.5MiB)"\necho "from $UV_FIND_LINKS" >&2\n'
        'echo "it broke" >&2\nexit 1',
    )
    done = run_demo(clone, "scripts/demo.sh")
    assert done.returncode == 1
    assert find_phases(done.stdout) == [
        "making a virtual environment in .venv",
        "installing torch and what else a training needs with uv",
        "  Resolved 25 packages in 1.2s",
        "  downloading torch (180.5MiB)",
    ]
    words = (clone / "given").read_text().split("\n")
    assert words[:2] == ["pip", "install"]
    assert " ".join(words).endswith("--constraint constraints.txt --editable . "), "without extras"
    assert re.search(r"from .*/some/wheels", done.stderr)
    assert "it broke" in done.stderr
    assert "error: the packages could not be installed" in done.stderr
    assert "  hint: " in done.stderr
    assert not (clone / ".venv/.ready-demo").exists()
    assert not (clone / "runs").exists()


def test_pip_installs_it_where_there_is_no_uv(clone: Path) -> None:
    """The environment is not taken for ready if that fails; the next time it is tried again."""
    write_program(
        clone / ".venv/bin/python",
        'printf "%s\\n" "$@" >given\necho "  Downloading torch-2.13.0.whl (190.0 MB)"\n'
        'echo "  Downloading rich.whl (20 kB)"\n'
        'echo "Installing collected packages: numpy, torch, rich"\nexit 1',
    )
    for _ in range(2):
        done = run_demo(clone, "scripts/demo.sh")
        assert done.returncode == 1
        assert find_phases(done.stdout)[1:] == [
            "installing torch and what else a training needs with pip",
            "  downloading torch-2.13.0.whl (190.0 MB)",
            "  unpacking 3 packages",
        ]
    words = (clone / "given").read_text().split("\n")
    assert words[:3] == ["-m", "pip", "install"]
    assert " ".join(words).endswith("--constraint constraints.txt --editable . "), "without extras"


@pytest.fixture
def ready(clone: Path) -> Path:
    """A clone whose files are older than any environment."""
    for name in FILES:
        os.utime(clone / name, (1, 1))
    return clone


@pytest.mark.parametrize("marker", [".ready", ".ready-demo"])
def test_nothing_is_installed_where_an_environment_is_ready(ready: Path, marker: str) -> None:
    """Be it of the tests or of an earlier demo. A training that fails ends the demo."""
    write_program(ready / ".venv/bin/echelon", "exit 3")
    (ready / ".venv" / marker).touch()
    done = run_demo(ready, "scripts/demo.sh")
    assert done.returncode == 3
    assert find_phases(done.stdout) == ["training a toy on two processes"]
    os.utime(ready / "pyproject.toml")
    os.utime(ready / ".venv" / marker, (1, 1))
    again = run_demo(ready, "scripts/demo.sh", python="/bin/false")
    assert find_phases(again.stdout)[0] == "making a virtual environment in .venv"


@pytest.mark.slow
def test_it_trains_and_leaves_a_picture(ready: Path) -> None:
    write_program(ready / ".venv/bin/echelon", f'exec {sys.executable} -m echelon "$@"')
    (ready / ".venv/.ready").touch()
    done = run_demo(ready, "make", "demo")
    assert done.returncode == 0, done.stderr
    phases = ["training a toy on two processes", "drawing its curves", "done"]
    assert find_phases(done.stdout) == phases
    assert "picture   runs/demo-1/curves.html" in done.stdout
    assert "eval_loss" in (ready / "runs/demo-1/curves.html").read_text()
    assert "METRIC" in done.stdout

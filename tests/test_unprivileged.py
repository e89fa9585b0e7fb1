"""Training without root's rights, a way to get any, a compiler, or a home that can be written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NO_RIGHTS = ("--no-new-privs", "--inh-caps=-all", "--bounding-set=-all")
"""What keeps root from being more than the owner of its files; others have no rights to lose."""


@pytest.mark.slow
def test_a_training_needs_no_rights_no_compiler_and_no_home(tmp_path: Path) -> None:
    setpriv = shutil.which("setpriv", path="/usr/bin:/bin")
    if setpriv is None:
        pytest.skip("no setpriv (util-linux), which takes rights away")
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir(mode=0o555)
    work.mkdir()
    rights = NO_RIGHTS if os.geteuid() == 0 else NO_RIGHTS[:1]
    environ = {**os.environ, "HOME": str(home), "PATH": str(Path(sys.executable).parent)}
    # torchmetrics imports matplotlib where it is, and that one complains without such a folder.
    environ |= {"CUDA_VISIBLE_DEVICES": "", "MPLCONFIGDIR": str(work)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [setpriv, *rights, sys.executable, *words],
            cwd=work,
            env=environ,
            capture_output=True,
            text=True,
        )

    cannot = run("-c", "import os; open(os.path.expanduser('~/x'), 'w')")
    assert "PermissionError" in cannot.stderr, "the home can be written, so nothing is tested"
    sizes = ("samples=64", "trainer.batch_size=8", "trainer.epochs=1", "run.name=a")
    done = run("-m", "echelon", "train", "launch=local", "launch.procs=2", *sizes)
    assert done.returncode == 0, done.stderr
    assert "Permission" not in done.stderr + done.stdout
    shown = json.loads(run("-m", "echelon", "show", "a", "--json").stdout)
    assert (shown["state"], shown["world"], shown["step"]) == ("finished", 2, 8)

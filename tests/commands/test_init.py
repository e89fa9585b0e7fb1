"""`echelon init`: a project that trains, resumes and tests itself, and overwrites nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from echelon.cli import run_command
from echelon.commands.init import FILES, write_project
from echelon.config.defaults_files import load_defaults
from echelon.errors import EchelonError
from echelon.sweep.sweep_file import read_sweep_file


def test_it_writes_every_file_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["init", "a b"]) == 0
    assert capsys.readouterr().out.endswith("train it: cd 'a b' && python train.py\n")
    written = {str(p.relative_to("a b")) for p in Path("a b").rglob("*") if p.is_file()}
    assert written == set(FILES)
    source = Path(str(files("echelon") / "starter_project"))
    kept = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert kept == set(FILES.values())
    assert run_command(["init", "b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == list(FILES)


def test_nothing_is_overwritten_and_all_conflicts_are_named(tmp_path: Path) -> None:
    for name in ("train.py", ".gitignore"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "sweep.yaml").symlink_to("nowhere")
    (tmp_path / "conf").write_text("a file")
    with pytest.raises(EchelonError) as refused:
        run_command(["init", str(tmp_path)])
    named = [fault.what for fault in refused.value.faults]
    there = [f"{tmp_path / n} is there already" for n in ("train.py", "sweep.yaml", ".gitignore")]
    assert named == [f"{tmp_path / 'conf'} is not a folder", *there]
    assert (tmp_path / "train.py").read_text() == "mine"
    assert not (tmp_path / "README.md").exists()
    assert not (tmp_path / "tests").exists()


def test_what_was_written_goes_if_the_rest_cannot_be(tmp_path: Path) -> None:
    """A folder that takes no names appears in the middle, after the conflicts were looked for."""
    (tmp_path / "tests").write_text("")
    with pytest.raises(EchelonError, match=r"tests/test_train.py cannot be written: "):
        write_project(tmp_path)
    assert not (tmp_path / "train.py").exists()


def test_the_sweep_and_the_hints_for_a_cluster_are_right(tmp_path: Path) -> None:
    """The lines of echelon.yaml are comments: without their # they are settings that exist."""
    write_project(tmp_path)
    metric = read_sweep_file(tmp_path / "sweep.yaml").metric
    assert metric is not None
    assert metric.name == "eval/accuracy"
    assert load_defaults({}, [tmp_path]).launch == {}
    file = tmp_path / "echelon.yaml"
    text = file.read_text()
    settings = re.findall(r"^# ((?: +)?(?:- )?(?:[a-z_]+: ?|- ).*|launch:)$", text, re.MULTILINE)
    file.write_text("\n".join(settings))
    defaults = load_defaults({}, [tmp_path])
    assert defaults.launch.keys() >= {"launch.partition", "launch.time", "launch.setup"}
    assert defaults.others["notify.to"].value == ["desktop"]


@pytest.mark.slow
def test_its_own_tests_pass(tmp_path: Path) -> None:
    """They train in processes of their own, and resume."""
    write_project(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout

"""`echelon doctor` and `preflight` as they are typed, on this machine."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from command_runner import ECHELON, is_a_sentence_and_a_hint, run, run_here
from worlds import run_forked

from echelon.errors import ExitCode


def test_a_torch_that_crashes_is_a_row(tmp_path: Path) -> None:
    """As a broken CUDA does: the whole process goes."""
    crash = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
    (tmp_path / "torch.py").write_text(crash)
    source = Path(__file__).parents[2] / "src"
    done = run((*ECHELON, "doctor"), tmp_path, PYTHONPATH=f"{tmp_path}:{source}")
    assert done.code == ExitCode.NOT_READY
    lines = [line.split("\t") for line in done.out.splitlines()]
    assert done.err == ""
    (torch,) = [fields for fields in lines if fields[1] == "torch"]
    assert torch[:3] == ["fail", "torch", "cannot be imported: killed by signal 11: no output"]
    assert torch[3].startswith("pip install --force-reinstall torch --index-url https://")
    assert {fields[0] for fields in lines} <= {"ok", "warn", "fail", "none"}
    assert "all-reduce" not in [fields[1] for fields in lines], "nothing to smoke"


def test_a_folder_that_is_gone_is_a_row(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    words = shlex.join([*ECHELON, "doctor", "--no-smoke"])
    done = run(("sh", "-c", f"mkdir {gone} && cd {gone} && rmdir {gone} && {words}"), tmp_path)
    assert done.code == ExitCode.NOT_READY
    assert done.err == ""
    assert f"fail\tdisk here\t{gone} cannot be written\t" in done.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("preflight", "launch=env"), "launch=env starts nothing on other nodes"),
        (("preflight", "launch=ssh"), "launch=ssh without a host"),
        (("preflight", "launch.nods=2"), "there is no such setting"),
        (("preflight", "--run", "nobody"), "no run 'nobody' here"),
        (("setup", "ssh", "a;b"), "'a;b' is not a name or address of a host"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_bad_input_is_a_sentence(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = run_here(words, tmp_path)
    assert done.code in (ExitCode.USAGE, ExitCode.NOT_FOUND)
    assert message in done.err
    assert is_a_sentence_and_a_hint(done.err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", ["0", "soon", "inf"])
def test_a_limit_is_a_number(tmp_path: Path, limit: str) -> None:
    done = run_here(("preflight", "--limit", limit), tmp_path)
    assert done.code == ExitCode.USAGE
    assert f"'{limit}' is not a number of seconds" in done.err


@pytest.mark.slow
def test_this_machine_trains_and_all_reduces(tmp_path: Path) -> None:
    done = run((*ECHELON, "doctor", "--json"), tmp_path)
    report = json.loads(done.out)
    checks = {check["check"]: check for check in report["checks"]}
    failed = [check for check in report["checks"] if check["state"] == "fail"]
    assert (done.code, failed) == (ExitCode.OK, [])
    assert report["version"] == 1
    assert "gloo across 2, the sum is right" in checks["all-reduce"]["found"]
    assert done.left == []


@pytest.mark.slow
def test_a_training_looks_first_where_it_is_asked_to(tmp_path: Path) -> None:
    words = ("train", "launch=local", "launch.procs=2", "launch.preflight=true", "samples=64")
    done = run_forked((*ECHELON, *words, "trainer.epochs=1"), tmp_path)
    assert done.code == ExitCode.OK, done.out + done.err
    assert "all-reduce\tgloo, the sum is right" in done.out
    assert "step 2/2" in done.err + done.out
    assert done.left == []

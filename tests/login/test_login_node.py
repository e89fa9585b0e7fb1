"""What runs on the login node: with nothing but Python there, and asking Slurm seldom."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_runner import run_here

from echelon.login.bootstrap import NO_PYTHON, make_remote_command, read_host_program
from echelon.login.frames import START
from echelon.login.host.slurm_cache import read_job_states
from echelon.login.package_archive import compute_package_digest, pack_package
from echelon.runs.run_folder import Run
from echelon.runs.slurm_queue import SlurmJobState


@pytest.mark.slow
def test_a_login_node_needs_python_and_nothing_else(tmp_path: Path) -> None:
    """The command of the login shell, with noise before its first line and a Python without any
    package: it receives the code, keeps it, and answers."""
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -I -S "$@"\n')  # after its -I
    bare.chmod(0o755)
    command = ["sh", "-c", "echo Welcome; " + make_remote_command(str(bare))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    hello = {"root": str(tmp_path / "there"), "package": compute_package_digest()}
    process.stdin.write(read_host_program() + json.dumps(hello).encode() + b"\n")
    process.stdin.flush()
    while not process.stdout.readline().endswith(START):
        pass
    assert json.loads(process.stdout.readline()) == {"want": "package"}
    archive = pack_package()
    process.stdin.write(json.dumps({"size": len(archive)}).encode() + b"\n" + archive)
    process.stdin.flush()
    answer = json.loads(process.stdout.readline())
    assert answer["root"] == str(tmp_path / "there")
    request = {"do": "submission", "id": "abc", "bytes": 0}
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.close()
    assert json.loads(process.stdout.readline()) == {"done": True, "result": None, "bytes": 0}
    process.stdout.close()
    assert process.wait(60) == 0
    packages = list((tmp_path / "there" / ".echelon" / "packages").iterdir())
    assert [each.name for each in packages] == [compute_package_digest()]


def test_no_python_that_is_new_enough_is_an_exit_code_of_its_own(tmp_path: Path) -> None:
    sbatch = tmp_path / "sbatch"  # else /etc/profile is read, and with it another PATH
    sbatch.write_text("#!/bin/sh\n")
    sbatch.chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", "-c", make_remote_command("~/none").replace("exec sh", "exec /bin/sh")],
        env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
    )
    assert done.returncode == NO_PYTHON


def test_slurm_is_asked_once_whoever_wants_to_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands are programs that write down that they were called."""
    calls = tmp_path / "calls"
    for name, answer in (("squeue", "1|RUNNING|None\n2|PENDING|Priority"), ("sacct", "3|TIMEOUT")):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\necho {name} >> {calls}\nprintf '%b\\n' '{answer}'\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    folder = tmp_path / "state"
    for _ in range(5):
        found = read_job_states(folder, ["1", "2", "3"])
        assert found["states"]["1"] == ["RUNNING", ""]
        assert found["states"]["2"] == list(SlurmJobState("PENDING", "Priority"))
        assert found["states"]["3"] == ["TIMEOUT", ""]
    assert calls.read_text().split() == ["squeue", "sacct"]
    old = json.loads((folder / "slurm.json").read_text())
    old["asked"] = time.time() - 11
    (folder / "slurm.json").write_text(json.dumps(old))
    assert read_job_states(folder, ["1", "3"])["states"]["3"] == ["TIMEOUT", ""]
    assert calls.read_text().split() == ["squeue", "sacct", "squeue"], "how it ended is known"
    assert read_job_states(folder, []) == {"asked": pytest.approx(time.time(), abs=60)} | {
        "states": {},
        "error": "",
    }


# --- what is typed ---


def test_a_dry_run_says_what_is_sent_and_asks_no_network(tmp_path: Path) -> None:
    words = ("train", "launch=slurm", "launch.login=nowhere.invalid", "run.name=a")
    done = run_here((*words, "launch.partition=gpu", "--dry-run"), tmp_path, HOME=str(tmp_path))
    assert done.code == 0, done.err
    assert "log in to nowhere.invalid" in done.out
    assert "#SBATCH --partition=gpu" in done.out
    assert "echelon pull a" in done.out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("train", "launch=slurm", "launch.login='-oProxyCommand=x'"), "is not the name of a host"),
        (("train", "launch=slurm", "launch.remote_dir=/x"), "there is no launch.login"),
        (("train", "launch=local", "launch.login=a"), "does not use it"),
        (
            ("train", "launch=slurm", "launch.login=a", "launch.remote_dir=x"),
            "is not the path of a folder on a",
        ),
        (
            ("train", "launch=slurm", "launch.login=a", "launch.python=python3"),
            "is not the path of a Python on a",
        ),
    ],
)
def test_what_cannot_be_is_a_sentence(tmp_path: Path, words: tuple[str, ...], what: str) -> None:
    done = run_here(words, tmp_path, HOME=str(tmp_path))
    assert done.code == 2, done.output
    assert what in done.err
    assert "hint: " in done.err


def test_pull_is_for_runs_that_are_elsewhere(tmp_path: Path) -> None:
    run = Run(tmp_path / "runs" / "a")
    run.logs_folder.mkdir(parents=True)
    run.config_file.write_text("{}")
    done = run_here(("pull", "a"), tmp_path)
    assert done.code == 2
    assert "is a run of this machine" in done.err

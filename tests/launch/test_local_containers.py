"""launch=local in real containers of podman and Charliecloud: an image of this machine's files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from command_line import REGRESSION
from command_runner import ECHELON, CommandResult, curve, run, started, until
from container_images import (
    make_image,
    make_podman_variables,
    make_python_image,
    make_settings,
    require_containers,
    require_runs,
)

from echelon.errors import ExitCode
from echelon.runs.metrics_file import read_metrics
from echelon.runs.run_folder import Run

pytestmark = pytest.mark.slow

NUMBERS = (
    *(REGRESSION, "trainer.batch_size=6", "trainer.log_steps=1", "launch.procs=2"),
    *("trainer.save.epochs=null", "trainer.evaluate.epochs=null", "launch=local"),
)
START_S = 300.0


class Place:
    """A folder with an image, and commands that are typed there."""

    def __init__(self, folder: Path, runtime: str) -> None:
        require_containers()
        self.folder = folder / "project"
        self.folder.mkdir()
        self.image = make_image(folder)
        self.variables = make_podman_variables(folder) if runtime == "podman" else {}
        require_runs(self.image, runtime, self.variables)
        self.settings = make_settings(self.image, runtime)

    def type(self, *words: str, **variables: str) -> CommandResult:
        return run([*ECHELON, *words], self.folder, START_S, **self.variables, **variables)

    def step(self, name: str) -> int:
        file = Run(self.folder / "runs" / name).metrics_file
        lines = read_metrics(file) if file.exists() else []
        return max((line["step"] for line in lines if "loss" in line), default=0)


def test_a_podman_container_is_stopped_killed_and_continued(tmp_path: Path) -> None:
    place = Place(tmp_path, "podman")
    words = ["train", *NUMBERS, *place.settings, "run.name=a"]
    run_folder = Run(place.folder / "runs" / "a")
    with started([*ECHELON, *words, "trainer.steps=100000"], place.folder, **place.variables) as it:
        until(lambda: place.step("a") >= 3, START_S, "steps", it.describe)
        it.process.terminate()
        done = it.wait()
    # Saved at the border of a step, whatever passes on signals.
    assert done.code == ExitCode.PREEMPTED, done.output
    assert done.left == []
    stopped = run_folder.find_newest_step()
    assert stopped == place.step("a") >= 3
    status = run_folder.read_status_file()
    assert (status["state"], status["launcher"], status["world"]) == ("preempted", "local", 2)
    assert {path.stat().st_uid for path in run_folder.folder.rglob("*")} == {os.getuid()}
    with started([*ECHELON, *words, "trainer.steps=100000"], place.folder, **place.variables) as it:
        until(lambda: place.step("a") >= (stopped or 0) + 3, START_S, "more steps", it.describe)
        process = run_folder.read_status_file()["process"]
        # The ids of processes are those of this machine.
        assert Path(f"/proc/{process['pid']}/cmdline").exists()
        it.process.kill()
        done = it.wait()
    assert done.left == [], "nothing outlives the command that was typed"


def test_numbers_in_a_container_are_those_outside(tmp_path: Path) -> None:
    place = Place(tmp_path, "charliecloud")
    steps = "trainer.steps=12"
    inside = place.type("train", *NUMBERS, steps, *place.settings, "run.name=inside")
    assert inside.code == ExitCode.OK, inside.output
    assert "inside: 12 steps" in inside.err
    outside = place.type("train", *NUMBERS, steps, "run.name=outside")
    assert outside.code == ExitCode.OK, outside.output
    runs = place.folder / "runs"
    assert curve(runs / "inside") == curve(runs / "outside")


def test_a_program_in_podman_has_its_secrets_and_its_folder(tmp_path: Path) -> None:
    place = Place(tmp_path, "podman")
    secrets = tmp_path / "secrets"
    secrets.write_text("CANARY=two words\n")
    secrets.chmod(0o600)
    program = (
        "import os, sys; open('made', 'w').write(os.environ['CANARY'] + os.environ['RANK']); "
        "print(os.getcwd(), os.environ.get('PYTHONHOME')); sys.stdout.flush(); "
        "os.kill(os.getppid(), 0); open('seen').read(); sys.exit(7)"
    )
    os.mkfifo(place.folder / "seen")
    words = ["run", "launch=local", f"launch.secrets={secrets}", *place.settings, "run.name=a"]
    command = [*ECHELON, *words, "--", sys.executable, "-c", program]
    with started(command, place.folder, **place.variables) as it:
        until((place.folder / "made").exists, START_S, "the program", it.describe)
        until((place.folder / "made").read_text, START_S, "what it wrote", it.describe)
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in it.find_all()]
        assert any(b"podman" in line for line in lines)
        assert not any(b"two words" in line for line in lines)
        (place.folder / "seen").write_text("")
        done = it.wait()
    assert done.code == 7, done.output
    assert (place.folder / "made").read_text() == "two words0"
    assert f"{place.folder} None" in done.out


def test_what_an_image_lacks_is_said_before_a_run_is_made(tmp_path: Path) -> None:
    place = Place(tmp_path, "charliecloud")
    (tmp_path / "python").mkdir()
    image = make_python_image(tmp_path / "python")
    words = ("train", "launch=local", f"launch.container={image}")
    done = place.type(*words, "launch.container_runtime=charliecloud")
    assert done.code == ExitCode.NOT_READY
    assert "lacks torch, numpy, hydra-core" in done.err
    done = place.type(*words, "launch.container_python=/opt/python")
    assert done.code == ExitCode.NOT_READY
    assert f"launch.container={image} has no /opt/python" in done.err
    assert not list((place.folder / "runs").iterdir())


def test_preflight_looks_into_the_container(tmp_path: Path) -> None:
    place = Place(tmp_path, "charliecloud")
    lacking = [word for word in place.settings if not word.startswith("launch.container_python")]
    done = place.type("preflight", "launch=local", *lacking, "launch.container_python=/opt/python")
    assert done.code == ExitCode.NOT_READY
    assert "/opt/python" in done.err
    assert done.left == []

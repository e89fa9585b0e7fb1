"""From `launch.container` to commands and scripts, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from echelon.cli import run_and_report_faults, run_command
from echelon.config.compose import compose
from echelon.config.schema import Config
from echelon.errors import EchelonError, ExitCode
from echelon.launch.containers.command import (
    RUNTIME_CLASSES,
    choose_runtime,
    make_container,
    parse_mount,
    pin_runtime,
    wrap_python,
)
from echelon.launch.plan import LocalMachine
from echelon.launch.slurm.batch_script import make_return_command, make_trial_step_command
from echelon.launch.slurm.joining_job import render_joining_script
from echelon.launch.slurm.launcher import SlurmLauncher
from echelon.launch.ssh.launcher import SshLauncher
from echelon.runs.create import assign_name
from echelon.runs.run_folder import Run

HERE = LocalMachine({"PATH": "/bin"}, "login", 0)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def composed(*words: str, kind: str = "slurm", program: Sequence[str] = ()) -> Config:
    return compose([f"launch={kind}", "run.name=a", *words], program=program)


def script(*words: str, program: Sequence[str] = ()) -> str:
    config = SlurmLauncher().complete_config(composed(*words, program=program), dry_run=True)
    text = SlurmLauncher().plan(config, HERE).script
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    return text


def faults(*words: str, kind: str = "local", program: Sequence[str] = ()) -> str:
    with pytest.raises(EchelonError) as caught:
        make_container(composed(*words, kind=kind, program=program))
    return str(caught.value)


# --- which runtime ---


def path_with(folder: Path, *programs: str) -> dict[str, str]:
    for name in programs:
        (folder / name).touch(0o755)
    return {"PATH": str(folder)}


@pytest.mark.parametrize(
    ("image", "kind", "programs", "runtime"),
    [
        ("a.sif", "slurm", (), "apptainer"),
        ("library://a/b", "local", (), "apptainer"),
        ("/images/a.sqsh", "slurm", ("podman",), "pyxis"),
        ("/images/a.sqsh", "ssh", ("podman",), "enroot"),
        ("./image", "local", (), "charliecloud"),
        ("./image", "local", ("podman",), "podman"),
        ("./image", "slurm", ("singularity",), "apptainer"),
        ("./image", "slurm", ("ch-run", "podman"), "charliecloud"),
        ("docker://a/b", "slurm", ("podman",), "podman"),
        ("docker://a/b", "slurm", (), "apptainer"),
        ("nvcr.io/a/b:1", "slurm", ("podman", "apptainer"), "pyxis"),
        ("nvcr.io/a/b:1", "local", ("apptainer",), "apptainer"),
        ("nvcr.io/a/b:1", "ssh", (), "podman"),
    ],
)
def test_auto_looks_at_the_image_and_the_path(
    tmp_path: Path, image: str, kind: str, programs: tuple[str, ...], runtime: str
) -> None:
    hosts = ["launch.hosts=[a]"] if kind == "ssh" else []
    config = composed(f"launch.container={image}", *hosts, kind=kind)
    assert choose_runtime(config.launch, path_with(tmp_path, *programs)) == runtime


def test_nodes_use_what_was_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    config = pin_runtime(composed("launch.container=./image"))
    assert config.launch.container_runtime == "charliecloud"
    assert pin_runtime(composed()) == composed()


# --- what is mounted ---


def test_folders_that_a_run_needs_are_mounted_once(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    file = tmp_path / "elsewhere" / "train.py"
    words = ("launch.container=x.sif", f"run.dir={tmp_path}/link/runs")
    assert make_container(composed(*words)).folders == (str(tmp_path),)
    entry = {"entry": f"{file}:f"}
    config = composed(*words)
    # A run folder behind a link, with neither in the current folder: both names are mounted.
    here = tmp_path / "here"
    here.mkdir()
    with pytest.MonkeyPatch.context() as moved:
        moved.chdir(here)
        config = Config(**{**vars(config), "experiment": entry})
        mounted = make_container(config).folders
    inside = {"here", "elsewhere", "disk/runs", "link/runs"}
    assert set(mounted) == {str(tmp_path / name) for name in inside}


@pytest.mark.parametrize("folder", ["/usr", "/", "/etc"])
def test_folders_of_the_system_are_not_mounted(
    folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(folder)
    config = composed("launch.container=x.sif", f"run.dir={tmp_path}")
    assert make_container(config).folders == (str(tmp_path),)


def test_mounts_as_they_are_written(tmp_path: Path) -> None:
    assert parse_mount("data") == (f"{tmp_path}/data", f"{tmp_path}/data", False)
    assert parse_mount("~/a:/b:ro") == (str(Path("~/a").expanduser()), "/b", True)
    assert parse_mount("/a:ro") == ("/a", "/a", True)
    assert parse_mount("/a:/b:rw") == ("/a", "/b", False)


@pytest.mark.parametrize("text", ["/a:b", "/a:/b:/c", ":/b", "/a::ro", ""])
def test_what_is_not_a_mount_is_refused(text: str) -> None:
    told = faults("launch.container=x.sif", f"launch.container_mounts=['{text}']")
    assert f"{text!r} is not a mount" in told


def test_all_paths_that_would_break_a_command_are_named() -> None:
    words = ("launch.container='/im,ages/a.sif'", "launch.container_mounts=['/a$b','/c:d:e:f']")
    told = faults(*words, "run.dir='/it\"s'")
    for part in ("'/im,ages/a.sif'", "'/a$b'", "'/c:d:e:f'", 'it"s'):
        assert part in told
    told = faults("launch.container=x.sqsh", "run.dir=/a b/c", kind="slurm")
    assert "pyxis cannot be given the path '/a b/c': it contains ' '" in told
    assert make_container(composed("launch.container=x.sif", "run.dir=/a b/c")).folders


# --- what is refused ---


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("launch=inline", "launch.container=a"), "launch=inline trains in this process"),
        (("launch=env", "launch.container=a"), "with launch=env this command is the agent"),
        (("launch=local", "launch.container='-a'"), "'-a' is not an image"),
        (("launch=local", "launch.container=' '"), "' ' is not an image"),
        (("launch=local", "launch.container_args=[-v]"), "there is no container"),
        (("launch=local", "launch.container_runtime=podman"), "there is no container"),
        (("launch=local", "launch.container=a", "launch.container_runtime=docker"), "no such"),
        (("launch=local", "launch.container=a", "launch.container_runtime=pyxis"), "launch=slurm"),
        (("launch=slurm", "launch.container=a", "launch.container_runtime=enroot"), "launch=ssh"),
    ],
)
def test_settings_that_contradict_each_other(
    words: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_and_report_faults(lambda: run_command(["train", *words]))
    err = capsys.readouterr().err
    assert code == ExitCode.USAGE
    assert part in err
    assert "hint: " in err


def test_programs_that_a_container_does_not_take(capsys: pytest.CaptureFixture[str]) -> None:
    def type_run(*words: str) -> str:
        command = ["run", "--dry-run", "launch.container=/a", *words, "--", "wandb", "agent", "x"]
        assert run_and_report_faults(lambda: run_command(command)) == ExitCode.USAGE
        return capsys.readouterr().err

    assert "starts the trials" in type_run("launch=slurm", "mode=wandb")
    podman = ("launch=slurm", "mode=lightning", "launch.container_runtime=podman")
    assert "ends podman's monitor" in type_run(*podman)


def test_enroot_starts_files_alone() -> None:
    runtime = "launch.container_runtime=enroot"
    assert "enroot import docker://a/b" in faults("launch.container=a/b", runtime)


def test_what_is_missing_is_said_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "launch=local", "launch.container=none.sif", "launch.container_mounts=[/no]"]
    assert run_and_report_faults(lambda: run_command(words)) == ExitCode.USAGE
    err = capsys.readouterr().err
    assert "launch.container=none.sif: there is no such file or folder" in err
    assert "launch.container_mounts: /no does not exist" in err
    assert list(tmp_path.iterdir()) == []


# --- commands and scripts ---


def test_without_a_container_words_stay_as_they_are() -> None:
    assert wrap_python(composed(), [sys.executable, "-m", "x"]) == [sys.executable, "-m", "x"]


def test_a_job_with_pyxis(tmp_path: Path) -> None:
    text = script("launch.container=nvcr.io/a/b:1", "launch.nodes=2", "launch.gpus_per_node=4")
    clean = "env -u PYTHONHOME -u VIRTUAL_ENV PYTHONNOUSERSITE=1 PYTHONPATH=/opt/echelon"
    assert f"container=({clean})" in text
    assert "container_options=('--container-image=nvcr.io#a/b:1' --container-mounts=" in text
    assert f"{tmp_path}:{tmp_path}" in text
    assert '--no-container-remap-root --container-workdir="$(pwd -P)")' in text
    inside = "/opt/echelon/echelon/launch/containers/inside.py"
    assert f'"${{container[@]}}" python3 {inside} -m echelon node \\' in text
    [srun] = [line for line in text.splitlines() if line.startswith("srun ")]
    assert '"${container_options[@]}"' in srun
    # What brings lost nodes back runs beside the step, with the Python of this machine.
    assert f"{sys.executable} -m echelon return-nodes" in text
    assert "#SBATCH --signal=USR2@120" in text


@pytest.mark.parametrize("runtime", [name for name in RUNTIME_CLASSES if name != "enroot"])
def test_every_step_of_a_job_is_in_the_container(runtime: str, tmp_path: Path) -> None:
    words = ("launch.container=/image", f"launch.container_runtime={runtime}")
    config, run = composed(*words), Run(tmp_path / "runs" / "a")
    mark = "--container-image=/image" if runtime == "pyxis" else "/image"
    joining = render_joining_script(config, run, 1, 2)
    subprocess.run(["bash", "-n"], input=joining, text=True, check=True)
    assert '"${container[@]}" python3 /opt/echelon/' in joining
    for command in (
        make_trial_step_command(config, run, "a:1"),
        make_return_command(config, run, "a", 1, 2, "a:1"),
    ):
        assert any(mark in word for word in command)
        assert command[command.index("echelon") - 2 :][:2] != [sys.executable, "-m"]
        assert command[-1] == str(run.folder)
    program = script(*words, "mode=srun", program=["python", "main.py"])
    assert '"${container[@]}" python main.py' in program


def test_podman_is_given_notice_by_term() -> None:
    words = ("launch.container=/a", "launch.container_runtime=podman")
    text = script(*words, "mode=srun", program=["python", "main.py"])
    assert "#SBATCH --signal=TERM@120" in text
    assert '[ "$code" -eq 143 ]' in text


def test_no_secret_is_in_a_script(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    secrets.write_text("TOKEN=canary-81f\n")
    secrets.chmod(0o600)
    for runtime in ("podman", "charliecloud", "apptainer", "pyxis"):
        words = ("launch.container=/a", f"launch.container_runtime={runtime}")
        assert "canary" not in script(*words, f"launch.secrets={secrets}")


def test_hosts_of_ssh_start_the_container(tmp_path: Path) -> None:
    words = ("launch.hosts=[a,b]", "launch.container=/image", "launch.container_runtime=podman")
    config = assign_name(composed(*words, kind="ssh"))
    plan = SshLauncher().plan(config, HERE)
    for command in plan.commands:
        assert "podman run" in command[-1]
        assert "mkdir -p" in command[-1]
        assert "-m echelon node --tether" in command[-1]
    assert "in the container /image, by podman" in plan.render_text()

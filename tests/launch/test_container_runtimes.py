"""The words by which each runtime starts a container, beside what its documentation says.

The lines of `sh` are run as they are, with a program of the runtime's name that prints its words.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from echelon.launch.containers.command import RUNTIME_CLASSES, make_runtime_by_name
from echelon.launch.containers.runtime import Container, Mount

COMMAND = ("python3", "-m", "echelon", "it's $HOME")
PROGRAMS = ("apptainer", "singularity", "enroot", "podman", "ch-run")
DOCUMENTED = {
    # https://apptainer.org/docs/user/main/cli/apptainer_exec.html
    "apptainer": {"--bind", "--pwd", "--nv", "--rocm"},
    # https://github.com/NVIDIA/enroot/blob/master/doc/cmd/start.md
    "enroot": {"--env", "--mount"},
    # https://docs.podman.io/en/latest/markdown/podman-run.1.html
    "podman": {
        *("--rm", "--interactive", "--umask", "--workdir", "--network", "--pid", "--ipc", "--uts"),
        *("--security-opt", "--user", "--userns", "--device", "--volume", "--env", "--entrypoint"),
        "--rootfs",
    },
    # https://hpc.github.io/charliecloud/ch-run.html
    "charliecloud": {"--bind", "--cd", "--set-env", "--unset-env"},
    # https://github.com/NVIDIA/pyxis#usage
    "pyxis": {
        *("--container-image", "--container-mounts", "--container-workdir"),
        "--no-container-remap-root",
    },
}


class Node:
    """A machine with programs that print their words, and devices."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.programs, self.devices = folder, folder / "bin", folder / "dev"
        self.here = folder / "here"
        for made in (self.programs, self.devices, self.here):
            made.mkdir()
        for name in PROGRAMS:
            program = self.programs / name
            program.write_text(f"#!/bin/sh\nprintf '%s\\n' {name} \"$@\"\n")
            program.chmod(0o755)

    def start(self, runtime: str, container: Container, **variables: str) -> list[str]:
        """Return the program and the words that the prefix of a container ends in."""
        prefix = make_runtime_by_name(runtime).make_prefix(container)
        prefix = [word.replace("/dev/", f"{self.devices}/") for word in prefix]
        done = subprocess.run(
            [*prefix, *COMMAND],
            cwd=self.here,
            env={"PATH": f"{self.programs}:/usr/bin:/bin", "USER": "me", **variables},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def container(node: Node) -> Container:
    mounts = (Mount("/src/echelon", "/opt/echelon/echelon", True), Mount("/data", "/data"))
    folders = (str(node.here), "/not/on/this/node")
    return Container("/images/a", mounts, folders, ("--more=1",))


def require_documented(runtime: str, words: list[str]) -> None:
    ours = {word.partition("=")[0] for word in words if word.startswith("--") and word != "--"}
    assert ours - {"--more"} <= DOCUMENTED[runtime]


def test_apptainer(node: Node, container: Container) -> None:
    here = str(node.here)
    (node.devices / "nvidiactl").touch()
    words = node.start("apptainer", container, SECRET="hidden")
    assert words == [
        *("apptainer", "exec", "--pwd", here, "--nv", "--bind", f"{here}:{here}"),
        *("--bind", "/src/echelon:/opt/echelon/echelon:ro", "--bind", "/data:/data"),
        *("--more=1", "/images/a", *COMMAND),
    ]
    require_documented("apptainer", words)


def test_singularity_where_there_is_no_apptainer(node: Node, container: Container) -> None:
    (node.programs / "apptainer").unlink()
    (node.devices / "kfd").touch()
    assert node.start("apptainer", container)[:3] == ["singularity", "exec", "--pwd"]


@pytest.mark.parametrize(
    ("image", "given"),
    [
        ("pytorch/pytorch:2.5", "docker://pytorch/pytorch:2.5"),
        ("docker://a/b", "docker://a/b"),
        ("oras://a/b", "oras://a/b"),
        ("/a.sif", "/a.sif"),
    ],
)
def test_an_image_of_a_registry_as_apptainer_names_it(node: Node, image: str, given: str) -> None:
    assert given in node.start("apptainer", Container(image))


def test_podman(node: Node, container: Container) -> None:
    here = str(node.here)
    for name in ("nvidiactl", "infiniband"):
        (node.devices / name).touch()
    variables = {"SECRET": "hidden", "SLURM_PROCID": "3", "TWO_LINES": "a\nB=c"}
    dropped = {"LD_LIBRARY_PATH": "/x", "PYTHONPATH": "/y", "CONDA_PREFIX": "/z", "HOME": "/h"}
    words = node.start("podman", container, **variables, **dropped)
    start = words.index("--userns=keep-id") if "--userns=keep-id" in words else -1
    assert (start > 0) != ("--user=0:0" in words)
    assert words[:2] == ["podman", "run"]
    for option in ("--pid=host", "--network=host", "--ipc=host", "--uts=host", f"--workdir={here}"):
        assert option in words
    assert "--device=nvidia.com/gpu=all" in words
    assert f"--device={node.devices}/infiniband" in words
    passed = {words[i + 1] for i, word in enumerate(words) if word == "--env"}
    # Of a value with several lines, one may look like another variable; it has no value.
    assert passed - {"B"} == {*variables, "USER", "ECHELON_OUTSIDE_PID"}
    assert not any("hidden" in word for word in words)
    mounts = [words[i + 1] for i, word in enumerate(words) if word == "--volume"]
    assert mounts == [f"{here}:{here}", "/src/echelon:/opt/echelon/echelon:ro", "/data:/data"]
    end = ["--more=1", "--entrypoint=[]", "--rootfs", "/images/a:O", *COMMAND]
    assert words[-len(end) :] == end
    require_documented("podman", words[: -len(COMMAND)])


def test_podman_starts_images_of_registries_by_their_names(node: Node) -> None:
    words = node.start("podman", Container("quay.io/a/b:1"))
    assert words[-len(COMMAND) - 2 :] == ["--entrypoint=[]", "quay.io/a/b:1", *COMMAND]


def test_charliecloud(node: Node, tmp_path: Path) -> None:
    here, image = str(node.here), tmp_path / "image"
    image.mkdir()
    file = tmp_path / "file"
    file.touch()
    mounts = (Mount("/usr", "/opt/echelon/echelon", True), Mount(str(file), "/etc/one"))
    words = node.start("charliecloud", Container(str(image), mounts, (here,), ("--more=1",)))
    assert words == [
        *("ch-run", "--unset-env=LD_*", "--unset-env=CONDA_*"),
        "--set-env=PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        *(f"--cd={here}", "--bind", f"{here}:{here}", "--bind", "/usr:/opt/echelon/echelon"),
        *("--bind", f"{file}:/etc/one", "--more=1", str(image), "--", *COMMAND),
    ]
    require_documented("charliecloud", words)
    # ch-run makes no places for mounts.
    assert (image / "opt/echelon/echelon").is_dir()
    assert (image / "etc/one").is_file()
    assert (image / here.lstrip("/")).is_dir()
    # What the image says of its variables, as `ch-image` writes it.
    (image / "ch").mkdir()
    (image / "ch" / "environment").touch()
    assert "--set-env" in node.start("charliecloud", Container(str(image)))


def test_enroot(node: Node) -> None:
    here = str(node.here)
    mounts = (Mount("/src/echelon", "/opt/echelon/echelon", True),)
    container = Container("/images/a.sqsh", mounts, (here,), ("--more=1",))
    words = node.start("enroot", container, SECRET="hidden")
    assert words[:4] == ["enroot", "start", "--mount", f"{here}:{here}:none:x-create=dir,rbind,rw"]
    assert "/src/echelon:/opt/echelon/echelon:none:x-create=auto,rbind,ro" in words
    passed = {words[i + 1] for i, word in enumerate(words) if word == "--env"}
    assert passed == {"SECRET", "USER", "ECHELON_START_FOLDER"}
    end = ["--", "/images/a.sqsh", "sh", "-c", 'cd "$ECHELON_START_FOLDER" && exec "$@"', "sh"]
    assert words[-len(end) - len(COMMAND) :] == [*end, *COMMAND]
    require_documented("enroot", words[: -len(COMMAND)])


@pytest.mark.parametrize(
    ("image", "named"),
    [
        ("/images/a.sqsh", "/images/a.sqsh"),
        ("pytorch/pytorch:2.5", "pytorch/pytorch:2.5"),
        ("nvcr.io/nvidia/pytorch:24.01-py3", "nvcr.io#nvidia/pytorch:24.01-py3"),
        ("docker://nvcr.io/nvidia/pytorch", "nvcr.io#nvidia/pytorch"),
        ("me@nvcr.io#nvidia/pytorch", "me@nvcr.io#nvidia/pytorch"),
    ],
)
def test_pyxis(container: Container, image: str, named: str) -> None:
    runtime = make_runtime_by_name("pyxis")
    options = runtime.make_srun_options(Container(image, container.mounts, ("/a",), ("--more=1",)))
    mounts = "/a:/a,/src/echelon:/opt/echelon/echelon:ro,/data:/data"
    assert options == [
        f"--container-image={named}",
        f"--container-mounts={mounts}",
        *("--no-container-remap-root", "--more=1"),
    ]
    assert runtime.make_prefix(container) == []
    require_documented("pyxis", options)


@pytest.mark.parametrize("runtime", [name for name in RUNTIME_CLASSES if name != "pyxis"])
def test_a_runtime_that_is_not_there_is_named(runtime: str, tmp_path: Path) -> None:
    prefix = make_runtime_by_name(runtime).make_prefix(Container("/images/a"))
    empty = {"PATH": str(tmp_path)}
    done = subprocess.run(["/bin/sh", *prefix[1:]], env=empty, capture_output=True, text=True)
    assert done.returncode == 127
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "is not on the PATH of" in done.stderr


INSIDE = Path(sys.modules[Container.__module__].__file__ or "").with_name("inside.py")


def test_a_python_without_packages_says_what_it_lacks() -> None:
    words = [sys.executable, "-I", "-S", str(INSIDE), "-m", "json.tool"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 8
    error, hint = done.stderr.splitlines()
    assert error.startswith(f"error: the Python of the image ({sys.executable}) lacks torch, ")
    assert "pip install torch numpy hydra-core" in hint


def test_what_runs_inside_finds_what_python_m_finds(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sys; print(sys.argv[1:], sys.path[0], __name__)\n")

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, str(INSIDE), *options, "-m", "mine", "a b", "-m"]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)

    assert run("-u").stdout == f"['a b', '-m'] {tmp_path} __main__\n"
    assert "No module named mine" in run("-P").stderr


def test_what_is_needed_inside_is_what_the_project_needs() -> None:
    import importlib.metadata
    import runpy

    from packaging.requirements import Requirement

    needed = runpy.run_path(str(INSIDE), run_name="inside")["NEEDED"]
    wanted = map(Requirement, importlib.metadata.requires("echelon") or [])
    names = {w.name.lower() for w in wanted if "extra" not in str(w.marker or "")}
    assert {package for _, package in needed} == names - {"tomli"}

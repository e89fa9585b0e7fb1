"""An image made of this machine's own files, and the settings with which runs start in it.

Images cannot be downloaded in tests. This one is a folder with the places of files, in which the
system's own and the Python that tests run with are mounted. It has no packages of its own.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "install_containers.py"
_PROCESSES = 8192


def require_containers() -> None:
    """Install podman and Charliecloud if that is possible; otherwise skip with the reason."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        give_up(done.stderr.strip())


def give_up(reason: str) -> None:
    """Skip the test, or fail it where that was asked for."""
    if os.environ.get("ECHELON_REQUIRE_CLUSTER") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def make_image(folder: Path) -> Path:
    """Return a folder that is an image: empty places, and the names of users and hosts."""
    image = folder / "image"
    for name in ("dev", "etc", "home", "mnt", "opt", "proc", "root", "run", "sys", "tmp", "usr"):
        (image / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        if (Path("/") / name).is_symlink():
            (image / name).symlink_to(f"usr/{name}")
            (image / "usr" / name).mkdir()
    for name in ("passwd", "group", "hosts", "resolv.conf", "ld.so.cache"):
        if (Path("/etc") / name).exists():
            shutil.copy(Path("/etc") / name, image / "etc" / name)
    (image / "etc" / "hostname").touch()
    return image


def make_settings(image: Path, runtime: str) -> tuple[str, ...]:
    """Return the words that start a run in the image, with this Python."""
    prefixes = dict.fromkeys([sys.base_prefix, sys.prefix])
    mounts = ["/usr:/usr:ro", *(f"'{p}:{p}:ro'" for p in prefixes if not p.startswith("/usr/"))]
    return (
        f"launch.container={image}",
        f"launch.container_runtime={runtime}",
        f"launch.container_mounts=[{','.join(mounts)}]",
        f"launch.container_python={sys.executable}",
    )


def make_podman_variables(folder: Path) -> dict[str, str]:
    """Return variables with which podman works on this machine, whose root may not raise limits,
    and whose kernel may have both kinds of cgroups, which crun refuses."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    config = folder / "containers.conf"
    config.write_text(
        "[containers]\n"
        f'default_ulimits = ["nofile={files}:{files}", "nproc={_PROCESSES}:{_PROCESSES}"]\n'
        '[engine]\nruntime = "runc"\n'
    )
    return {"CONTAINERS_CONF": str(config)}


def require_runs(image: Path, runtime: str, variables: dict[str, str]) -> None:
    """Skip the test where this machine does not let the runtime start a container."""
    usr = ("/usr:/usr", str(image))
    start = {
        "podman": ("podman", "run", "--rm", "--pid=host", "-v", usr[0], "--rootfs", usr[1], "true"),
        "charliecloud": ("ch-run", "-b", *usr, "--", "true"),
    }[runtime]
    env = {"USER": "root", **os.environ, **variables}
    done = subprocess.run(start, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        give_up(f"{runtime} starts no container on this machine: {done.stderr.strip()}")


def make_python_image(folder: Path) -> Path:
    """Return a folder that is an image with a shell, this Python's standard library and pip, and
    nothing of this machine that has to be mounted."""
    image = make_image(folder)
    prefix = image / sys.base_prefix.lstrip("/")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = prefix / "lib" / version
    unused = shutil.ignore_patterns("site-packages", "test", "tests", "idlelib", "__pycache__")
    shutil.copytree(Path(sys.base_prefix) / "lib" / version, library, ignore=unused)
    programs = ["/bin/sh", "/usr/bin/env", "/bin/uname", "/usr/bin/id", "/bin/rm", "/bin/cat"]
    programs.append(os.path.realpath(sys.executable))
    for program in programs:
        _copy_program(Path(program), image)
    for module in (library / "lib-dynload").iterdir():
        _copy_libraries(module, image)
    python = image / "usr" / "bin" / "python3"
    python.symlink_to(os.path.realpath(sys.executable))
    [wheel] = (library / "ensurepip" / "_bundled").glob("pip-*.whl")
    shutil.unpack_archive(wheel, library / "site-packages", "zip")
    return image


def _copy_program(program: Path, image: Path) -> None:
    target = image / os.path.realpath(program).lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(os.path.realpath(program), target)
    name = image / "usr" / "bin" / program.name
    name.parent.mkdir(exist_ok=True)
    if not name.exists():
        name.symlink_to(os.path.realpath(program))
    _copy_libraries(program, image)


def _copy_libraries(program: Path, image: Path) -> None:
    """Copy what the dynamic linker loads for a program."""
    listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True).stdout
    for word in listed.split():
        if word.startswith("/") and not (target := image / word.lstrip("/")).exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(word, target)

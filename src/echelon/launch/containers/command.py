"""From a configuration to the words that run a command in its container.

Launchers call `wrap_command` for a program and `wrap_python` for a module of Echelon; without
`launch.container` both return the words as they are.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import echelon
from echelon.config.schema import Config, LaunchConfig
from echelon.errors import EchelonError, Fault
from echelon.launch.containers.runtime import (
    Container,
    ContainerRuntime,
    Mount,
    expand_path,
    is_image_path,
)

RUNTIME_CLASSES = {
    "apptainer": "ApptainerRuntime",
    "pyxis": "PyxisRuntime",
    "enroot": "EnrootRuntime",
    "podman": "PodmanRuntime",
    "charliecloud": "CharliecloudRuntime",
}
"""`launch.container_runtime` → the class in the module of that name."""
_SOURCE_FOLDER = "/opt/echelon"
"""Where a container sees Echelon's own source: away from the packages of any Python there."""
_INSIDE = f"{_SOURCE_FOLDER}/echelon/launch/containers/inside.py"
_SYSTEM_FOLDERS = frozenset(
    ("/bin", "/dev", "/etc", "/lib", "/lib64", "/opt", "/proc", "/run", "/sbin", "/sys", "/usr")
)
"""Folders that an image has of its own; as the current folder they are not mounted."""
_CLEAN_ENVIRONMENT = (
    *("env", "-u", "PYTHONHOME", "-u", "VIRTUAL_ENV"),
    # Packages in the home folder were installed for the Python of the host.
    "PYTHONNOUSERSITE=1",
    f"PYTHONPATH={_SOURCE_FOLDER}",
)


def choose_runtime(launch: LaunchConfig, env: Mapping[str, str] = os.environ) -> str:
    """Return `launch.container_runtime`, or with `auto` what fits the image: its kind decides, and
    where several fit, which of them is on the PATH."""
    if launch.container_runtime != "auto":
        return launch.container_runtime
    image, on_slurm = launch.container or "", launch.kind == "slurm"
    enroot = "pyxis" if on_slurm else "enroot"

    def first_of(*names: str) -> str:
        path = env.get("PATH", "")
        found = (n for n in names if any(shutil.which(p, path=path) for p in _get_programs(n)))
        return next(found, names[0])

    if image.startswith(("library://", "oras://", "shub://", "instance://")):
        return "apptainer"
    if image.endswith((".sif", ".img")):
        return "apptainer"
    if image.endswith((".sqsh", ".sqfs", ".squashfs")):
        return enroot
    if is_image_path(image):
        return first_of("charliecloud", "podman", "apptainer")
    if image.startswith("docker://"):
        return first_of("apptainer", "podman")
    return "pyxis" if on_slurm else first_of("podman", "apptainer", "charliecloud", "enroot")


def make_runtime(launch: LaunchConfig) -> ContainerRuntime:
    """Return the runtime of this configuration."""
    return make_runtime_by_name(choose_runtime(launch))


def make_runtime_by_name(name: str) -> ContainerRuntime:
    """Return the runtime of this name."""
    module = import_module(f"echelon.launch.containers.{name}")
    runtime: ContainerRuntime = getattr(module, RUNTIME_CLASSES[name])()
    return runtime


def _get_programs(name: str) -> tuple[str, ...]:
    return make_runtime_by_name(name).programs


def pin_runtime(config: Config) -> Config:
    """Return the configuration with the runtime that `auto` means on this machine, so that the
    nodes use the same one."""
    if config.launch.container is None:
        return config
    runtime = choose_runtime(config.launch)
    return replace(config, launch=replace(config.launch, container_runtime=runtime))


def make_container(config: Config) -> Container:
    """Return the container of a run: its image and everything that is mounted.

    Raises an EchelonError for all mounts that cannot be written down for the runtime.
    """
    launch = config.launch
    assert launch.container is not None
    runtime = make_runtime(launch)
    image = launch.container
    faults: list[Fault] = []
    mounts = [Mount(str(Path(echelon.__file__).parent), f"{_SOURCE_FOLDER}/echelon", True)]
    for text in launch.container_mounts:
        try:
            mounts.append(parse_mount(text))
        except EchelonError as error:
            faults += error.faults
    container = Container(
        expand_path(image) if is_image_path(image) else image,
        tuple(mounts),
        tuple(_list_default_folders(config, {mount.target for mount in mounts})),
        tuple(launch.container_args),
    )
    paths = [*container.folders, *(path for mount in mounts for path in mount[:2])]
    if container.is_path:
        paths.append(container.image)
    faults += [
        Fault(
            f"{runtime.name} cannot be given the path {path!r}: it contains {character!r}",
            "rename it, or work elsewhere: run.dir, the current folder and that of the experiment "
            "are mounted",
        )
        for path in dict.fromkeys(paths)
        for character in dict.fromkeys(path)
        if character in runtime.reserved_characters
    ]
    if fault := runtime.find_image_fault(container):
        faults.append(fault)
    if faults:
        raise EchelonError(*faults)
    return container


def parse_mount(text: str) -> Mount:
    """Return the mount that SOURCE, SOURCE:TARGET, or either with :ro behind it, means."""
    parts = text.split(":")
    read_only = len(parts) > 1 and parts[-1] in ("ro", "rw") and parts.pop() == "ro"
    source = expand_path(parts[0])
    if len(parts) > 2 or not all(parts) or not (len(parts) == 1 or parts[1].startswith("/")):
        raise EchelonError(
            Fault(
                f"launch.container_mounts: {text!r} is not a mount",
                "write SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro, with an absolute TARGET",
            )
        )
    return Mount(source, parts[1] if len(parts) == 2 else source, read_only)


def _list_default_folders(config: Config, taken: set[str]) -> list[str]:
    """Return the folders that a run needs at the same paths, without those in others of them."""
    run_dir, here = Path(config.run.dir).absolute(), Path.cwd()
    wanted = [run_dir, *([] if str(here) in _SYSTEM_FOLDERS else [here])]
    file = str(config.experiment.get("entry", "")).rpartition(":")[0]
    if file.endswith(".py"):
        wanted.append(Path(file).parent)
    real = [folder.resolve() for folder in wanted]
    chosen: list[Path] = []
    # By their lengths, so that a folder comes before those in it. One that is reached by a link is
    # mounted under both names.
    for folder in sorted([*real, *wanted], key=lambda path: len(path.parts)):
        if len(folder.parts) > 1 and not any(folder.is_relative_to(other) for other in chosen):
            chosen.append(folder)
    return [str(folder) for folder in chosen if str(folder) not in taken]


# --- the words ---


def wrap_command(config: Config, words: Sequence[str]) -> list[str]:
    """Return the words of a command that runs others in the container of the run."""
    if config.launch.container is None:
        return list(words)
    prefix = make_runtime(config.launch).make_prefix(make_container(config))
    return [*prefix, *_CLEAN_ENVIRONMENT, *words]


def wrap_python(config: Config, words: Sequence[str]) -> list[str]:
    """Return the words of a command of Echelon's: words[0] is this Python, and in a container it is
    that of the image, which is looked at first."""
    if config.launch.container is None:
        return list(words)
    return wrap_command(config, [config.launch.container_python, _INSIDE, *words[1:]])


def make_srun_options(config: Config) -> list[str]:
    """Return the options by which `srun` itself starts the container."""
    if config.launch.container is None:
        return []
    return make_runtime(config.launch).make_srun_options(make_container(config))


def describe_container(config: Config) -> tuple[str, ...]:
    """Return the step of a plan that says in what everything runs."""
    launch = config.launch
    if launch.container is None:
        return ()
    runtime, container = make_runtime(launch), make_container(config)
    mounted = [*container.folders, *(f"{m.source} at {m.target}" for m in container.mounts)]
    return (
        f"start what follows in the container {container.image}, by {runtime.name}, with "
        f"{launch.container_python} of the image; mounted: {', '.join(mounted)}",
    )

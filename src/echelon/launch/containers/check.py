"""What is wrong with the container of a run, found before anything is written or started."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from echelon.config.schema import Config
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.hosts.ask import ask_host, join_last_lines
from echelon.launch.containers.command import (
    choose_runtime,
    make_container,
    make_runtime,
    wrap_python,
)
from echelon.launch.containers.runtime import PROGRAM_MISSING

PROBE_MODULE = "echelon.launch.ssh.host_probe"
"""It says what a machine has, as for launch=ssh."""
_START_LIMIT_S = 60.0
_DOWNLOAD_LIMIT_S = 3600.0
_PYXIS_LIMIT_S = 20.0


def require_container_here(config: Config) -> None:
    """Start the container on this machine once, with a program that looks around; raise an
    EchelonError for what is missing in it. Nothing is done without `launch.container`."""
    if config.launch.container is None:
        return
    container = make_container(config)
    if faults := [*find_missing_paths(config)]:
        raise EchelonError(*faults)
    limit_s = _START_LIMIT_S
    if not container.is_path:
        print(f"looking into {container.image}, which may have to be downloaded", file=sys.stderr)
        limit_s = _DOWNLOAD_LIMIT_S
    words = wrap_python(config, [sys.executable, "-m", PROBE_MODULE, os.getcwd(), config.run.dir])
    Path(config.run.dir).absolute().mkdir(parents=True, exist_ok=True)
    answer = ask_host(words, b"", limit_s)
    if answer.exit_code is None:
        raise EchelonError(
            Fault(
                f"the container of {container.image} {answer.failure}",
                "look at it by hand: `echelon train --dry-run …` shows what starts it",
            )
        )
    if answer.exit_code != 0 or answer.read_message() is None:
        raise EchelonError(
            explain_failed_start(config, answer.exit_code, answer.stderr), exit=ExitCode.NOT_READY
        )


def explain_failed_start(config: Config, code: int, error_output: str, where: str = "") -> Fault:
    """Return the fault of a container in which Python did not come to its end; `where` is " on
    HOST"."""
    launch = config.launch
    runtime = make_runtime(launch)
    inside = [line for line in error_output.splitlines() if line.startswith("error: ")]
    hints = [line for line in error_output.splitlines() if line.startswith("  hint: ")]
    if code == ExitCode.NOT_READY and inside and hints:
        return Fault(
            f"launch.container={launch.container}: {inside[-1].removeprefix('error: ')}{where}",
            hints[-1].removeprefix("  hint: "),
        )
    said = join_last_lines(error_output)
    if code == PROGRAM_MISSING and inside:
        return Fault(
            f"launch.container={launch.container}, but {inside[-1].removeprefix('error: ')}",
            runtime.installation,
        )
    missing = "no such file" in said.lower() or "not found" in said or "not exist" in said
    for mount in make_container(config).mounts:
        if missing and mount.source in said:
            return Fault(
                f"{mount.source} cannot be mounted{where}, since it is not there: {said}",
                "create it there, or leave it out of launch.container_mounts; Echelon itself must "
                "be at the same path on every host",
            )
    if launch.container_python in said and missing:
        return Fault(
            f"launch.container={launch.container} has no {launch.container_python}{where}: {said}",
            "name the Python of the image: launch.container_python=/opt/conda/bin/python",
        )
    return Fault(
        f"{runtime.name} does not start {launch.container}{where} (exit code {code}): "
        f"{said or 'it printed nothing'}",
        "check launch.container, container_mounts and container_args; --dry-run shows the command",
    )


def require_container_for_jobs(config: Config) -> None:
    """Raise an EchelonError for what a login node can see to be wrong; the rest is found on the
    nodes, before anything is trained."""
    if config.launch.container is None:
        return
    make_container(config)
    faults = [f for f in find_missing_paths(config) if f.what.startswith("launch.container=")]
    if choose_runtime(config.launch) == "pyxis" and not _has_pyxis():
        faults.append(
            Fault(
                "launch.container_runtime=pyxis, but `srun --help` of this machine has no "
                "--container-image",
                "ask for the plugin Pyxis, or name what the nodes have: "
                "launch.container_runtime=apptainer, podman or charliecloud",
            )
        )
    if faults:
        raise EchelonError(*faults)
    for fault in find_missing_paths(config):
        # Disks of the nodes alone may be meant.
        print(f"warning: {fault.what}, on this machine", file=sys.stderr)


def _has_pyxis() -> bool:
    if shutil.which("srun") is None:
        return False
    answer = ask_host(["srun", "--help"], b"", _PYXIS_LIMIT_S)
    return "--container-image" in answer.stdout


def find_missing_paths(config: Config) -> Iterator[Fault]:
    """Yield the faults of an image and of mounts that are not on this machine."""
    container = make_container(config)
    if container.is_path and not Path(container.image).exists():
        yield Fault(
            f"launch.container={config.launch.container}: there is no such file or folder",
            "give the path of an image, or a reference to one in a registry",
        )
    for mount in container.mounts:
        if not Path(mount.source).exists():
            yield Fault(
                f"launch.container_mounts: {mount.source} does not exist",
                "create it, or leave it out",
            )

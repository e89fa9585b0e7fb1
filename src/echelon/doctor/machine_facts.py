"""Facts about this machine as plain data; ``rules`` evaluates them.

torch is asked in a process of its own (``torch_facts``): importing it takes seconds, and a broken
CUDA can kill the process that initializes it. Slow facts are read in parallel.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from echelon import __version__
from echelon.doctor.torch_wheels import Version, parse_version
from echelon.gpus import count_visible_gpus, nvml
from echelon.gpus.nvml import NvmlError
from echelon.gpus.probe import GPU_FAULTS, NO_GPU_REASONS
from echelon.tracking import wandb_key
from echelon.utils.os_errors import format_os_error_reason

_COMMAND_TIMEOUT_S = 8.0
TORCH_TIMEOUT_S = 90.0
"""A first import of torch from a shared file system takes up to this long."""
_ADJTIMEX_ERROR = 5
"""The state TIME_ERROR of adjtimex(2): the clock is not synchronized."""
_UNLIMITED = resource.RLIM_INFINITY
EXTRAS = {
    "data": "pyarrow",
    "movielens": "pyarrow",
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "sweep": "optuna",
    "plot": "matplotlib",
    "cloud": "obstore",
    "stacks": "py-spy",
    "board": "textual",
}
"""The extras of pyproject.toml, each with a package that it installs."""


def _is_installed(package: str) -> bool:
    """Return whether a package is installed; one that has no module, as a program has none, too."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(package))
    return importlib.util.find_spec(package) is not None


@dataclass(frozen=True)
class TorchFacts:
    """What torch reports about itself."""

    version: str
    cuda: str | None = None
    """The CUDA version that it was built with."""
    hip: str | None = None
    archs: Sequence[str] = ()
    """What it was built for, such as ``sm_90``."""
    nccl: str | None = None
    gloo: bool = True
    devices: Sequence[GpuModel] = ()
    trouble: str = ""
    """Why CUDA could not be initialized."""


class GpuModel(NamedTuple):
    """A GPU's product name and compute capability."""

    name: str
    capability: Version


class DriverFacts(NamedTuple):
    """What NVML reports."""

    version: str
    cuda: Version | None
    """The newest CUDA version that it supports."""
    devices: Sequence[GpuModel | str]
    """A text instead of a model says why NVML cannot read that device."""


class MissingDriver(NamedTuple):
    """Why NVML cannot be used."""

    reason: str
    is_broken: bool = False
    """Whether it is installed but does not work."""


class DiskFacts(NamedTuple):
    """The file system of a folder, which may not exist yet."""

    name: str
    """What it is for: ``here``, ``runs``, ``tmp`` or ``home``."""
    path: str
    free_bytes: int
    free_inodes: int | None
    """None on a file system that does not count them."""
    is_writable: bool


class ResourceLimit(NamedTuple):
    """A limit of getrlimit(2); infinity if there is none."""

    soft: float
    hard: float


class ToolFacts(NamedTuple):
    """A program that is installed: what it printed, and why it failed, or empty."""

    version: str
    trouble: str = ""


@dataclass(frozen=True)
class MachineFacts:
    """Everything that the rules look at."""

    python: Version
    executable: str
    venv: str | None
    """The folder of the virtual or conda environment; None outside of one."""
    echelon: str
    extras: Mapping[str, bool]
    """Whether each extra is installed."""
    torch: TorchFacts | str
    """A text says why it cannot be imported."""
    driver: DriverFacts | MissingDriver
    visible_gpus: int
    nvcc_version: str | None
    port_fault: str
    """Why no TCP port can be opened; empty if one can."""
    disks: Sequence[DiskFacts]
    shm_bytes: tuple[int, int] | None
    """The size of /dev/shm and what is free; None if it does not exist."""
    open_files_limit: ResourceLimit
    process_limit: ResourceLimit
    locked_memory_limit: ResourceLimit
    has_infiniband: bool
    core_count: int
    omp_num_threads: str | None
    wandb_fault: str | None
    """Why there is no usable API key; None if there is one."""
    slurm: ToolFacts | None
    ssh: ToolFacts | None
    now: float
    is_clock_synchronized: bool | None
    """Whether the clock follows a time server; None if the kernel does not know."""
    host: str
    addresses: Sequence[str] = field(default_factory=list)
    """What the host's name resolves to."""


def read_machine_facts(env: Mapping[str, str], runs: Path) -> MachineFacts:
    """Return the facts about this machine; ``runs`` is a folder that need not exist."""
    with ThreadPoolExecutor(5) as pool:
        torch = pool.submit(read_torch_facts)
        driver = pool.submit(read_driver_facts)
        nvcc = pool.submit(_read_nvcc_version, env)
        slurm = pool.submit(_read_slurm)
        ssh = pool.submit(_read_ssh)
        local_facts = _read_local_facts(env, runs)
        return MachineFacts(
            torch=torch.result(),
            driver=driver.result(),
            nvcc_version=nvcc.result(),
            slurm=slurm.result(),
            ssh=ssh.result(),
            **local_facts,
        )


def _read_local_facts(env: Mapping[str, str], runs: Path) -> dict[str, Any]:
    """Return what can be read at once, as arguments for MachineFacts."""
    host = socket.gethostname()
    return {
        "python": sys.version_info[:2],
        "executable": sys.executable,
        "venv": sys.prefix if sys.prefix != sys.base_prefix else env.get("CONDA_PREFIX"),
        "echelon": __version__,
        "extras": {name: _is_installed(package) for name, package in EXTRAS.items()},
        "visible_gpus": count_visible_gpus(env),
        "port_fault": _find_port_fault(),
        "disks": [
            _read_working_folder_disk(),
            read_disk("runs", runs),
            read_disk("tmp", Path(tempfile.gettempdir())),
            read_disk("home", Path(env.get("HOME") or "/")),
        ],
        "shm_bytes": _read_space(Path("/dev/shm")),
        "open_files_limit": _read_limit(resource.RLIMIT_NOFILE),
        "process_limit": _read_limit(resource.RLIMIT_NPROC),
        "locked_memory_limit": _read_limit(resource.RLIMIT_MEMLOCK),
        "has_infiniband": any(Path("/sys/class/infiniband").glob("*")),
        "core_count": len(os.sched_getaffinity(0)),
        "omp_num_threads": env.get("OMP_NUM_THREADS"),
        "wandb_fault": wandb_key.find_key_problem(env),
        "now": time.time(),
        "is_clock_synchronized": _is_clock_synchronized(),
        "host": host,
        "addresses": resolve_addresses(host),
    }


# --- torch and the driver ---


def read_torch_facts() -> TorchFacts | str:
    """Return what torch reports, or why it cannot be imported."""
    answer = run_module_for_json("echelon.doctor.torch_facts", TORCH_TIMEOUT_S)
    if isinstance(answer, str):
        return answer
    devices = [GpuModel(name, (a, b)) for name, (a, b) in answer.pop("devices")]
    return TorchFacts(**answer, devices=devices)


def run_module_for_json(module: str, timeout_s: float) -> dict[str, Any] | str:
    """Run one of our modules in a process of its own.

    Returns the last JSON value that it prints, or a text that says why there is none.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:g} s"
    for line in reversed(done.stdout.splitlines() if done.returncode == 0 else []):
        with suppress(ValueError):  # libraries may print more when the process exits
            loaded: dict[str, Any] = json.loads(line)
            return loaded
    return describe_exit(done.returncode, done.stderr)


def describe_exit(code: int, output: str) -> str:
    """Return the last line of a process's output as the reason why it ended."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = lines[-1] if lines else "no output"
    return f"killed by signal {-code}: {last}" if code < 0 else last


def read_driver_facts() -> DriverFacts | MissingDriver:
    """Return what NVML reports about the driver and its devices."""
    try:
        with nvml.open_nvml() as library:
            devices = [_read_gpu_model(library, index) for index in range(library.count_devices())]
            return DriverFacts(
                library.read_driver_version() or "?",
                parse_version(library.read_cuda_version()),
                devices,
            )
    except NvmlError as error:
        reason = NO_GPU_REASONS.get(error.code, str(error))
        return MissingDriver(reason, is_broken=error.code != nvml.NO_LIBRARY)


def _read_gpu_model(library: nvml.Nvml, index: int) -> GpuModel | str:
    try:
        device = library.open_device(index)
        return GpuModel(device.read_name() or "?", device.read_compute_capability() or (0, 0))
    except NvmlError as error:
        return GPU_FAULTS.get(error.code, str(error))


# --- programs ---


def run_tool(*words: str) -> ToolFacts | None:
    """Run a program and return all that it prints; None if it is not installed."""
    if shutil.which(words[0]) is None:
        return None
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_COMMAND_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return ToolFacts("", f"{words[0]} did not answer within {_COMMAND_TIMEOUT_S:g} s")
    except OSError as error:
        return ToolFacts("", f"{words[0]} cannot be run: {format_os_error_reason(error)}")
    text = done.stdout.strip() or done.stderr.strip()
    last = (done.stderr.strip() or text).splitlines()[-1:] or [f"exit code {done.returncode}"]
    return ToolFacts(text, last[0] if done.returncode else "")


def _read_nvcc_version(env: Mapping[str, str]) -> str | None:
    """Return the version of the nvcc on the PATH, else of CUDA_HOME."""
    home = env.get("CUDA_HOME") or "/usr/local/cuda"
    answer = run_tool("nvcc", "--version") or run_tool(f"{home}/bin/nvcc", "--version")
    match = re.search(r"release (\d+\.\d+)", answer.version if answer else "")
    return match[1] if match else None


def _read_slurm() -> ToolFacts | None:
    """Return Slurm's version and whether its controller answers."""
    client = run_tool("sinfo", "--version")
    if client is None or client.trouble:  # even this needs a configuration
        return client and ToolFacts("", client.trouble)
    answer = run_tool("sinfo", "-h", "-o", "%D")
    return ToolFacts(client.version, answer.trouble if answer else "")


def _read_ssh() -> ToolFacts | None:
    """Return the version of OpenSSH's client."""
    return run_tool("ssh", "-V")


# --- this machine ---


def read_disk(name: str, path: Path) -> DiskFacts:
    """Return the file system that a folder is on, or would be on once it is made."""
    path = Path(_get_working_folder()) / path
    existing = next(p for p in (path, *path.parents) if os.path.isdir(p))
    space = os.statvfs(existing)
    return DiskFacts(
        name,
        str(path),
        free_bytes=space.f_bavail * space.f_frsize,
        free_inodes=space.f_favail if space.f_files else None,
        is_writable=os.access(existing, os.W_OK | os.X_OK),
    )


def _read_working_folder_disk() -> DiskFacts:
    """Return the file system of the working folder.

    A folder that was removed counts as not writable: torch cannot be imported from there either.
    """
    here = _get_working_folder()
    found = read_disk("here", Path(here))
    return found if os.path.isdir(here) else found._replace(is_writable=False)


def _get_working_folder() -> str:
    """Return the working folder, or the name it had before it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return os.environ.get("PWD") or "/"


def _read_space(path: Path) -> tuple[int, int] | None:
    """Return size and free space in bytes; None if the path does not exist."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _read_limit(which: int) -> ResourceLimit:
    soft, hard = resource.getrlimit(which)
    return ResourceLimit(*(float("inf") if n == _UNLIMITED else n for n in (soft, hard)))


def _find_port_fault() -> str:
    """Return why no TCP port can be opened and connected to; empty if one can."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()
    except OSError as error:
        return format_os_error_reason(error)
    return ""


def _is_clock_synchronized() -> bool | None:
    """Return whether the kernel's clock follows a time server; None if that is not known."""
    state = ctypes.CDLL(None).adjtimex(ctypes.byref(ctypes.create_string_buffer(512)))
    return None if state < 0 else state != _ADJTIMEX_ERROR


def resolve_addresses(name: str) -> list[str]:
    """Return the addresses that a host name resolves to; empty if it does not."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(where[0]) for *_, where in found))

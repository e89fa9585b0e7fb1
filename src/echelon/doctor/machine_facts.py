"""What is so on this machine, as plain data; nothing is judged here.

torch is asked in a process of its own: importing it takes seconds, and a broken CUDA can take the
whole process with it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
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
from echelon.utils.os_errors import describe_os_error

_COMMAND_TIMEOUT_S = 8.0
TORCH_TIMEOUT_S = 90.0
"""A first import from a shared disk takes that long."""
_ADJTIMEX_ERROR = 5
"""adjtimex(2): nobody keeps this clock right."""
_UNLIMITED = resource.RLIM_INFINITY
EXTRAS = {
    "movielens": "pyarrow",
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "sweep": "optuna",
    "plot": "matplotlib",
}
"""Of pyproject.toml, each by the package that it brings."""


@dataclass(frozen=True)
class TorchFacts:
    version: str
    cuda: str | None = None
    """That it was built with."""
    hip: str | None = None
    archs: Sequence[str] = ()
    nccl: str | None = None
    gloo: bool = True
    devices: Sequence[GpuModel] = ()
    trouble: str = ""
    """What CUDA said instead of devices."""


class GpuModel(NamedTuple):
    name: str
    capability: Version


class DriverFacts(NamedTuple):
    version: str
    cuda: Version | None
    """The newest that it supports."""
    devices: Sequence[GpuModel | str]
    """In place of a device, what NVML said of one that does not answer."""


class MissingDriver(NamedTuple):
    reason: str
    is_broken: bool = False
    """Rather than not there."""


class DiskFacts(NamedTuple):
    what: str
    path: str
    free: int
    inodes: int | None
    """Free ones; None on a file system that does not count them."""
    writable: bool


class ResourceLimit(NamedTuple):
    soft: float
    hard: float


class ToolFacts(NamedTuple):
    version: str
    trouble: str = ""


@dataclass(frozen=True)
class MachineFacts:
    python: Version
    executable: str
    venv: str | None
    """A virtual or conda environment's folder."""
    echelon: str
    extras: Mapping[str, bool]
    torch: TorchFacts | str
    """Or why there is none."""
    driver: DriverFacts | MissingDriver
    visible: int
    nvcc: str | None
    port: str
    """Why none can be opened; empty if one can."""
    disks: Sequence[DiskFacts]
    shm: tuple[int, int] | None
    """Bytes: all, free."""
    files: ResourceLimit
    processes: ResourceLimit
    locked: ResourceLimit
    infiniband: bool
    cores: int
    omp: str | None
    wandb: str | None
    """What is wrong with its key, or nothing."""
    slurm: ToolFacts | None
    ssh: ToolFacts | None
    now: float
    clock_kept: bool | None
    """By a time server; None: the kernel does not say."""
    host: str
    addresses: Sequence[str] = field(default_factory=list)
    """Of the host's name."""


def read_machine_facts(env: Mapping[str, str], runs: Path) -> MachineFacts:
    with ThreadPoolExecutor(5) as pool:
        torch = pool.submit(read_torch_facts)
        driver = pool.submit(read_driver_facts)
        nvcc, slurm, ssh = (
            pool.submit(_read_nvcc_version, env),
            pool.submit(_read_slurm),
            pool.submit(_read_ssh),
        )
        here = _read_local_facts(env, runs)
        return MachineFacts(
            torch=torch.result(),
            driver=driver.result(),
            nvcc=nvcc.result(),
            slurm=slurm.result(),
            ssh=ssh.result(),
            **here,
        )


def _read_local_facts(env: Mapping[str, str], runs: Path) -> dict[str, Any]:
    host = socket.gethostname()
    return {
        "python": sys.version_info[:2],
        "executable": sys.executable,
        "venv": sys.prefix if sys.prefix != sys.base_prefix else env.get("CONDA_PREFIX"),
        "echelon": __version__,
        "extras": {name: importlib.util.find_spec(p) is not None for name, p in EXTRAS.items()},
        "visible": count_visible_gpus(env),
        "port": _try_port(),
        "disks": [
            _read_working_folder_disk(),
            read_disk("runs", runs),
            read_disk("tmp", Path(tempfile.gettempdir())),
            read_disk("home", Path(env.get("HOME") or "/")),
        ],
        "shm": _read_space(Path("/dev/shm")),
        "files": _read_limit(resource.RLIMIT_NOFILE),
        "processes": _read_limit(resource.RLIMIT_NPROC),
        "locked": _read_limit(resource.RLIMIT_MEMLOCK),
        "infiniband": any(Path("/sys/class/infiniband").glob("*")),
        "cores": len(os.sched_getaffinity(0)),
        "omp": env.get("OMP_NUM_THREADS"),
        "wandb": wandb_key.find_key_problem(env),
        "now": time.time(),
        "clock_kept": _is_clock_synchronized(),
        "host": host,
        "addresses": resolve_addresses(host),
    }


# --- torch and the driver ---


def read_torch_facts() -> TorchFacts | str:
    answer = run_module_for_json("echelon.doctor.torch_facts", TORCH_TIMEOUT_S)
    if isinstance(answer, str):
        return answer
    devices = [GpuModel(name, (a, b)) for name, (a, b) in answer.pop("devices")]
    return TorchFacts(**answer, devices=devices)


def run_module_for_json(module: str, timeout_s: float) -> dict[str, Any] | str:
    """What a module of ours prints last, as JSON; or why it did not come to that."""
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
        with suppress(ValueError):  # an ending program may say more
            loaded: dict[str, Any] = json.loads(line)
            return loaded
    return describe_exit(done.returncode, done.stderr)


def describe_exit(code: int, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = lines[-1] if lines else "without a word"
    return f"killed by signal {-code}: {last}" if code < 0 else last


def read_driver_facts() -> DriverFacts | MissingDriver:
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
    """All that a program answers; None where there is no such program."""
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
        return ToolFacts("", f"{words[0]} cannot be run: {describe_os_error(error)}")
    text = done.stdout.strip() or done.stderr.strip()
    last = (done.stderr.strip() or text).splitlines()[-1:] or [f"exit code {done.returncode}"]
    return ToolFacts(text, last[0] if done.returncode else "")


def _read_nvcc_version(env: Mapping[str, str]) -> str | None:
    home = env.get("CUDA_HOME") or "/usr/local/cuda"
    answer = run_tool("nvcc", "--version") or run_tool(f"{home}/bin/nvcc", "--version")
    match = re.search(r"release (\d+\.\d+)", answer.version if answer else "")
    return match[1] if match else None


def _read_slurm() -> ToolFacts | None:
    client = run_tool("sinfo", "--version")
    if client is None or client.trouble:  # even this needs a configuration
        return client and ToolFacts("", client.trouble)
    answer = run_tool("sinfo", "-h", "-o", "%D")
    return ToolFacts(client.version, answer.trouble if answer else "")


def _read_ssh() -> ToolFacts | None:
    return run_tool("ssh", "-V")


# --- this machine ---


def read_disk(what: str, path: Path) -> DiskFacts:
    """Of a folder that may yet have to be made."""
    path = Path(_get_working_folder()) / path
    there = next(p for p in (path, *path.parents) if os.path.isdir(p))
    found = os.statvfs(there)
    inodes = found.f_favail if found.f_files else None
    writable = os.access(there, os.W_OK | os.X_OK)
    return DiskFacts(what, str(path), found.f_bavail * found.f_frsize, inodes, writable)


def _read_working_folder_disk() -> DiskFacts:
    """Which somebody may have removed: then nothing can be written, and torch cannot be loaded."""
    here = _get_working_folder()
    found = read_disk("here", Path(here))
    return found if os.path.isdir(here) else found._replace(writable=False)


def _get_working_folder() -> str:
    """As it was called, of a folder that is gone."""
    try:
        return os.getcwd()
    except OSError:
        return os.environ.get("PWD") or "/"


def _read_space(path: Path) -> tuple[int, int] | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _read_limit(which: int) -> ResourceLimit:
    soft, hard = resource.getrlimit(which)
    return ResourceLimit(*(float("inf") if n == _UNLIMITED else n for n in (soft, hard)))


def _try_port() -> str:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()
    except OSError as error:
        return describe_os_error(error)
    return ""


def _is_clock_synchronized() -> bool | None:
    if platform.system() != "Linux":
        return None
    state = ctypes.CDLL(None).adjtimex(ctypes.byref(ctypes.create_string_buffer(512)))
    return None if state < 0 else state != _ADJTIMEX_ERROR


def resolve_addresses(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(where[0]) for *_, where in found))

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
from echelon.check.wheels import Version, version
from echelon.gpus import nvml, visible_count
from echelon.gpus.look import FAULTS, NO_GPU
from echelon.gpus.nvml import NvmlError
from echelon.track import key
from echelon.utils.os_errors import describe_os_error

_COMMAND_S = 8.0
TORCH_S = 90.0
"""A first import from a shared disk takes that long."""
_TIME_ERROR = 5
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
class Torch:
    version: str
    cuda: str | None = None
    """That it was built with."""
    hip: str | None = None
    archs: Sequence[str] = ()
    nccl: str | None = None
    gloo: bool = True
    devices: Sequence[Device] = ()
    trouble: str = ""
    """What CUDA said instead of devices."""


class Device(NamedTuple):
    name: str
    capability: Version


class Driver(NamedTuple):
    version: str
    cuda: Version | None
    """The newest that it supports."""
    devices: Sequence[Device | str]
    """In place of a device, what NVML said of one that does not answer."""


class NoDriver(NamedTuple):
    said: str
    is_broken: bool = False
    """Rather than not there."""


class Disk(NamedTuple):
    what: str
    path: str
    free: int
    inodes: int | None
    """Free ones; None on a file system that does not count them."""
    writable: bool


class Limit(NamedTuple):
    soft: float
    hard: float


class Tool(NamedTuple):
    version: str
    trouble: str = ""


@dataclass(frozen=True)
class Facts:
    python: Version
    executable: str
    venv: str | None
    """A virtual or conda environment's folder."""
    echelon: str
    extras: Mapping[str, bool]
    torch: Torch | str
    """Or why there is none."""
    driver: Driver | NoDriver
    visible: int
    nvcc: str | None
    port: str
    """Why none can be opened; empty if one can."""
    disks: Sequence[Disk]
    shm: tuple[int, int] | None
    """Bytes: all, free."""
    files: Limit
    processes: Limit
    locked: Limit
    infiniband: bool
    cores: int
    omp: str | None
    wandb: str | None
    """What is wrong with its key, or nothing."""
    slurm: Tool | None
    ssh: Tool | None
    now: float
    clock_kept: bool | None
    """By a time server; None: the kernel does not say."""
    host: str
    addresses: Sequence[str] = field(default_factory=list)
    """Of the host's name."""


def gather(env: Mapping[str, str], runs: Path) -> Facts:
    with ThreadPoolExecutor(5) as pool:
        torch = pool.submit(ask_torch)
        driver = pool.submit(ask_nvml)
        nvcc, slurm, ssh = pool.submit(_nvcc, env), pool.submit(_slurm), pool.submit(_ssh)
        here = _quick(env, runs)
        return Facts(
            torch=torch.result(),
            driver=driver.result(),
            nvcc=nvcc.result(),
            slurm=slurm.result(),
            ssh=ssh.result(),
            **here,
        )


def _quick(env: Mapping[str, str], runs: Path) -> dict[str, Any]:
    host = socket.gethostname()
    return {
        "python": sys.version_info[:2],
        "executable": sys.executable,
        "venv": sys.prefix if sys.prefix != sys.base_prefix else env.get("CONDA_PREFIX"),
        "echelon": __version__,
        "extras": {name: importlib.util.find_spec(p) is not None for name, p in EXTRAS.items()},
        "visible": visible_count(env),
        "port": _port_trouble(),
        "disks": [
            _disk_here(),
            disk("runs", runs),
            disk("tmp", Path(tempfile.gettempdir())),
            disk("home", Path(env.get("HOME") or "/")),
        ],
        "shm": _space(Path("/dev/shm")),
        "files": _limit(resource.RLIMIT_NOFILE),
        "processes": _limit(resource.RLIMIT_NPROC),
        "locked": _limit(resource.RLIMIT_MEMLOCK),
        "infiniband": any(Path("/sys/class/infiniband").glob("*")),
        "cores": len(os.sched_getaffinity(0)),
        "omp": env.get("OMP_NUM_THREADS"),
        "wandb": key.problem(env),
        "now": time.time(),
        "clock_kept": _clock_kept(),
        "host": host,
        "addresses": addresses_of(host),
    }


# --- torch and the driver ---


def ask_torch() -> Torch | str:
    answer = child("echelon.check.torch_facts", TORCH_S)
    if isinstance(answer, str):
        return answer
    devices = [Device(name, (a, b)) for name, (a, b) in answer.pop("devices")]
    return Torch(**answer, devices=devices)


def child(module: str, limit_s: float) -> dict[str, Any] | str:
    """What a module of ours prints last, as JSON; or why it did not come to that."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {limit_s:g} s"
    for line in reversed(done.stdout.splitlines() if done.returncode == 0 else []):
        with suppress(ValueError):  # an ending program may say more
            loaded: dict[str, Any] = json.loads(line)
            return loaded
    return how_it_ended(done.returncode, done.stderr)


def how_it_ended(code: int, said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = lines[-1] if lines else "without a word"
    return f"killed by signal {-code}: {last}" if code < 0 else last


def ask_nvml() -> Driver | NoDriver:
    try:
        with nvml.opened() as library:
            devices = [_device(library, index) for index in range(library.count())]
            return Driver(library.driver() or "?", version(library.cuda()), devices)
    except NvmlError as error:
        said = NO_GPU.get(error.code, str(error))
        return NoDriver(said, is_broken=error.code != nvml.NO_LIBRARY)


def _device(library: nvml.Nvml, index: int) -> Device | str:
    try:
        device = library.device(index)
        return Device(device.name() or "?", device.capability() or (0, 0))
    except NvmlError as error:
        return FAULTS.get(error.code, str(error))


# --- programs ---


def said_by(*words: str) -> Tool | None:
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
            timeout=_COMMAND_S,
        )
    except subprocess.TimeoutExpired:
        return Tool("", f"{words[0]} did not answer within {_COMMAND_S:g} s")
    except OSError as error:
        return Tool("", f"{words[0]} cannot be run: {describe_os_error(error)}")
    text = done.stdout.strip() or done.stderr.strip()
    last = (done.stderr.strip() or text).splitlines()[-1:] or [f"exit code {done.returncode}"]
    return Tool(text, last[0] if done.returncode else "")


def _nvcc(env: Mapping[str, str]) -> str | None:
    home = env.get("CUDA_HOME") or "/usr/local/cuda"
    answer = said_by("nvcc", "--version") or said_by(f"{home}/bin/nvcc", "--version")
    match = re.search(r"release (\d+\.\d+)", answer.version if answer else "")
    return match[1] if match else None


def _slurm() -> Tool | None:
    client = said_by("sinfo", "--version")
    if client is None or client.trouble:  # even this needs a configuration
        return client and Tool("", client.trouble)
    answer = said_by("sinfo", "-h", "-o", "%D")
    return Tool(client.version, answer.trouble if answer else "")


def _ssh() -> Tool | None:
    return said_by("ssh", "-V")


# --- this machine ---


def disk(what: str, path: Path) -> Disk:
    """Of a folder that may yet have to be made."""
    path = Path(_here()) / path
    there = next(p for p in (path, *path.parents) if os.path.isdir(p))
    found = os.statvfs(there)
    inodes = found.f_favail if found.f_files else None
    writable = os.access(there, os.W_OK | os.X_OK)
    return Disk(what, str(path), found.f_bavail * found.f_frsize, inodes, writable)


def _disk_here() -> Disk:
    """Which somebody may have removed: then nothing can be written, and torch cannot be loaded."""
    here = _here()
    found = disk("here", Path(here))
    return found if os.path.isdir(here) else found._replace(writable=False)


def _here() -> str:
    """As it was called, of a folder that is gone."""
    try:
        return os.getcwd()
    except OSError:
        return os.environ.get("PWD") or "/"


def _space(path: Path) -> tuple[int, int] | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _limit(which: int) -> Limit:
    soft, hard = resource.getrlimit(which)
    return Limit(*(float("inf") if n == _UNLIMITED else n for n in (soft, hard)))


def _port_trouble() -> str:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()
    except OSError as error:
        return describe_os_error(error)
    return ""


def _clock_kept() -> bool | None:
    if platform.system() != "Linux":
        return None
    state = ctypes.CDLL(None).adjtimex(ctypes.byref(ctypes.create_string_buffer(512)))
    return None if state < 0 else state != _TIME_ERROR


def addresses_of(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(where[0]) for *_, where in found))

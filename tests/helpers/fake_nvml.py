"""A stand-in for the NVIDIA driver: nvml.c beside this file, and the scenes it plays."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml.c")
NAME = "libnvidia-ml.so.1"
GIB = 1 << 30
NOBODY_HERE = 2**31 - 1
"""A PID above the largest that Linux gives out."""


@functools.cache
def build_library(newest: int = 3) -> Path:
    """Return the library with process lists up to this version; built once per session."""
    folder = Path(tempfile.mkdtemp(prefix="echelon-nvml-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    target = folder / NAME
    flags = ["-O1", "-shared", "-fPIC", f"-DNEWEST={newest}"]
    subprocess.run(["gcc", *flags, "-o", target, SOURCE], check=True, timeout=300)
    return target


def gpu(index: int = 0, **values: object) -> str:
    whole = {
        "name": "NVIDIA H200",
        "uuid": f"GPU-{index:08x}-d72c-4106-c12f-20bd9faed9f6",
        **{"use": 0, "used": 4 << 20, "total": 140 * GIB, "reserved": 600 << 20},
        **{"temp": 34, "power": 76_000, "limit": 700_000, "fan": "-"},
    }
    return _format_line("gpu", whole | values)


def mig_slice(of: int, index: int, **values: object) -> str:
    whole = {
        "name": "NVIDIA H200 MIG 3g.71gb",
        "uuid": f"MIG-{of}{index}d268-c3f3-1b07-005d5ae1dc3f",
        **{"of": of, "total": 70 * GIB, "used": 12 << 20},
    }
    return _format_line("slice", whole | values)


def process(pid: int, on: int = 0, gib: float = 1.0, **values: object) -> str:
    return _format_line("process", {"on": on, "pid": pid, "memory": int(gib * GIB)} | values)


def _format_line(kind: str, values: dict[str, object]) -> str:
    return f"{kind} " + " ".join(f"{k}={str(v).replace(' ', '_')}" for k, v in values.items())


class FakeDriver:
    """A folder with the library and the file (`scene`) that says what it reports."""

    def __init__(self, folder: Path, *lines: str, newest: int = 3) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.library = folder / NAME
        shutil.copy(build_library(newest), self.library)
        self._scene = folder / "scene"
        self.set(*lines)

    def set(self, *lines: str) -> None:
        temporary = self._scene.with_suffix(".new")
        temporary.write_text("\n".join(["driver 550.54.15", "cuda 12040", *lines]) + "\n")
        temporary.replace(self._scene)

    def environment(self, **more: str) -> dict[str, str]:
        return os.environ | {"LD_LIBRARY_PATH": str(self.library.parent)} | more


MakeDriver = Callable[..., FakeDriver]
"""The fixture `make_driver`."""


@contextmanager
def run_idle_process(command: str, **options: object) -> Iterator[int]:
    """Yield the PID of a process with this command line that does nothing."""
    started = subprocess.Popen(
        [command],
        executable=shutil.which("cat"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        **options,  # type: ignore[call-overload]
    )
    # Popen returns while exec is still under way: for a moment there is no command line.
    while not Path(f"/proc/{started.pid}/cmdline").read_bytes():
        time.sleep(0.001)
    try:
        yield started.pid
    finally:
        started.kill()
        started.communicate()

"""`echelon --version`: of Echelon and of what it runs on, without importing torch."""

from __future__ import annotations

import json
import platform
import re
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from echelon import __version__
from echelon.commands.arguments import make_parser
from echelon.runs.slurm_queue import run_slurm_command

DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""What NVIDIA's driver says of itself, where it is loaded."""


def version(words: list[str]) -> int:
    """`echelon --version`: print the versions that a bug report needs."""
    parser = make_parser(
        "--version",
        "Print the versions of Echelon, Python, torch, the CUDA that torch was built with, "
        "NVIDIA's driver and Slurm. Nothing is imported or started for it but `sbatch --version`.",
        "--json prints {version: 1, echelon, python, torch, cuda, hip, driver, slurm}; what is not "
        "here is null.",
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    torch = read_torch_version()
    versions = {
        "echelon": __version__,
        "python": platform.python_version(),
        "torch": torch.get("__version__"),
        "cuda": torch.get("cuda"),
        "hip": torch.get("hip"),
        "driver": _read_driver_version(),
        "slurm": _read_slurm_version(),
    }
    if given.json:
        print(json.dumps({"version": 1, **versions}))
        return 0
    absent = {
        "torch": "not installed",
        "cuda": "none: torch is built for the CPU" if torch else "",
        "driver": "of NVIDIA: none",
        "slurm": "none here",
    }
    if versions["hip"]:
        absent["cuda"] = ""
    for name, found in versions.items():
        if text := found or absent.get(name):
            print(f"{name:<9}{text}")
    return 0


def read_torch_version() -> dict[str, str | None]:
    """Return `__version__`, `cuda` and `hip` as torch's own version.py has them, which takes
    seconds less than importing torch; nothing where it is not installed."""
    with suppress(ImportError, OSError, ValueError):
        spec = find_spec("torch")
        if spec is not None and spec.origin is not None:
            text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
            found = re.findall(r"^(\w+)(?:: [^=]+)? = (?:'(.*)'|None)$", text, re.MULTILINE)
            return {name: value or None for name, value in found}
    return {}


def _read_driver_version() -> str | None:
    """Return the version of NVIDIA's kernel module: `550.54.15`."""
    with suppress(OSError):
        text = DRIVER_FILE.read_text(encoding="utf-8", errors="replace")
        found = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", text)
        return found[1] if found else None
    return None


def _read_slurm_version() -> str | None:
    """Return the version of sbatch, as its distribution calls it: `22.05.8`."""
    words = run_slurm_command("sbatch", "--version").stdout.split()
    return words[-1] if words else None

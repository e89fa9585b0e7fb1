"""From typing `echelon env build` to a finished environment, beside venv and pip by hand.

    python benchmarks/environments.py [--rounds 5]

The requirements are what this project itself needs beside torch, as wheels in a folder that pip
fetched before the clock started: neither waits for a network, and both install the same files.
Cold means that the builder's own cache is empty too. Contestants take turns; ratios are within a
round. `echelon env build` is the whole command, from its start to its end, with everything flushed
to the disk; by hand nothing is flushed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from common import (
    HERE,
    Result,
    compute_ratios,
    environment,
    find_tool,
    make_figure,
    measure_in_turns,
    run_benchmark,
)

ROUNDS = 5
NAMES = (
    *("numpy", "hydra-core", "omegaconf", "rich", "nvidia-ml-py", "xxhash", "psutil", "packaging"),
    *("pyyaml", "pytest", "hypothesis"),
)
BY_HAND = "python -m venv, pip install -r"
WITH_UV, READY = "echelon env build, with uv", "echelon env build, built before"
TARGETS = {WITH_UV: 0.2}


def measure(rounds: int = ROUNDS) -> Result:
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        scene = make_environment_source(Path(folder))
        seconds = measure_in_turns(
            {
                BY_HAND: partial(time_manual_build, scene),
                WITH_UV: partial(time_build, scene),
                READY: partial(time_cached_build, scene),
            },
            rounds,
        )
        requirements = (scene / "source" / "requirements.txt").read_text().split()
    return {
        "config": {"requirements": requirements, "rounds": rounds, "caches": "empty each time"},
        "figures": [
            make_figure(
                f"{name}, × venv and pip by hand",
                compute_ratios(v, seconds[BY_HAND]),
                TARGETS.get(name),
            )
            for name, v in seconds.items()
            if name != BY_HAND
        ],
        "seconds": {n: make_figure(n, v, unit="s") for n, v in seconds.items()},
    }


def make_environment_source(scene: Path) -> Path:
    """A source with its requirements, and a folder with all their wheels."""
    pins = (HERE.parent / "constraints.txt").read_text().splitlines()
    wanted = [line for line in pins if line.partition("==")[0] in NAMES]
    (scene / "source").mkdir()
    file = scene / "source" / "requirements.txt"
    file.write_text("\n".join(wanted) + "\n")
    wheels = [sys.executable, "-m", "pip", "wheel", "-q", "-r", str(file), "-w", scene / "wheels"]
    subprocess.run(wheels, env=environment(), check=True, capture_output=True)
    subprocess.run(
        [*build_command(scene), "--json"],
        env=variables(scene),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return scene


def build_command(scene: Path) -> list[str]:
    return [find_tool("echelon"), "env", "build", "--source", str(scene / "source")]


def variables(scene: Path) -> dict[str, str]:
    offline = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(scene / "wheels"),
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "ECHELON_ENV_BUILDER": "uv",
        "ECHELON_CACHE": str(scene / "kept"),
        "UV_CACHE_DIR": str(scene / "uv-kept"),
    }
    return environment(**offline)


def time_build(scene: Path) -> float:
    places = {"ECHELON_CACHE": scene / "cold", "UV_CACHE_DIR": scene / "uv-cold"}
    env = variables(scene) | {name: str(path) for name, path in places.items()}
    taken = time_command([build_command(scene)], env)
    for path in places.values():
        shutil.rmtree(path, ignore_errors=True)
    return taken


def time_manual_build(scene: Path) -> float:
    made = scene / "by-hand"
    file = str(scene / "source" / "requirements.txt")
    install = [str(made / "bin" / "python"), "-m", "pip", "install", "-r", file]
    taken = time_command([[sys.executable, "-m", "venv", str(made)], install], variables(scene))
    shutil.rmtree(made)
    return taken


def time_cached_build(scene: Path) -> float:
    return time_command([build_command(scene)], variables(scene))


def time_command(commands: list[list[str]], env: dict[str, str]) -> float:
    began = time.perf_counter()
    for command in commands:
        subprocess.run(command, env=env, check=True, capture_output=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    run_benchmark("time the building of an environment", measure, ROUNDS)

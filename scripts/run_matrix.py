"""Run the tests with other versions of Python, torch and everything else, one cell at a time.

    python scripts/run_matrix.py                     all cells
    python scripts/run_matrix.py oldest py312-torch2.8
    python scripts/run_matrix.py --list

A cell is an environment outside of the checkout, which is removed afterwards. Packages come from
where pip is configured to look, versions of Python from the PATH or from pyenv.

torch has to be a build for the CPU, so that no gigabytes of CUDA come along. Where pip finds none,
the cell is not tried.

What cannot be tried is named with the reason. Results go to benchmarks/results/matrix.json, where
those of cells that were not tried this time stay.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/matrix.json"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.4.0", "2.8.0", "2.11.0", "2.13.0")
EXTRAS = "board,cloud,data,movielens,plot,stacks,sweep,tensorboard,wandb"
TOOLS = ("pytest", "pytest-xdist", "pytest-randomly", "hypothesis", "moto[s3]", "flask")
TOOLS += ("flask-cors", "selenium", "transformers", "lightning", "accelerate")
TOOLS += ("kubeflow-trainer-api", "uv")
"""What tests need beside the package. They are the newest in every cell."""
SLOW_TESTS = (
    "tests/snapshot/test_resume.py",
    "tests/launch/test_local_launch.py",
    "tests/train/test_world_size_numbers.py",
    "tests/parallel/test_fsdp.py",
    "tests/commands/test_init.py",
)
"""A handful that train for real in several processes."""
NO_CPU_BUILD = "no build of torch {} for the CPU and Python {} where pip looks"


class Cell(NamedTuple):
    """One environment to run the tests in."""

    name: str
    python: str
    torch: str
    resolution: str = "highest"
    """Of all dependencies but torch, as uv calls it."""


class CannotTry(Exception):
    """Why a cell cannot be tried here."""


CELLS = [
    Cell("oldest", "3.11", "2.13.0", "lowest-direct"),
    Cell("newest", "3.11", "2.13.0"),
    *(
        Cell(f"py{python.replace('.', '')}-torch{torch[:-2]}", python, torch)
        for torch in TORCHES
        for python in PYTHONS
    ),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cells", nargs="*", metavar="CELL")
    parser.add_argument("--list", action="store_true", help="the cells")
    given = parser.parse_args()
    by_name = {cell.name: cell for cell in CELLS}
    if unknown := set(given.cells) - by_name.keys():
        parser.error(f"no such cell: {', '.join(unknown)}; known: {', '.join(by_name)}")
    if given.list:
        print(*by_name, sep="\n")
        return 0
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    chosen = given.cells or list(by_name)
    for name in chosen:
        results[name] = try_cell(by_name[name])
        print(f"{name:<18}{results[name]['outcome']}", flush=True)
        ordered = {each: results[each] for each in by_name if each in results}
        RESULTS.write_text(json.dumps(ordered, indent=2) + "\n")
    return int(any(results[name]["outcome"].startswith("failed") for name in chosen))


def try_cell(cell: Cell) -> dict[str, object]:
    """Return what became of a cell, and with which versions."""
    started = time.strftime("%Y-%m-%d")
    with tempfile.TemporaryDirectory(prefix="echelon-matrix-") as place:
        python = Path(place, "bin/python")
        try:
            make_environment(cell, python)
        except CannotTry as problem:
            return {"date": started, "outcome": f"not tried: {problem}"}
        return {
            "date": started,
            "outcome": run_tests(python),
            "versions": read_versions(python),
        }


def make_environment(cell: Cell, python: Path) -> None:
    """Make the environment of a cell; raises CannotTry if something is not to be had."""
    uv = [str(ROOT / ".venv/bin/uv"), "--no-python-downloads", "--quiet"]
    made = run(
        [*uv, "venv", "--seed", "--python", find_python(cell.python), str(python.parents[1])]
    )
    if made.returncode:
        raise CannotTry(f"no environment: {last_line(made.stderr)}")
    install_torch(cell, python)
    tools = [pin for pin in read_constraints() if re.split("==", pin)[0] in TOOLS]
    pins = python.parent / "pins.txt"
    pins.write_text("\n".join([*tools, f"torch=={cell.torch}"]))
    done = run(
        [
            *(str(python), str(ROOT / "scripts/uv_install.py"), "--quiet"),
            *("--resolution", cell.resolution, "--constraint", str(pins)),
            *("--editable", f"{ROOT}[{EXTRAS}]", *TOOLS),
        ],
        PATH=f"{ROOT / '.venv/bin'}:{os.environ['PATH']}",
    )
    if done.returncode:
        raise CannotTry(f"not installed: {last_line(done.stderr)}")


def find_python(version: str) -> str:
    """Return a Python of this version: of the PATH, or of pyenv, whose shims may not answer."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [shutil.which(f"python{version}"), *pyenv.glob(f"versions/{version}.*/bin/python")]
    for each in filter(None, found):
        if run([str(each), "-c", "import venv"]).returncode == 0:
            return str(each)
    raise CannotTry(f"no Python {version} here")


def read_constraints() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and line[0] != "#"]


def install_torch(cell: Cell, python: Path) -> None:
    """Install torch alone, in a build for the CPU."""
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    cpu = [f"torch=={cell.torch}+cpu", "--no-deps", "--only-binary=:all:"]
    if run([*pip, *cpu]).returncode:
        raise CannotTry(NO_CPU_BUILD.format(cell.torch, cell.python))


def run_tests(python: Path) -> str:
    """Return `passed`, or what failed, by the last lines of pytest."""
    pytest = [
        str(python),
        "-m",
        "pytest",
        "-n",
        "2",
        "--dist",
        "worksteal",
        "-p",
        "no:randomly",
        "-rsfE",
    ]
    quick = "not slow and not gpu and not campaign and not cluster"
    lines = []
    for words in (["tests", "--ignore=tests/cluster", "-m", quick], ["-m", "slow", *SLOW_TESTS]):
        done = run([*pytest, *words], VIRTUAL_ENV=str(python.parents[1]))
        lines.append(last_line(done.stdout))
        if done.returncode:
            failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
            return f"failed: {lines[-1]} {' '.join(failed)}"
    return f"passed: {'; '.join(lines)}"


def read_versions(python: Path) -> dict[str, str]:
    """Return the versions of Python and of what the package depends on."""
    listed = run([str(python), "-m", "pip", "list", "--format=json"]).stdout
    wanted = set(iter_dependencies())
    versions = {each["name"].lower(): each["version"] for each in json.loads(listed)}
    found = run([str(python), "-c", "import platform; print(platform.python_version())"])
    return {
        "python": found.stdout.strip(),
        **{name: version for name, version in sorted(versions.items()) if name in wanted},
    }


def iter_dependencies() -> Iterable[str]:
    """Yield the names of what pyproject.toml asks for without tests and benchmarks."""
    text = (ROOT / "pyproject.toml").read_text()
    text = text.partition("dependencies = [")[2].partition("[project.scripts]")[0]
    text = re.sub(r"\b(dev|bench) = \[.*?\n\]", "", text, flags=re.DOTALL)
    for name in re.findall(r'"([A-Za-z][\w-]*)[^"]*"', text):
        yield name.lower()


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1].strip("= ")


def run(words: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


if __name__ == "__main__":
    sys.exit(main())

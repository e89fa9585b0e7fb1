"""Install a wheel into empty environments outside of the checkout, one for each extra, and use it.

    python scripts/check_wheel.py dist/echelon-0.2.0-py3-none-any.whl [EXTRA ...]

torch is not installed again: the files of this environment's torch are linked. Everything else
comes from where pip is configured to look. Without names all extras that users have are checked;
`core` is the package without any.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINKED = ("torch", "filelock", "typing-extensions", "sympy", "mpmath", "networkx")
LINKED += ("jinja2", "markupsafe", "fsspec")
"""torch and what it needs."""
QUICK = "samples=64 eval_samples=16 trainer.batch_size=8 trainer.epochs=1"
SWEEP = """\
program: train.py
method: bayes
metric: {name: eval/loss, goal: minimize}
run_cap: 2
parameters: {lr: {min: 0.001, max: 0.1}, trainer: {parameters: {epochs: {value: 1}}}}
"""
USES = {
    "core": [
        "echelon --version",
        "echelon doctor --no-smoke",
        f"echelon train {QUICK} run.name=a",
        f"echelon train {QUICK} run.name=b launch=local launch.procs=2",
        "echelon show b",
        "echelon plot a b -o curves.html",
        "echelon train launch=slurm launch.nodes=2 --dry-run",
        "echelon completion zsh",
        "python -c {board}",
        "echelon init project",
        "python project/train.py trainer.epochs=1 run.name=c",
    ],
    "movielens": ["echelon data movielens --help", "python -c 'import pyarrow.parquet'"],
    "data": ["python -c {parquet}", "echelon data look t.parquet"],
    "cloud": ["python -c 'import obstore.store'"],
    "wandb": [f"echelon train {QUICK} track=wandb track.wandb.mode=offline"],
    "tensorboard": [f"echelon train {QUICK} track=tensorboard"],
    "sweep": ["echelon init .", "echelon sweep s.yaml", "echelon sweep show s"],
    "board": ["python -c 'import echelon.board.terminal.app'"],
    "stacks": ["py-spy --version"],
    "plot": [f"echelon train {QUICK} run.name=a", "echelon plot a -o curves.png"],
}
"""What is typed for each extra, in its environment."""
PROGRAMS = {
    "board": """
import json, re, subprocess, urllib.parse, urllib.request
words = ["echelon", "board", "runs", "--json", "--no-browser"]
board = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
try:
    url = json.loads(board.stdout.readline())["url"]
    page = browser.open(url).read().decode()
    assert "<title>" in page, page
    for name in re.findall(r'(?:src|href)="([^":]+)"', page):
        browser.open(urllib.parse.urljoin(url, name))
finally:
    board.terminate()
""",
    "parquet": """
import pyarrow, pyarrow.parquet
pyarrow.parquet.write_table(pyarrow.table({"x": [1.0, 2.0]}), "t.parquet")
import echelon.data
assert len(echelon.data.open("t.parquet")) == 2
""",
}


def main() -> int:
    wheel, *extras = sys.argv[1:]
    if problem := find_missing_files(Path(wheel)):
        print(f"error: {problem}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="echelon-wheel-") as place:
        failed = [e for e in extras or USES if not check_extra(Path(wheel).resolve(), e, place)]
    print(f"failed: {', '.join(failed)}" if failed else "all of them work")
    return bool(failed)


def find_missing_files(wheel: Path) -> str:
    """Return which files of the package are not in the wheel, or what is there but should not."""
    listed = subprocess.run(
        ["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    wanted = {name.removeprefix("src/") for name in listed.stdout.splitlines()}
    found = set(zipfile.ZipFile(wheel).namelist())
    info = {name for name in found if ".dist-info/" in name}
    licences = {Path(name).name for name in info if "/licenses/" in name}
    problems = [f"{name} is not in the wheel" for name in sorted(wanted - found)]
    problems += [f"{name} is in the wheel" for name in sorted(found - info - wanted)]
    problems += [f"no licence {n}" for n in {"LICENSE", "uPlot.txt"} - licences]
    return "\n".join(problems)


def check_extra(wheel: Path, extra: str, place: str) -> bool:
    """Return whether the package with one extra works in an environment of its own."""
    home = Path(place, extra)
    folder, environment = home / "work", home / "venv"
    folder.mkdir(parents=True)
    (folder / "s.yaml").write_text(SWEEP)
    venv.create(environment, with_pip=True, symlinks=True)
    link_torch(environment)
    wanted = str(wheel) if extra == "core" else f"{wheel}[{extra}]"
    constraint = ["--constraint", str(ROOT / "constraints.txt")]
    pip = [str(environment / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install"]
    ok = run([*pip, "--quiet", *constraint, wanted], folder, environment, home)
    for text in USES[extra] if ok else []:
        ok = ok and run(split_words(text), folder, environment, home)
    print(f"{'ok' if ok else 'FAILED':<8}{extra}", flush=True)
    shutil.rmtree(home)
    return ok


def split_words(text: str) -> list[str]:
    """Return the words of a command; `{name}` is one of PROGRAMS."""
    if found := re.fullmatch(r"python -c (?:\{(\w+)\}|'(.*)')", text):
        return ["python", "-c", PROGRAMS[found[1]] if found[1] else found[2]]
    return text.split()


def run(words: list[str], folder: Path, environment: Path, home: Path) -> bool:
    """Run a command as in a new shell with the environment; show what it said if it fails."""
    variables = {
        **{k: v for k, v in os.environ.items() if k.startswith(("PIP_", "SSL_", "REQUESTS_"))},
        "PATH": f"{environment / 'bin'}:/usr/bin:/bin",
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "LC_ALL": "C.UTF-8",
    }
    program = shutil.which(words[0], path=variables["PATH"]) or words[0]
    done = subprocess.run(
        [program, *words[1:]],
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    if done.returncode:
        print(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}", file=sys.stderr)
    return done.returncode == 0


def link_torch(environment: Path) -> None:
    """Put links to the files of this environment's torch into another one."""
    [target] = environment.glob("lib/python*/site-packages")
    for name in LINKED:
        for file in importlib.metadata.files(name) or []:
            source = Path(str(file.locate()))
            if ".." in file.parts or not source.is_file():  # a script in bin, or compiled code
                continue
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, target / file)
            except OSError:  # another file system
                shutil.copy2(source, target / file)


if __name__ == "__main__":
    sys.exit(main())

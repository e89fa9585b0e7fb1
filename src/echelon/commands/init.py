"""`echelon init`: a small project, as the files of `starter_project/`."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from echelon.commands.arguments import make_parser
from echelon.errors import EchelonError, Fault, suggest_other_folder
from echelon.utils.os_errors import format_os_error_reason

FILES = {
    "train.py": "train.py.txt",
    "conf/config.yaml": "conf/config.yaml",
    "sweep.yaml": "sweep.yaml",
    "echelon.yaml": "echelon.yaml",
    "tests/test_train.py": "tests/test_train.py.txt",
    ".gitignore": "gitignore.txt",
    "README.md": "README.md",
}
"""What is written, and the file of `starter_project/` that it is. There Python has another suffix:
those files are no modules of this package."""


def init(words: list[str]) -> int:
    """`echelon init [DIR]`: write a project that trains at once."""
    parser = make_parser(
        "init",
        "Write a small project to begin with: an experiment, its configuration, a sweep, defaults "
        "for a cluster, tests, .gitignore and README. Comments say what to change. It trains at "
        "once, and its tests pass.",
        """\
  train.py             model, optimizer, loss, data and metrics: yours to change
  conf/config.yaml     what `python train.py` trains with
  sweep.yaml           a search: echelon sweep sweep.yaml
  echelon.yaml         where runs happen: lines for launch=slurm, as comments
  tests/test_train.py  a run learns and resumes: python -m pytest

Nothing is overwritten: if one of the files is there, all that are there are named, and none is
written.

examples:
  echelon init rings && cd rings && python train.py
  echelon init                          into this folder

--json prints {version: 1, folder, files: [names]}.""",
    )
    parser.add_argument("dir", nargs="?", default=".", metavar="DIR", help="(default: this folder)")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    folder = Path(given.dir)
    if conflicts := list(_find_conflicts(folder)):
        raise EchelonError(*conflicts)
    write_project(folder)
    if given.json:
        print(json.dumps({"version": 1, "folder": str(folder.absolute()), "files": [*FILES]}))
        return 0
    change = f"cd {shlex.quote(given.dir)} && " if given.dir != "." else ""
    for name in FILES:
        print(folder / name)
    print(f"\ntrain it: {change}python train.py")
    return 0


def _find_conflicts(folder: Path) -> Iterator[Fault]:
    """Yield a fault for each file that is there already, or cannot be made."""
    elsewhere = "move it, or name another folder: echelon init DIR"
    folders = [folder, *(folder / name for name in ("conf", "tests"))]
    blocked = [path for path in folders if os.path.lexists(path) and not path.is_dir()]
    for path in blocked:
        yield Fault(f"{path} is not a folder", elsewhere)
    if folder in blocked:
        return
    for name in FILES:
        if os.path.lexists(folder / name):
            yield Fault(f"{folder / name} is there already", elsewhere)


def write_project(folder: Path) -> None:
    """Write all files into a folder, or none: what was written is removed if one cannot be."""
    source = files("echelon") / "starter_project"
    written: list[Path] = []
    try:
        for name, template in FILES.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:  # not over one that has just come
                written.append(path)
                file.write(source.joinpath(template).read_text("utf-8"))
    except OSError as error:
        for made in written:
            with contextlib.suppress(OSError):
                made.unlink()
        raise EchelonError(
            Fault(
                f"{path} cannot be written: {format_os_error_reason(error)}",
                suggest_other_folder(error, "echelon init DIR"),
            )
        ) from None

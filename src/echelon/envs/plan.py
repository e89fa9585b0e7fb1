"""What environment a source folder asks for: which file decides, where it is, what would be run."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from echelon.envs import conda, pipfile, project, requirements
from echelon.envs.decides import digest_of, files_of_conda, files_of_uv, tree
from echelon.envs.indexes import (
    Indexes,
    child_environ,
    insecure,
    plain_http,
    settings,
    with_options,
)
from echelon.envs.interpreter import Identity, interpreter, mismatches
from echelon.envs.places import Place, environments
from echelon.envs.requirements import Read, Wanted
from echelon.errors import EchelonError, Exit, Fault, nearest

ORDER = {
    "Pipfile": "pipfile",
    "requirements.txt": "requirements",
    "uv.lock": "uv.lock",
    "pyproject.toml": "pyproject",
    "environment.yml": "conda",
    "environment.yaml": "conda",
}
"""The first that is there decides. A `pyproject.toml` is often there for its linters alone, so a
`requirements.txt` comes first."""
_PARTS = {"uv.lock": {"pyproject.toml"}, "Pipfile": {"Pipfile.lock"}}
"""What belongs to the file that decides, and so has not lost to it."""
WHERE = ("cache", "source")


class Recipe(NamedTuple):
    """What `build` needs beyond what is shown."""

    steps: tuple[tuple[str, ...], ...] = ()
    inputs: Mapping[str, str] = {}
    """Files for the builder, by name; they may hold passwords of URLs."""
    environ: Mapping[str, str] = {}
    wanted: tuple[Wanted, ...] = ()
    lock_with: EnvPlan | None = None
    """The environment with pipenv, where a Pipfile has no lock."""


@dataclass(frozen=True)
class EnvPlan:
    source: Path
    kind: str
    """pipfile, requirements, uv.lock, pyproject, conda or none"""
    files: tuple[Path, ...]
    """What decides it."""
    ignored: tuple[Path, ...]
    """Environment files that lost."""
    key: str
    folder: Path
    """Where it is or will be."""
    builder: str
    """uv, pip, pipenv (which makes the lock that uv or pip then installs), conda, or empty"""
    commands: tuple[str, ...]
    """What will be run, printable."""
    ready: bool
    """Built already, and valid."""
    recipe: Recipe = field(default=Recipe(), repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        return {
            "source": str(self.source),
            "kind": self.kind,
            "files": [str(file) for file in self.files],
            "ignored": [str(file) for file in self.ignored],
            "key": self.key,
            "folder": str(self.folder),
            "builder": self.builder,
            "commands": list(self.commands),
            "ready": self.ready,
        }


def plan(
    source: Path,
    where: str = "cache",
    environ: Mapping[str, str] = os.environ,
    python: str = sys.executable,
    beside: Path | None = None,
) -> EnvPlan:
    """Pure but for reading: the same files, Python and settings give the same key anywhere, so a
    copy of the source finds the environment of the original. `beside` is the folder whose .venv it
    is to be, where that is not the copy's. Raises with all faults."""
    source = _checked(Path(source), where)
    there = _there(source)
    if not there:
        return EnvPlan(source, "none", (), (), "", source, "", (), True)
    kind = ORDER[there[0].name]
    lost = tuple(f for f in there[1:] if f.name not in _PARTS.get(there[0].name, ()))
    found, wishes = _read(kind, there[0], source, environ)
    who = interpreter(python, environ)
    indexes = with_options(settings(environ, who.prefix), found.options)
    faults = [*found.faults, *requirements.check_urls(found, indexes.trusted)]
    in_files = {url for url, _ in found.urls}
    faults += [
        insecure(url, "pip's settings")
        for url in indexes.urls()
        if url not in in_files and plain_http(url, indexes.trusted)
    ]
    if kind != "conda":
        faults += mismatches(who, wishes, source)
    builder, tool, fault = _builder(kind, found, environ, who)
    faults += [fault] if fault else []
    if faults:
        raise EchelonError(*faults)
    request = _Request(source, kind, found, lost, who, indexes, builder, tool, environ)
    in_source = (beside or source) / ".venv" if where == "source" else None
    return _planned(request, in_source)


class _Request(NamedTuple):
    """All that is known when nothing is wrong."""

    source: Path
    kind: str
    found: Read
    lost: tuple[Path, ...]
    who: Identity
    indexes: Indexes
    builder: str
    tool: str
    """The path of uv or conda; of pip there is one in the environment."""
    environ: Mapping[str, str]


def _checked(source: Path, where: str) -> Path:
    if where not in WHERE:
        raise EchelonError(Fault(f"where={where}", nearest(where, WHERE)))
    if not source.is_dir():
        raise EchelonError(
            Fault(f"there is no source folder {source}", "give another one with --source DIR"),
            exit=Exit.NOT_FOUND,
        )
    return Path(os.path.abspath(source))


def _there(source: Path) -> list[Path]:
    files = [source / name for name in ORDER if (source / name).is_file()]
    return [f for f in files if f.name != "pyproject.toml" or project.is_project(f)]


def _read(
    kind: str, file: Path, source: Path, environ: Mapping[str, str]
) -> tuple[Read, list[tuple[str, str, str]]]:
    """What is wanted, and which Python."""
    if kind == "pipfile":
        found, said = pipfile.read(source, environ)
        return found, pipfile.wishes(said)
    if kind == "requirements":
        return requirements.read(file, source, environ), []
    if kind == "conda":
        return conda.read(file, source, environ), []
    found, said = project.read(source) if kind == "pyproject" else project.read_lock(source)
    return found, project.wishes(said)


def _builder(
    kind: str, found: Read, environ: Mapping[str, str], who: Identity
) -> tuple[str, str, Fault | None]:
    """Its name, its path, and what is missing."""
    if kind == "conda":
        tool = conda.tool(environ)
        return "conda", tool or "", None if tool else conda.missing()
    forced = environ.get("ECHELON_ENV_BUILDER", "")
    if forced not in ("", "uv", "pip"):
        return "", "", Fault(f"ECHELON_ENV_BUILDER={forced}", nearest(forced, ("uv", "pip")))
    beside = Path(sys.executable).parent
    uv = None if forced == "pip" else _uv(environ.get("PATH", ""), beside)
    if uv is None and (kind == "uv.lock" or forced == "uv"):
        what = "uv.lock is for uv" if kind == "uv.lock" else "ECHELON_ENV_BUILDER=uv"
        return (
            "",
            "",
            Fault(
                f"{what}, and there is no uv on the PATH",
                "install it (`pip install uv`), or write its list for pip on a machine that "
                "has it: `uv export --no-dev --no-emit-project -o requirements.txt`",
            ),
        )
    unlocked = kind == "pipfile" and not any(f.name == "Pipfile.lock" for f in found.files)
    return "pipenv" if unlocked else "uv" if uv else "pip", uv or "", None


def _uv(path: str, beside: Path) -> str | None:
    """From the PATH, or from where Echelon itself is installed."""
    return shutil.which("uv", path=path) or shutil.which("uv", path=str(beside))


def _planned(r: _Request, in_source: Path | None = None) -> EnvPlan:
    key = _key(r)
    folder = in_source or environments(r.environ) / key
    _require_usable(folder)
    recipe = _recipe(r, folder)
    commands = [shlex.join(step) for step in recipe.steps]
    if recipe.lock_with:
        commands[1:1] = [*recipe.lock_with.commands, "pipenv lock"]
    return EnvPlan(
        source=r.source,
        kind=r.kind,
        files=tuple(r.found.files),
        ignored=r.lost,
        key=key,
        folder=folder,
        builder=r.builder,
        commands=tuple(commands),
        ready=Place(folder).stands(key),
        recipe=recipe,
    )


def _key(r: _Request) -> str:
    """Of what the builder is given, so that a comment or a linter's setting changes nothing."""
    asis = r.builder in ("pipenv", "conda") or r.kind == "uv.lock"
    contents = [[f.name, f.read_bytes().hex()] for f in r.found.files if f.name != "pyproject.toml"]
    # Folders of wheels in the source count by what is in them: a copy has them elsewhere.
    own = {path.as_uri() for path in r.found.local}
    links = tuple(link for link in r.indexes.find_links if link not in own)
    python = [r.who.platform, r.who.machine, r.who.libc]
    if r.kind != "conda":
        python += [r.who.version, r.who.build, r.who.implementation, r.who.base]
    return digest_of(
        [
            *(2, r.kind, r.builder, bool(r.tool), python),
            replace(r.indexes, find_links=links).decides(),
            [w.text for w in r.found.wanted],
            [w.text for w in r.found.constraints],
            contents if asis else [],
            r.found.besides,
            [tree(path) for path in r.found.local],
            [r.environ.get(name, "") for name in sorted(r.found.variables)],
            [f.read_bytes().hex() for f in map(Path, r.indexes.constraint) if f.is_file()],
            _settings_of(r),
        ]
    )


def _settings_of(r: _Request) -> list[str]:
    if r.kind == "conda":
        return files_of_conda(r.environ)
    return files_of_uv(r.source, r.environ) if r.tool else []


def _require_usable(folder: Path) -> None:
    """PATH has no way to quote a colon, and no interpreter line holds a line break."""
    if any(sign in str(folder) for sign in ":\n\r"):
        raise EchelonError(
            Fault(
                f"the environment would be in {str(folder)!r}, and a path with a colon or a line "
                "break cannot be on the PATH",
                "use --where cache, or set ECHELON_CACHE to another folder",
            )
        )


# --- what is run ---


def _recipe(r: _Request, folder: Path) -> Recipe:
    place = Place(folder)
    environ = child_environ(r.environ) | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    wanted = tuple(r.found.wanted)
    if r.kind == "conda":
        step = conda.command(r.tool, r.found.files[0], folder)
        environ |= {"CONDA_ALWAYS_YES": "true", **r.indexes.variables("pip")}
        return Recipe((step,), {}, environ, wanted)
    installer = "uv" if r.tool else "pip"
    environ |= r.indexes.variables(installer)
    environ |= {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1", "PIP_PROGRESS_BAR": "off"}
    if r.kind == "uv.lock":
        environ |= {"UV_PROJECT_ENVIRONMENT": str(folder)}
        return Recipe((_sync(r),), {}, environ, wanted)
    inputs = {"requirements.txt": _text(wanted), "constraints.txt": _text(r.found.constraints)}
    if r.builder == "pipenv":
        inputs = {"Pipfile": (r.source / "Pipfile").read_text(encoding="utf-8-sig")}
    steps = [_venv(r, folder)]
    if wanted:
        steps.append(_install(r, place, installer))
    return Recipe(
        tuple(steps), inputs, environ, wanted, _pipenv(r) if r.builder == "pipenv" else None
    )


def _venv(r: _Request, folder: Path) -> tuple[str, ...]:
    if r.tool:
        return (r.tool, "venv", "--no-project", "--python", r.who.executable, str(folder))
    return (r.who.executable, "-m", "venv", str(folder))


def _install(r: _Request, place: Place, installer: str) -> tuple[str, ...]:
    python = str(place.python())
    start = (r.tool, "pip", "install", "--python", python)
    words = [*(start if r.tool else (python, "-m", "pip", "install"))]
    words += [*_refresh(r), *r.indexes.options(installer)]
    words += ["--requirement", str(place.inputs / "requirements.txt")]
    if r.found.constraints:
        words += ["--constraint", str(place.inputs / "constraints.txt")]
    return tuple(words)


def _sync(r: _Request) -> tuple[str, ...]:
    """`--locked`, not `--frozen`: a lock that lacks what pyproject.toml has gained is an error now
    and not an ImportError in the job."""
    words = (r.tool, "sync", "--locked", "--no-dev", "--no-install-project", "--no-editable")
    no_index = ("--no-index",) if r.indexes.no_index else ()
    where = ("--python", r.who.executable, "--project", str(r.source))
    return (*words, *_refresh(r), *no_index, *where)


def _refresh(r: _Request) -> tuple[str, ...]:
    """uv would install a local project as it once built it: it looks for edits in its
    pyproject.toml alone. What comes from an index is then asked for, and not fetched again."""
    return ("--refresh",) if r.tool and any(path.is_dir() for path in r.found.local) else ()


def _pipenv(r: _Request) -> EnvPlan:
    """An environment like any other, with pipenv in it; built when it is needed, kept for later."""
    found = Read(wanted=[Wanted("pipenv", r.source / "Pipfile", 1)])
    indexes = settings(r.environ, r.who.prefix)
    builder = "uv" if r.tool else "pip"
    request = r._replace(
        kind="requirements", found=found, lost=(), indexes=indexes, builder=builder
    )
    return _planned(request)


def _text(lines: tuple[Wanted, ...] | list[Wanted]) -> str:
    return "".join(f"{line.text}\n" for line in lines)

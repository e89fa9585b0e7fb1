"""What environment a source folder asks for: which file decides, where it is, what would be run."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from echelon.environments import conda, pipfile, pyproject, requirements
from echelon.environments.cache import EnvironmentPaths, environments_root
from echelon.environments.cache_key import EnvironmentRequest, compute_key
from echelon.environments.interpreter import Interpreter, check_python_version, find_interpreter
from echelon.environments.package_indexes import (
    apply_options,
    builder_environ,
    insecure_fault,
    is_insecure,
    read_pip_settings,
)
from echelon.environments.requirements import ParsedDependencies, RequirementLine
from echelon.errors import EchelonError, Exit, Fault, suggest_nearest

KIND_BY_FILE = {
    "Pipfile": "pipfile",
    "requirements.txt": "requirements",
    "uv.lock": "uv.lock",
    "pyproject.toml": "pyproject",
    "environment.yml": "conda",
    "environment.yaml": "conda",
}
"""The first that is there decides. A `pyproject.toml` is often there for its linters alone, so a
`requirements.txt` comes first."""
_COMPANION_FILES = {"uv.lock": {"pyproject.toml"}, "Pipfile": {"Pipfile.lock"}}
"""What belongs to the file that decides, and so has not lost to it."""
LOCATIONS = ("cache", "source")


class BuildSteps(NamedTuple):
    """What `build` needs beyond what is shown."""

    steps: tuple[tuple[str, ...], ...] = ()
    inputs: Mapping[str, str] = {}
    """Files for the builder, by name; they may hold passwords of URLs."""
    environ: Mapping[str, str] = {}
    requirements: tuple[RequirementLine, ...] = ()
    pipenv_environment: EnvironmentPlan | None = None
    """The environment with pipenv, where a Pipfile has no lock."""


@dataclass(frozen=True)
class EnvironmentPlan:
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
    build_steps: BuildSteps = field(default=BuildSteps(), repr=False, compare=False)

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


def plan_environment(
    source: Path,
    location: str = "cache",
    environ: Mapping[str, str] = os.environ,
    python: str = sys.executable,
    venv_parent: Path | None = None,
) -> EnvironmentPlan:
    """Pure but for reading: the same files, Python and settings give the same key anywhere, so a
    copy of the source finds the environment of the original. `beside` is the folder whose .venv it
    is to be, where that is not the copy's. Raises with all faults."""
    source = _check_arguments(Path(source), location)
    present = _find_dependency_files(source)
    if not present:
        return EnvironmentPlan(source, "none", (), (), "", source, "", (), True)
    kind = KIND_BY_FILE[present[0].name]
    ignored = tuple(
        f for f in present[1:] if f.name not in _COMPANION_FILES.get(present[0].name, ())
    )
    parsed, python_requests = _read_dependencies(kind, present[0], source, environ)
    chosen_python = find_interpreter(python, environ)
    indexes = apply_options(read_pip_settings(environ, chosen_python.prefix), parsed.options)
    faults = [*parsed.faults, *requirements.check_urls(parsed, indexes.trusted_hosts)]
    in_files = {url for url, _ in parsed.urls}
    faults += [
        insecure_fault(url, "pip's settings")
        for url in indexes.list_urls()
        if url not in in_files and is_insecure(url, indexes.trusted_hosts)
    ]
    if kind != "conda":
        faults += check_python_version(chosen_python, python_requests, source)
    builder, tool, fault = _choose_builder(kind, parsed, environ, chosen_python)
    faults += [fault] if fault else []
    if faults:
        raise EchelonError(*faults)
    request = EnvironmentRequest(
        source, kind, parsed, ignored, chosen_python, indexes, builder, tool, environ
    )
    in_source = (venv_parent or source) / ".venv" if location == "source" else None
    return _make_plan(request, in_source)


def _check_arguments(source: Path, location: str) -> Path:
    if location not in LOCATIONS:
        raise EchelonError(Fault(f"where={location}", suggest_nearest(location, LOCATIONS)))
    if not source.is_dir():
        raise EchelonError(
            Fault(f"there is no source folder {source}", "give another one with --source DIR"),
            exit=Exit.NOT_FOUND,
        )
    return Path(os.path.abspath(source))


def _find_dependency_files(source: Path) -> list[Path]:
    files = [source / name for name in KIND_BY_FILE if (source / name).is_file()]
    return [f for f in files if f.name != "pyproject.toml" or pyproject.is_project(f)]


def _read_dependencies(
    kind: str, file: Path, source: Path, environ: Mapping[str, str]
) -> tuple[ParsedDependencies, list[tuple[str, str, str]]]:
    """What is wanted, and which Python."""
    if kind == "pipfile":
        parsed, content = pipfile.read_pipfile(source, environ)
        return parsed, pipfile.python_requests(content)
    if kind == "requirements":
        return requirements.read_requirements(file, source, environ), []
    if kind == "conda":
        return conda.read_environment_yml(file, source, environ), []
    parsed, content = (
        pyproject.read_pyproject(source) if kind == "pyproject" else pyproject.read_uv_lock(source)
    )
    return parsed, pyproject.python_requests(content)


def _choose_builder(
    kind: str, parsed: ParsedDependencies, environ: Mapping[str, str], interpreter: Interpreter
) -> tuple[str, str, Fault | None]:
    """Its name, its path, and what is missing."""
    if kind == "conda":
        tool = conda.find_conda(environ)
        return "conda", tool or "", None if tool else conda.missing_conda_fault()
    requested = environ.get("ECHELON_ENV_BUILDER", "")
    if requested not in ("", "uv", "pip"):
        return (
            "",
            "",
            Fault(f"ECHELON_ENV_BUILDER={requested}", suggest_nearest(requested, ("uv", "pip"))),
        )
    beside = Path(sys.executable).parent
    uv = None if requested == "pip" else _find_uv(environ.get("PATH", ""), beside)
    if uv is None and (kind == "uv.lock" or requested == "uv"):
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
    unlocked = kind == "pipfile" and not any(f.name == "Pipfile.lock" for f in parsed.files)
    return "pipenv" if unlocked else "uv" if uv else "pip", uv or "", None


def _find_uv(path: str, beside: Path) -> str | None:
    """From the PATH, or from where Echelon itself is installed."""
    return shutil.which("uv", path=path) or shutil.which("uv", path=str(beside))


def _make_plan(request: EnvironmentRequest, in_source: Path | None = None) -> EnvironmentPlan:
    key = compute_key(request)
    folder = in_source or environments_root(request.environ) / key
    _require_usable_path(folder)
    recipe = _make_steps(request, folder)
    commands = [shlex.join(step) for step in recipe.steps]
    if recipe.pipenv_environment:
        commands[1:1] = [*recipe.pipenv_environment.commands, "pipenv lock"]
    return EnvironmentPlan(
        source=request.source,
        kind=request.kind,
        files=tuple(request.parsed.files),
        ignored=request.ignored,
        key=key,
        folder=folder,
        builder=request.builder,
        commands=tuple(commands),
        ready=EnvironmentPaths(folder).is_ready(key),
        build_steps=recipe,
    )


def _require_usable_path(folder: Path) -> None:
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


def _make_steps(request: EnvironmentRequest, folder: Path) -> BuildSteps:
    paths = EnvironmentPaths(folder)
    environ = builder_environ(request.environ) | {
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
    }
    wanted = tuple(request.parsed.requirements)
    if request.kind == "conda":
        step = conda.create_command(request.tool, request.parsed.files[0], folder)
        environ |= {"CONDA_ALWAYS_YES": "true", **request.indexes.environment_variables("pip")}
        return BuildSteps((step,), {}, environ, wanted)
    installer = "uv" if request.tool else "pip"
    environ |= request.indexes.environment_variables(installer)
    environ |= {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1", "PIP_PROGRESS_BAR": "off"}
    if request.kind == "uv.lock":
        environ |= {"UV_PROJECT_ENVIRONMENT": str(folder)}
        return BuildSteps((_uv_sync_command(request),), {}, environ, wanted)
    inputs = {
        "requirements.txt": _join_lines(wanted),
        "constraints.txt": _join_lines(request.parsed.constraints),
    }
    if request.builder == "pipenv":
        inputs = {"Pipfile": (request.source / "Pipfile").read_text(encoding="utf-8-sig")}
    steps = [_venv_command(request, folder)]
    if wanted:
        steps.append(_install_command(request, paths, installer))
    return BuildSteps(
        tuple(steps),
        inputs,
        environ,
        wanted,
        _plan_pipenv_environment(request) if request.builder == "pipenv" else None,
    )


def _venv_command(request: EnvironmentRequest, folder: Path) -> tuple[str, ...]:
    if request.tool:
        return (
            request.tool,
            "venv",
            "--no-project",
            "--python",
            request.interpreter.executable,
            str(folder),
        )
    return (request.interpreter.executable, "-m", "venv", str(folder))


def _install_command(
    request: EnvironmentRequest, paths: EnvironmentPaths, installer: str
) -> tuple[str, ...]:
    python = str(paths.python())
    start = (request.tool, "pip", "install", "--python", python)
    words = [*(start if request.tool else (python, "-m", "pip", "install"))]
    words += [*_refresh_options(request), *request.indexes.install_options(installer)]
    words += ["--requirement", str(paths.inputs / "requirements.txt")]
    if request.parsed.constraints:
        words += ["--constraint", str(paths.inputs / "constraints.txt")]
    return tuple(words)


def _uv_sync_command(request: EnvironmentRequest) -> tuple[str, ...]:
    """`--locked`, not `--frozen`: a lock that lacks what pyproject.toml has gained is an error now
    and not an ImportError in the job."""
    words = (request.tool, "sync", "--locked", "--no-dev", "--no-install-project", "--no-editable")
    no_index = ("--no-index",) if request.indexes.no_index else ()
    where = ("--python", request.interpreter.executable, "--project", str(request.source))
    return (*words, *_refresh_options(request), *no_index, *where)


def _refresh_options(request: EnvironmentRequest) -> tuple[str, ...]:
    """uv would install a local project as it once built it: it looks for edits in its
    pyproject.toml alone. What comes from an index is then asked for, and not fetched again."""
    return (
        ("--refresh",)
        if request.tool and any(path.is_dir() for path in request.parsed.local_paths)
        else ()
    )


def _plan_pipenv_environment(parent: EnvironmentRequest) -> EnvironmentPlan:
    """An environment like any other, with pipenv in it; built when it is needed, kept for later."""
    parsed = ParsedDependencies(
        requirements=[RequirementLine("pipenv", parent.source / "Pipfile", 1)]
    )
    indexes = read_pip_settings(parent.environ, parent.interpreter.prefix)
    builder = "uv" if parent.tool else "pip"
    request = parent._replace(
        kind="requirements", parsed=parsed, ignored=(), indexes=indexes, builder=builder
    )
    return _make_plan(request)


def _join_lines(lines: tuple[RequirementLine, ...] | list[RequirementLine]) -> str:
    return "".join(f"{line.text}\n" for line in lines)

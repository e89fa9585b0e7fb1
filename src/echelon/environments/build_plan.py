"""The build plan of an environment: which file determines it, where it goes and which commands
build it.

Planning only reads: `echelon env show` and `--dry-run` print the plan, `build.py` executes it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from echelon.environments import conda, pipfile, pyproject, requirements
from echelon.environments.cache import EnvironmentPaths, get_environments_root
from echelon.environments.cache_key import EnvironmentRequest, compute_key
from echelon.environments.interpreter import (
    Interpreter,
    PythonRequest,
    find_python_version_faults,
    inspect_interpreter,
)
from echelon.environments.package_indexes import (
    apply_options,
    drop_redirecting_variables,
    is_insecure,
    make_insecure_fault,
    read_pip_settings,
)
from echelon.environments.requirements import ParsedDependencies, RequirementLine
from echelon.errors import EchelonError, ExitCode, Fault, suggest_nearest

KIND_BY_FILE = {
    "Pipfile": "pipfile",
    "requirements.txt": "requirements",
    "uv.lock": "uv.lock",
    "pyproject.toml": "pyproject",
    "environment.yml": "conda",
    "environment.yaml": "conda",
}
"""The first file that exists determines the environment. `requirements.txt` comes before
`pyproject.toml`, which often exists only for the settings of linters."""
_KINDS_WITH_OPEN_LISTS = ("pipfile", "requirements", "pyproject")
"""Whose requirements are a list that pip or uv is given."""
_COMPANION_FILES = {"uv.lock": {"pyproject.toml"}, "Pipfile": {"Pipfile.lock"}}
"""Files that belong to the determining file and are therefore not reported as ignored."""
LOCATIONS = ("cache", "source")
"""The values of `--where`."""


class BuildSteps(NamedTuple):
    """What `build_environment` needs beyond what the plan shows to the user."""

    steps: tuple[tuple[str, ...], ...] = ()
    """The commands, in order."""
    inputs: Mapping[str, str] = {}
    """Content of the files given to pip or uv, by name; URLs in them may contain passwords."""
    environ: Mapping[str, str] = {}
    """The environment variables of the commands."""
    requirements: tuple[RequirementLine, ...] = ()
    """For error messages: which line of which file asked for a package."""
    pipenv_environment: EnvironmentPlan | None = None
    """The environment that contains pipenv, if a Pipfile has no lock file."""


@dataclass(frozen=True)
class EnvironmentPlan:
    """What will be built, from what, and where. `to_dict` is what `--json` prints."""

    source: Path
    kind: str
    """pipfile, requirements, uv.lock, pyproject, conda or none."""
    files: tuple[Path, ...]
    """The files that determine the environment."""
    ignored: tuple[Path, ...]
    """Dependency files that a file of higher priority displaced."""
    key: str
    """The cache key."""
    folder: Path
    """Where the environment is or will be."""
    builder: str
    """uv, pip, conda, pipenv (which makes the lock file that uv or pip then installs), or empty."""
    commands: tuple[str, ...]
    """The commands that will run, as they would be typed."""
    ready: bool
    """Whether it is built already and valid."""
    build_steps: BuildSteps = field(default=BuildSteps(), repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that `--json` prints."""
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
    more: Sequence[str] = (),
    for_image: bool = False,
) -> EnvironmentPlan:
    """Read the dependency files of a source folder and plan its environment.

    The same files, interpreter and pip settings give the same cache key on any machine, so a copy
    of the source finds the environment of the original. `more` are requirements beside those of the
    files; where a lock file or conda decides, the files have to name them. `venv_parent` is the
    folder that gets the .venv with `location="source"`, if that is not `source` itself but the
    folder it was copied from. With `for_image` the tools are in the image, so that none is needed
    here.

    Raises one EchelonError with all faults of all files.
    """
    source = _resolve_source_folder(Path(source), location)
    present = _find_dependency_files(source)
    if not present:
        return EnvironmentPlan(source, "none", (), (), "", source, "", (), True)
    kind = KIND_BY_FILE[present[0].name]
    ignored = tuple(
        f for f in present[1:] if f.name not in _COMPANION_FILES.get(present[0].name, ())
    )
    parsed, python_requests = _read_dependencies(kind, present[0], source, environ)
    if kind in _KINDS_WITH_OPEN_LISTS:
        parsed = _add_requirements(parsed, more, present[0])
    chosen_python = inspect_interpreter(python, environ)
    indexes = apply_options(read_pip_settings(environ, chosen_python.prefix), parsed.options)
    faults = [*parsed.faults, *requirements.find_insecure_url_faults(parsed, indexes.trusted_hosts)]
    in_files = {url for url, _ in parsed.urls}
    faults += [
        make_insecure_fault(url, "pip's settings")
        for url in indexes.list_urls()
        if url not in in_files and is_insecure(url, indexes.trusted_hosts)
    ]
    if kind != "conda":
        faults += find_python_version_faults(chosen_python, python_requests, source)
    builder, tool, fault = _choose_builder(kind, parsed, environ, chosen_python)
    faults += [fault] if fault and not for_image else []
    if faults:
        raise EchelonError(*faults)
    request = EnvironmentRequest(
        source, kind, parsed, ignored, chosen_python, indexes, builder, tool, environ
    )
    in_source = (venv_parent or source) / ".venv" if location == "source" else None
    return _make_plan(request, in_source)


def _resolve_source_folder(source: Path, location: str) -> Path:
    """Return the absolute source folder, or raise if it or the location does not exist."""
    if location not in LOCATIONS:
        raise EchelonError(Fault(f"where={location}", suggest_nearest(location, LOCATIONS)))
    if not source.is_dir():
        raise EchelonError(
            Fault(f"there is no source folder {source}", "give another one with --source DIR"),
            exit=ExitCode.NOT_FOUND,
        )
    return Path(os.path.abspath(source))


def _find_dependency_files(source: Path) -> list[Path]:
    """Return the dependency files of the source, by priority."""
    files = [source / name for name in KIND_BY_FILE if (source / name).is_file()]
    return [f for f in files if f.name != "pyproject.toml" or pyproject.is_project(f)]


def _read_dependencies(
    kind: str, file: Path, source: Path, environ: Mapping[str, str]
) -> tuple[ParsedDependencies, list[PythonRequest]]:
    """Return what a file requires, and which versions of Python it asks for."""
    if kind == "pipfile":
        parsed, content = pipfile.read_pipfile(source, environ)
        return parsed, pipfile.read_python_requests(content)
    if kind == "requirements":
        return requirements.read_requirements(file, source, environ), []
    if kind == "conda":
        return conda.read_environment_yml(file, source, environ), []
    parsed, content = (
        pyproject.read_pyproject(source) if kind == "pyproject" else pyproject.read_uv_lock(source)
    )
    return parsed, pyproject.read_python_requests(content)


def _add_requirements(
    parsed: ParsedDependencies, more: Sequence[str], file: Path
) -> ParsedDependencies:
    """Add requirements of packages that the files do not name. Where the files have hashes, pip
    would refuse one without, so they stay as they are."""
    if any("--hash=" in line.text for line in parsed.requirements):
        return parsed
    named = {line.name for line in parsed.requirements}
    added = [line for text in more if (line := RequirementLine(text, file, 1)).name not in named]
    return replace(parsed, requirements=[*parsed.requirements, *added])


def _choose_builder(
    kind: str, parsed: ParsedDependencies, environ: Mapping[str, str], interpreter: Interpreter
) -> tuple[str, str, Fault | None]:
    """Return the builder's name, the path of its tool, and a fault if the tool is missing."""
    if kind == "conda":
        tool = conda.find_conda(environ)
        return "conda", tool or "", None if tool else conda.make_missing_conda_fault()
    requested = environ.get("ECHELON_ENV_BUILDER", "")
    if requested not in ("", "uv", "pip"):
        return (
            "",
            "",
            Fault(f"ECHELON_ENV_BUILDER={requested}", suggest_nearest(requested, ("uv", "pip"))),
        )
    own_bin = Path(sys.executable).parent
    uv = None if requested == "pip" else _find_uv(environ.get("PATH", ""), own_bin)
    if uv is None and (kind == "uv.lock" or requested == "uv"):
        reason = "uv.lock is for uv" if kind == "uv.lock" else "ECHELON_ENV_BUILDER=uv"
        return (
            "",
            "",
            Fault(
                f"{reason}, and there is no uv on the PATH",
                "install it (`pip install uv`), or write its list for pip on a machine that "
                "has it: `uv export --no-dev --no-emit-project -o requirements.txt`",
            ),
        )
    has_no_lock = kind == "pipfile" and not any(f.name == "Pipfile.lock" for f in parsed.files)
    return "pipenv" if has_no_lock else "uv" if uv else "pip", uv or "", None


def _find_uv(path: str, own_bin: Path) -> str | None:
    """Return the path of uv, from the PATH or from the environment that Echelon is installed in."""
    return shutil.which("uv", path=path) or shutil.which("uv", path=str(own_bin))


def _make_plan(request: EnvironmentRequest, in_source: Path | None = None) -> EnvironmentPlan:
    """Complete the plan of a valid request."""
    key = compute_key(request)
    folder = in_source or get_environments_root(request.environ) / key
    _require_usable_path(folder)
    build_steps = _make_steps(request, folder)
    commands = [shlex.join(step) for step in build_steps.steps]
    if build_steps.pipenv_environment:
        commands[1:1] = [*build_steps.pipenv_environment.commands, "pipenv lock"]
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
        build_steps=build_steps,
    )


def _require_usable_path(folder: Path) -> None:
    """Raise if the folder cannot be on the PATH.

    PATH cannot quote a colon, and a `#!` line cannot contain a line break.
    """
    if any(sign in str(folder) for sign in ":\n\r"):
        raise EchelonError(
            Fault(
                f"the environment would be in {str(folder)!r}, and a path with a colon or a line "
                "break cannot be on the PATH",
                "use --where cache, or set ECHELON_CACHE to another folder",
            )
        )


# --- the commands ---


def _make_steps(request: EnvironmentRequest, folder: Path) -> BuildSteps:
    """Return the commands, their input files and their environment variables."""
    paths = EnvironmentPaths(folder)
    environ = drop_redirecting_variables(request.environ) | {
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
    }
    requirements = tuple(request.parsed.requirements)
    if request.kind == "conda":
        step = conda.create_command(request.tool, request.parsed.files[0], folder)
        environ |= {"CONDA_ALWAYS_YES": "true", **request.indexes.make_environment_variables("pip")}
        return BuildSteps((step,), {}, environ, requirements)
    installer = "uv" if request.tool else "pip"
    environ |= request.indexes.make_environment_variables(installer)
    environ |= {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1", "PIP_PROGRESS_BAR": "off"}
    if request.kind == "uv.lock":
        environ |= {"UV_PROJECT_ENVIRONMENT": str(folder)}
        return BuildSteps((_make_uv_sync_command(request),), {}, environ, requirements)
    inputs = {
        "requirements.txt": _join_lines(requirements),
        "constraints.txt": _join_lines(request.parsed.constraints),
    }
    if request.builder == "pipenv":
        inputs = {"Pipfile": (request.source / "Pipfile").read_text(encoding="utf-8-sig")}
    steps = [_make_venv_command(request, folder)]
    if requirements:
        steps.append(_make_pip_install_command(request, paths, installer))
    return BuildSteps(
        tuple(steps),
        inputs,
        environ,
        requirements,
        _plan_pipenv_install(request) if request.builder == "pipenv" else None,
    )


def _make_venv_command(request: EnvironmentRequest, folder: Path) -> tuple[str, ...]:
    """Return the command that makes an empty virtual environment."""
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


def _make_pip_install_command(
    request: EnvironmentRequest, paths: EnvironmentPaths, installer: str
) -> tuple[str, ...]:
    """Return the command that installs the requirements."""
    python = str(paths.python_executable())
    start = (request.tool, "pip", "install", "--python", python)
    words = [*(start if request.tool else (python, "-m", "pip", "install"))]
    words += [*_make_refresh_options(request), *request.indexes.make_install_flags(installer)]
    words += ["--requirement", str(paths.inputs_folder / "requirements.txt")]
    if request.parsed.constraints:
        words += ["--constraint", str(paths.inputs_folder / "constraints.txt")]
    return tuple(words)


def _make_uv_sync_command(request: EnvironmentRequest) -> tuple[str, ...]:
    """Return the command that installs from uv.lock.

    `--locked`, not `--frozen`: if pyproject.toml has gained a dependency since the lock file was
    made, that is an error now instead of an ImportError in the job.
    """
    words = (request.tool, "sync", "--locked", "--no-dev", "--no-install-project", "--no-editable")
    no_index = ("--no-index",) if request.indexes.no_index else ()
    project_options = ("--python", request.interpreter.executable, "--project", str(request.source))
    return (*words, *_make_refresh_options(request), *no_index, *project_options)


def _make_refresh_options(request: EnvironmentRequest) -> tuple[str, ...]:
    """Return `--refresh` if uv installs a local project.

    uv would reuse the wheel it once built of the project, as it looks for edits in pyproject.toml
    alone. With the option it also asks the index again, but downloads nothing twice.
    """
    return (
        ("--refresh",)
        if request.tool and any(path.is_dir() for path in request.parsed.local_paths)
        else ()
    )


def _plan_pipenv_install(parent: EnvironmentRequest) -> EnvironmentPlan:
    """Plan an environment that contains pipenv; it is cached like any other."""
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
    """Return requirements as the text of a file, one per line."""
    return "".join(f"{line.text}\n" for line in lines)

"""The recipe of an image with the environment of a source folder: a Containerfile for podman and
`ch-image`, a definition file for Apptainer.

It is made from the same plan as an environment on this machine, and holds everything that it
installs as text, so that it can be carried to a machine that has a builder. Nothing secret is in
it: settings of pip, whose addresses may have passwords, are seen by the build alone.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from echelon.environments.build_plan import EnvironmentPlan, plan_environment
from echelon.environments.interpreter import inspect_interpreter
from echelon.environments.requirements import format_relative_path
from echelon.errors import EchelonError, ExitCode, Fault

SETTINGS_FOLDER = "/opt/echelon-pip"
"""Where the build sees pip's settings of this machine, if there are any."""
_FILES_FOLDER = "/opt/echelon-files"
_CERTIFICATES = "certificates.pem"
_CONDA_BASE = "docker.io/mambaorg/micromamba:latest"
_SETTING_OF = {
    "PIP_INDEX_URL": "index-url",
    "PIP_EXTRA_INDEX_URL": "extra-index-url",
    "PIP_FIND_LINKS": "find-links",
    "PIP_TRUSTED_HOST": "trusted-host",
    "PIP_PROXY": "proxy",
    "PIP_DEFAULT_TIMEOUT": "timeout",
}
"""Variables of pip that mean the same in an image."""
_PASSWORD = re.compile(r"://[^/\s'\"]+@")


@dataclass(frozen=True)
class ImageRecipe:
    """How an image is built."""

    plan: EnvironmentPlan
    base: str
    commands: tuple[str, ...]
    """What is run in the base, as shell commands."""
    files: tuple[str, ...]
    """Files of the source that the commands need."""
    pip_settings: str
    """The text of a pip.conf for the build alone; empty where pip has none."""
    certificates: str = ""
    """The file of this machine by which pip knows its index; empty for those of the image."""
    wheel_folders: tuple[str, ...] = ()
    """Folders of this machine in which pip looks for packages."""

    @property
    def key(self) -> str:
        """The key of the environment, and a digest of what the image adds to it."""
        digest = hashlib.sha256(self.render_containerfile().encode()).hexdigest()[:8]
        return f"{self.plan.key}-{digest}"

    @property
    def _title(self) -> str:
        names = ", ".join(format_relative_path(f, self.plan.source) for f in self.plan.files)
        return f"# The environment of {names}, made by `echelon env build --container`."

    def render_containerfile(self) -> str:
        """Return the Containerfile; its context is the source folder."""
        lines = [self._title, f"FROM {self.base}"]
        if self.files:
            lines.append(f"COPY {' '.join(self.files)} {_FILES_FOLDER}/")
        lines += [f"RUN {_continue_lines(command)}" for command in self.commands]
        return "\n".join([*lines, ""])

    def render_definition(self) -> str:
        """Return the definition file of Apptainer."""
        is_file = self.base.endswith(".sif") or self.base.startswith("/")
        lines = [
            f"Bootstrap: {'localimage' if is_file else 'docker'}",
            f"From: {self.base.removeprefix('docker://')}",
            "",
            self._title,
        ]
        if self.files:
            lines.append("%files")
            lines += [
                f"    {self.plan.source / name} {_FILES_FOLDER}/{name}" for name in self.files
            ]
        lines += ["%post", "    set -e", *(f"    {command}" for command in self.commands)]
        return "\n".join([*lines, ""])


def plan_image(
    source: Path, base: str | None, python: str, environ: Mapping[str, str]
) -> ImageRecipe:
    """Return the recipe of the image of a source folder. Raises one EchelonError with all faults.

    Without a base it is Debian with this version of Python, or micromamba for an environment.yml.
    """
    # pip is what every base with a Python has.
    with_pip = {**environ, "ECHELON_ENV_BUILDER": "pip"}
    plan = plan_environment(source, "cache", with_pip, python, for_image=True)
    if plan.kind == "none":
        raise EchelonError(
            Fault(
                f"{plan.source} has no file that says what to install",
                "write a requirements.txt, or name an image that has all: launch.container=IMAGE",
            ),
            exit=ExitCode.NOT_FOUND,
        )
    if base is None:
        version = ".".join(inspect_interpreter(python, environ).version.split(".")[:2])
        slim = f"docker.io/library/python:{version}-slim"
        base = _CONDA_BASE if plan.kind == "conda" else slim
    faults = _find_faults(plan, base)
    if faults:
        raise EchelonError(*faults)
    files = tuple(format_relative_path(f, plan.source) for f in plan.files)
    variables = {} if plan.kind == "conda" else plan.build_steps.environ
    settings = _render_pip_settings(variables)
    pip = f"PIP_CONFIG_FILE={SETTINGS_FOLDER}/pip.conf python3 -m pip" if settings else ""
    pip = f"{pip or 'python3 -m pip'} install --no-cache-dir"
    own = _make_file_command("echelon.txt", _list_own_requirements())
    inputs = plan.build_steps.inputs
    match plan.kind:
        case "conda":
            commands = [
                "micromamba install --yes --name base --file " + f"{_FILES_FOLDER}/{files[0]}",
                f"{own} && /opt/conda/bin/{pip} --requirement /tmp/echelon.txt",
            ]
        case "uv.lock":
            export = "uv export --locked --no-dev --no-emit-project --output-file"
            commands = [
                f"{pip} uv && cd {_FILES_FOLDER} && {export} /tmp/requirements.txt",
                f"{pip} --requirement /tmp/requirements.txt",
                f"{own} && {pip} --requirement /tmp/echelon.txt",
            ]
        case "pipfile" if plan.builder == "pipenv":
            lock = "pipenv lock && pipenv requirements > /tmp/requirements.txt"
            commands = [
                f"{pip} pipenv && cd {_FILES_FOLDER} && {lock}",
                f"{pip} --requirement /tmp/requirements.txt",
                f"{own} && {pip} --requirement /tmp/echelon.txt",
            ]
        case _:
            files = ()
            options = _list_pip_options(plan)
            no_index = [option for option in options if option == "--no-index"]
            words = [*options, "--requirement", "/tmp/requirements.txt"]
            written = _make_file_command("requirements.txt", inputs["requirements.txt"].split("\n"))
            if constraints := inputs["constraints.txt"]:
                words += ["--constraint", "/tmp/constraints.txt"]
                lines = constraints.split("\n")
                written += f" && {_make_file_command('constraints.txt', lines)}"
            commands = [
                f"{written} && {pip} {shlex.join(words)}",
                f"{own} && {pip} {' '.join([*no_index, '--requirement'])} /tmp/echelon.txt",
            ]
    wheels = tuple(p for p in variables.get("PIP_FIND_LINKS", "").split() if Path(p).is_dir())
    certificates = variables.get("PIP_CERT", "")
    return ImageRecipe(plan, base, tuple(commands), files, settings, certificates, wheels)


def _find_faults(plan: EnvironmentPlan, base: str) -> list[Fault]:
    """Return the faults of what cannot be in a recipe."""
    faults = []
    if not base.strip() or base.startswith("-") or any(c.isspace() for c in base):
        faults.append(Fault(f"--base {base!r} is not an image", "give one, as python:3.12-slim"))
    for requirement in plan.build_steps.requirements:
        where = f"{format_relative_path(requirement.file, plan.source)}:{requirement.line_number}"
        if "file:" in requirement.text or requirement.text.startswith(("/", ".")):
            faults.append(
                Fault(
                    f"{where} installs files of this machine, which an image cannot take over",
                    "leave it out: the folder of the code is mounted, and can be on PYTHONPATH",
                )
            )
        if _PASSWORD.search(requirement.text):
            faults.append(
                Fault(
                    f"{where} has a password in an address, which would be in the image",
                    "put it into pip's settings or ~/.netrc",
                )
            )
    return faults


def _list_own_requirements() -> list[str]:
    """Return what Echelon itself needs; its source is mounted."""
    needed = importlib.metadata.requires("echelon") or []
    return [text for text in needed if "extra" not in str(Requirement(text).marker or "")]


def _list_pip_options(plan: EnvironmentPlan) -> list[str]:
    """Return the options of the plan's own `pip install`, such as --pre and --require-hashes."""
    install = next((s for s in plan.build_steps.steps if "--requirement" in s), ())
    words = install[install.index("install") + 1 : install.index("--requirement")]
    return [word for word in words if not word.startswith("--constraint=")] if install else []


def _render_pip_settings(environ: Mapping[str, str]) -> str:
    """Return pip's settings of this machine as a pip.conf; empty where it has none."""
    lines = [f"{name} = {environ[key]}" for key, name in _SETTING_OF.items() if environ.get(key)]
    if environ.get("PIP_CERT"):
        lines.append(f"cert = {SETTINGS_FOLDER}/{_CERTIFICATES}")
    return "\n".join(["[global]", *lines, ""]) if lines else ""


def _make_file_command(name: str, lines: list[str]) -> str:
    """Return the command that writes lines into a file in /tmp of the image."""
    quoted = [shlex.quote(line) for line in lines if line]
    return " ".join(["printf '%s\\n'", *quoted, ">", f"/tmp/{name}"])


def _continue_lines(command: str) -> str:
    """Return a command with a line for each of its parts, as people write them."""
    return command.replace(" && ", " \\\n && ")


def write_build_files(recipe: ImageRecipe, folder: Path) -> list[tuple[str, str]]:
    """Write both recipes and pip's settings into a folder that only the user can read; returns what
    the build has to see of this machine, as pairs of a folder here and one there."""
    (folder / "Containerfile").write_text(recipe.render_containerfile(), encoding="utf-8")
    (folder / "image.def").write_text(recipe.render_definition(), encoding="utf-8")
    if not recipe.pip_settings:
        return []
    settings = folder / "pip"
    settings.mkdir()
    (settings / "pip.conf").write_text(recipe.pip_settings, encoding="utf-8")
    if recipe.certificates:
        shutil.copyfile(recipe.certificates, settings / _CERTIFICATES)
    return [(str(settings), SETTINGS_FOLDER), *((path, path) for path in recipe.wheel_folders)]

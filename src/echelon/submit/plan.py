"""A submission before it happens: which commands, how, in which environment, from which code."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from echelon.config.compose import compose
from echelon.config.schema import Config
from echelon.config.user_defaults import UserDefaults, has_secret
from echelon.config.validate import check_run_name, find_faults
from echelon.environments import EnvironmentPlan, activation_lines
from echelon.environments import plan_environment as plan_environment
from echelon.environments.cache import MARKER_NAME
from echelon.errors import EchelonError, Fault
from echelon.gpus import count_visible_gpus
from echelon.launch.slurm import batch_script, job_array
from echelon.runs import run_folder
from echelon.runs.run_folder import Run
from echelon.submit import command_file, launch_modes
from echelon.submit.launch_modes import LaunchMode
from echelon.submit.shell_syntax import ShellCommand
from echelon.submit.source_copy import SourceTree, survey_source


@dataclass(frozen=True)
class SubmitRequest:
    """What was typed."""

    overrides: list[str]
    configs: Path | None = None
    source: Path | None = None
    name: str | None = None
    build: str = "login"
    env: str = "cache"
    links: tuple[str, ...] = ()
    requeue: bool = False


@dataclass(frozen=True)
class PlannedCommand:
    """One command and its run."""

    command: ShellCommand
    launch_mode: LaunchMode
    config: Config

    def to_dict(self) -> dict[str, Any]:
        return {
            "file": self.command.file,
            "line": self.command.line,
            "argv": self.command.argv,
            "variables": {name: value.text for name, value in self.command.variables},
            "mode": self.launch_mode.mode,
            "why": self.launch_mode.reason,
            "program": self.config.program,
            "run": self.config.run.name,
        }


@dataclass(frozen=True)
class SbatchJob:
    """What is one call of sbatch's: a run, or an array of runs that are alike."""

    configs: Sequence[Config]
    script: str
    array: job_array.JobArray | None


@dataclass(frozen=True)
class Submission:
    name: str
    folder: Path
    """Of the code as it was; where there is one command only, its run's folder too."""
    commands: tuple[PlannedCommand, ...]
    source: SourceTree
    environment: EnvironmentPlan | None
    build_place: str
    environment_place: str
    """The environment is kept: cache or source."""

    @property
    def kind(self) -> str:
        return self.commands[0].config.launch.kind

    @property
    def source_copy(self) -> Path:
        return self.folder / "source"

    @property
    def configs(self) -> list[Config]:
        return [entry.config for entry in self.commands]

    @property
    def runs(self) -> list[Run]:
        return [Run.from_config(config) for config in self.configs]

    def render_environment_setup(self) -> list[str]:
        """Lines of the shell that make and enter the environment."""
        if self.environment is None:
            return []
        build_lines = (
            [] if self.build_place == "login" else [self._render_build_command(self.environment)]
        )
        folder = self.environment.folder
        key, marker = f'"key": "{self.environment.key}"', shlex.quote(str(folder / MARKER_NAME))
        message = shlex.quote(
            f"error: {folder} is not what this was submitted with; submit it again"
        )
        check = f"grep -qsF '{key}' {marker} || {{ echo {message} >&2; fail 1; }}"
        return [*build_lines, *activation_lines(self.environment), check]

    def _render_build_command(self, environment: EnvironmentPlan) -> str:
        cache = shlex.quote(str(environment.folder.parents[1]))  # as seen from here
        words = [
            "-m",
            "echelon",
            "env",
            "build",
            "--source",
            str(self.source_copy),
            "--where",
            "cache",
        ]
        python = batch_script.python_command(self.configs[0])
        return f"ECHELON_CACHE={cache} {python} {shlex.join(words)} || fail $?"

    def with_environment_of_copy(self, env: Mapping[str, str]) -> Submission:
        """With the environment that the copy asks for: what is edited while it is built gets
        neither into it nor under its key."""
        if self.environment is None:
            return self
        source = self.source.folder
        found = plan_environment(
            self.source_copy, location=self.environment_place, environ=env, venv_parent=source
        )
        return replace(self, environment=found)

    def build_jobs(self) -> list[SbatchJob]:
        """Of one shape each, so that Slurm can take them together."""
        if self.kind != "slurm":
            return []
        scene = batch_script.ScriptEnvironment(
            self.source_copy, tuple(self.render_environment_setup())
        )
        found = []
        for alike in _group_alike(self.configs):
            if len(alike) == 1 or job_array.read_max_array_size(os.environ) <= 1:
                found += [
                    SbatchJob([c], batch_script.render_script(c, Run.from_config(c), scene), None)
                    for c in alike
                ]
            else:
                arrays = job_array.plan_arrays(alike, scene)
                found += [SbatchJob(each.configs, each.script, each) for each in arrays]
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "folder": str(self.folder),
            "launch": self.kind,
            "commands": [entry.to_dict() for entry in self.commands],
            "environment": self.environment.to_dict() if self.environment else None,
            "build": self.build_place if self.environment else None,
            "source": self.source.to_dict(),
        }


def _group_alike(configs: Sequence[Config]) -> Iterator[list[Config]]:
    """The first of each shape decides where its group stands."""
    shapes = [(config.launch, config.mode) for config in configs]
    order = [shapes.index(shape) for shape in shapes]
    for _, group in groupby(sorted(range(len(configs)), key=order.__getitem__), order.__getitem__):
        yield [configs[at] for at in group]


# --- from what was typed ---


def plan_submission(
    request: SubmitRequest, defaults: UserDefaults, env: Mapping[str, str]
) -> Submission:
    source = request.source or Path()
    file = request.configs or source / command_file.DEFAULT_FILE
    read = command_file.read_commands(file)
    config = _compose_config(request, defaults, read[0])
    place = Path(config.run.dir).absolute()
    surveyed = survey_source(source, place, request.links, config.launch.secrets)
    visible = count_visible_gpus(env) if config.launch.kind == "local" else 0
    chosen = config.mode if "mode" in _overridden_keys(request) else None
    entries = _plan_commands(read, config, chosen, surveyed.folder, visible)
    name = _choose_name(request.name or config.run.name, file, read)
    environment = _plan_environment(request, surveyed.folder, env)
    return Submission(
        name,
        place / name,
        _assign_run_names(entries, name, place),
        surveyed,
        environment,
        request.build,
        request.env,
    )


def _compose_config(request: SubmitRequest, defaults: UserDefaults, first: ShellCommand) -> Config:
    words = [] if "launch" in _overridden_keys(request) else ["launch=slurm"]
    config = compose([*words, *request.overrides], program=first.argv, defaults=defaults)
    if config.launch.kind not in ("slurm", "local"):
        raise EchelonError(
            Fault(
                f"launch={config.launch.kind}: commands are submitted to Slurm, or run here",
                "leave it out for launch=slurm, or say launch=local",
            )
        )
    asked_for = "launch.max_requeues" in (*_overridden_keys(request), *defaults.launch)
    if request.requeue or asked_for or config.launch.kind != "slurm":
        return config
    return replace(config, launch=replace(config.launch, max_requeues=0))


def _overridden_keys(request: SubmitRequest) -> list[str]:
    """What was set by typing it."""
    return [word.partition("=")[0] for word in request.overrides]


def _plan_commands(
    read: Sequence[ShellCommand], config: Config, chosen: str | None, source: Path, visible: int
) -> list[PlannedCommand]:
    entries: list[PlannedCommand] = []
    faults: list[Fault] = []
    for command in read:
        try:
            way = launch_modes.detect_launch_mode(command, config, chosen, source, visible)
            faults += [*_variable_faults(command, way), *_secret_faults(command)]
            own = launch_modes.apply_launch_mode(config, command, way)
            faults += find_faults(own)
            entries.append(PlannedCommand(command, way, own))
        except EchelonError as error:
            faults += error.faults
    if faults:
        raise EchelonError(*dict.fromkeys(faults))
    return entries


def _variable_faults(command: ShellCommand, way: LaunchMode) -> Iterator[Fault]:
    words = (*way.words, *(value for _, value in command.variables))
    for word in words if not command.expand else ():
        if word.shell is not None:
            yield Fault(
                f"{command.file}:{word.line}: {word.text} has a variable in it, and nothing says "
                "who is to fill it in",
                "the job's shell: write the line `# echelon: expand` above; nobody: put it into "
                "single quotes",
            )


def _secret_faults(command: ShellCommand) -> Iterator[Fault]:
    """Scripts and files of runs hold the words of a command."""
    words = [(word.line, word.text) for word in command.words]
    words += [(b.line, f"{a.text}={b.text}") for a, b in pairwise(command.words)]  # --key VALUE
    words += [(value.line, f"{name}={value.text}") for name, value in command.variables]
    for line, text in words:
        if has_secret(text):
            yield Fault(
                f"{command.file}:{line}: what looks like a secret would be written to files "
                "that others may read",
                "put it into a file of KEY=VALUE lines with mode 0600, and name that with "
                "launch.secrets=PATH",
            )


def _choose_name(typed: str | None, file: Path, read: Sequence[ShellCommand]) -> str:
    if typed is not None:
        if fault := check_run_name(typed):
            raise EchelonError(fault)
        return typed
    return run_folder.generate_run_name(
        [str(file.with_suffix(".sh"))] if len(read) > 1 else read[0].argv
    )


def _assign_run_names(
    entries: Sequence[PlannedCommand], name: str, place: Path
) -> tuple[PlannedCommand, ...]:
    def own(number: int) -> str:
        return name if len(entries) == 1 else f"{name}-{number}"

    def config(number: int, old: Config) -> Config:
        return replace(old, run=replace(old.run, name=own(number), dir=str(place)))

    return tuple(replace(e, config=config(i, e.config)) for i, e in enumerate(entries))


def _plan_environment(
    request: SubmitRequest, source: Path, env: Mapping[str, str]
) -> EnvironmentPlan | None:
    if request.env == "none":
        return None
    if request.env == "source" and request.build == "job":
        raise EchelonError(
            Fault(
                "--env source is made in the source folder, which a job does not see as it was",
                "leave out --build job, or --env source",
            )
        )
    found = plan_environment(source, location=request.env, environ=env)
    return found if found.kind != "none" else None

"""The plan of a submission: which commands, launched how, in which environment, from which code."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from echelon.config.compose import compose
from echelon.config.defaults_files import FileDefaults, is_likely_secret
from echelon.config.schema import Config
from echelon.config.validate import check_run_name, find_faults
from echelon.environments import EnvironmentPlan, plan_environment, render_activation_lines
from echelon.environments.cache import MARKER_NAME
from echelon.errors import EchelonError, Fault
from echelon.gpus import count_visible_gpus
from echelon.launch.containers.command import pin_runtime
from echelon.launch.slurm import batch_script, job_array
from echelon.launch.slurm.dependency import resolve_dependency
from echelon.runs.create import generate_run_name
from echelon.runs.find import find_numbered_runs
from echelon.runs.run_folder import SUBMISSION_FILE, Run
from echelon.submission import command_file, launch_modes
from echelon.submission.launch_modes import LaunchMode
from echelon.submission.shell_syntax import ShellCommand
from echelon.submission.source_copy import SourceTree, survey_source


@dataclass(frozen=True)
class SubmitRequest:
    """The options of the command, as they were given."""

    overrides: list[str]
    configs: Path | None = None
    source: Path | None = None
    name: str | None = None
    build: str = "login"
    """Where the environment is built: login or job."""
    env: str = "cache"
    """Where it is kept: cache, source or none."""
    links: tuple[str, ...] = ()
    requeue: bool = False
    commands: tuple[ShellCommand, ...] = ()
    """Commands that are given in place of a file."""


@dataclass(frozen=True)
class PlannedCommand:
    """One command and the configuration of its run."""

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
            "work": str(Run.from_config(self.config).work_folder),
        }


@dataclass(frozen=True)
class SbatchJob:
    """One call of sbatch: a run, or an array of runs with equal launch settings."""

    configs: Sequence[Config]
    script: str
    array: job_array.JobArray | None


@dataclass(frozen=True)
class Submission:
    """Everything that is decided before anything is written or queued."""

    name: str
    wanted_name: str
    """The name that was asked for; `name` has a number after it if that is in use."""
    folder: Path
    """It holds the copy of the source; of a single command it is the run's folder too."""
    commands: tuple[PlannedCommand, ...]
    source: SourceTree
    environment: EnvironmentPlan | None
    build_place: str
    """Where the environment is built: login or job."""
    environment_place: str
    """Where it is kept: cache or source."""

    @property
    def launcher_kind(self) -> str:
        """The launcher: slurm or local."""
        return self.commands[0].config.launch.kind

    @property
    def source_copy(self) -> Path:
        """The code as it was. Every run begins with a copy of it as its working folder."""
        return self.folder / "source"

    @property
    def configs(self) -> list[Config]:
        return [entry.config for entry in self.commands]

    @property
    def runs(self) -> list[Run]:
        return [Run.from_config(config) for config in self.configs]

    @property
    def name_note(self) -> str:
        """Why the name is not the one that was asked for; empty if it is."""
        is_other = self.name != self.wanted_name
        return f"the name {self.wanted_name} is in use, so this is {self.name}" if is_other else ""

    def with_free_name(self) -> Submission:
        """Return the submission under the name that was asked for, or that name with the first
        number that makes it free."""
        root = self.folder.parent
        name = _find_free_name(self.wanted_name, root, len(self.commands))
        commands = _assign_run_names(self.commands, name, root)
        return replace(self, name=name, folder=root / name, commands=commands)

    def render_environment_setup(self) -> list[str]:
        """Return the lines of the shell that build, enter and check the environment."""
        if self.environment is None:
            return []
        build_lines = []
        if self.build_place == "job":
            build_lines.append(self._render_build_command(self.environment))
        folder = self.environment.folder
        key, marker = f'"key": "{self.environment.key}"', shlex.quote(str(folder / MARKER_NAME))
        message = shlex.quote(
            f"error: {folder} is not what this was submitted with; submit it again"
        )
        check = f"grep -qsF '{key}' {marker} || {{ echo {message} >&2; fail 1; }}"
        return [*build_lines, *render_activation_lines(self.environment), check]

    def _render_build_command(self, environment: EnvironmentPlan) -> str:
        cache = shlex.quote(str(environment.folder.parents[1]))  # the job's own may be another
        options = ["--source", str(self.source_copy), "--where", "cache"]
        words = shlex.join(["-m", "echelon", "env", "build", *options])
        python = batch_script.make_python_command(self.configs[0])
        return f"ECHELON_CACHE={cache} {python} {words} || fail $?"

    def with_environment_of_copy(self, env: Mapping[str, str]) -> Submission:
        """Return the submission with the environment that the copy of the source asks for.

        So what is edited after the copy was made gets neither into the environment nor under its
        key.
        """
        if self.environment is None:
            return self
        environment = plan_environment(
            self.source_copy,
            location=self.environment_place,
            environ=env,
            venv_parent=self.source.folder,
        )
        return replace(self, environment=environment)

    def build_jobs(self) -> list[SbatchJob]:
        """Return the calls of sbatch: runs with equal launch settings are one array."""
        if self.launcher_kind != "slurm":
            return []
        environment = batch_script.ScriptEnvironment(
            self.source_copy, tuple(self.render_environment_setup())
        )
        jobs = []
        for group in job_array.group_alike(self.configs):
            if len(group) == 1 or job_array.read_max_array_size(os.environ) <= 1:
                for config in group:
                    run = Run.from_config(config)
                    script = batch_script.render_script(config, run, environment)
                    jobs.append(SbatchJob([config], script, None))
            else:
                arrays = job_array.plan_arrays(group, environment)
                jobs += [SbatchJob(array.configs, array.script, array) for array in arrays]
        return jobs

    def to_dict(self) -> dict[str, Any]:
        """Return what --json prints, and what the submission's folder keeps."""
        return {
            "name": self.name,
            "wanted_name": self.wanted_name,
            "folder": str(self.folder),
            "launch": self.launcher_kind,
            "commands": [entry.to_dict() for entry in self.commands],
            "environment": self.environment.to_dict() if self.environment else None,
            "build": self.build_place if self.environment else None,
            "source": self.source.to_dict(),
        }


# --- from the request to the plan ---


def plan_submission(
    request: SubmitRequest, defaults: FileDefaults, env: Mapping[str, str]
) -> Submission:
    """Read the command file and decide everything; EchelonError with all faults. Writes nothing."""
    source = request.source or Path()
    file = request.configs or source / command_file.DEFAULT_FILE
    commands = request.commands or tuple(command_file.read_commands(file))
    config = resolve_dependency(_compose_config(request, defaults, commands[0]))
    runs_folder = Path(config.run.dir).absolute()
    source_tree = survey_source(source, runs_folder, request.links, config.launch.secrets)
    visible_gpus = count_visible_gpus(env) if config.launch.kind == "local" else 0
    chosen_mode = config.mode if "mode" in _list_overridden_keys(request) else None
    planned = _plan_commands(commands, config, chosen_mode, source_tree.folder, visible_gpus)
    name = _choose_name(request.name or config.run.name, file, commands)
    # What a login node is given to do decides about the environment there, and the image of a
    # container is its environment.
    has_own = config.launch.login is not None or config.launch.container is not None
    environment = None if has_own else _plan_environment(request, source_tree.folder, env)
    submission = Submission(
        name,
        name,
        runs_folder / name,
        _assign_run_names(planned, name, runs_folder),
        source_tree,
        environment,
        request.build,
        request.env,
    )
    return submission.with_free_name()


def _compose_config(request: SubmitRequest, defaults: FileDefaults, first: ShellCommand) -> Config:
    """Compose the settings that all commands share, with the first one as the program."""
    words = [] if "launch" in _list_overridden_keys(request) else ["launch=slurm"]
    config = compose([*words, *request.overrides], program=first.argv, defaults=defaults)
    if config.launch.kind not in ("slurm", "local"):
        raise EchelonError(
            Fault(
                f"launch={config.launch.kind}: commands are submitted to Slurm, or run here",
                "leave it out for launch=slurm, or say launch=local",
            )
        )
    if config.launch.container is not None and config.launch.kind == "local":
        raise EchelonError(
            Fault(
                f"launch.container={config.launch.container}: commands that are run here are not "
                "started in containers",
                "leave launch=local out, or start one with `echelon run launch=local … -- COMMAND`",
            )
        )
    config = pin_runtime(config)
    is_set = "launch.max_requeues" in (*_list_overridden_keys(request), *defaults.launch)
    # A program that cannot resume must not start again by itself, so requeueing is asked for.
    if request.requeue or is_set or config.launch.kind != "slurm":
        return config
    return replace(config, launch=replace(config.launch, max_requeues=0))


def _list_overridden_keys(request: SubmitRequest) -> list[str]:
    """Return the settings that the command line sets."""
    return [word.partition("=")[0] for word in request.overrides]


def _plan_commands(
    commands: Sequence[ShellCommand],
    config: Config,
    chosen_mode: str | None,
    source: Path,
    visible_gpus: int,
) -> list[PlannedCommand]:
    """Return all commands with their configurations, or raise all their faults at once."""
    planned: list[PlannedCommand] = []
    faults: list[Fault] = []
    for command in commands:
        try:
            mode = launch_modes.detect_launch_mode(
                command, config, chosen_mode, source, visible_gpus
            )
            faults += [
                *_find_unexpanded_variable_faults(command, mode),
                *_find_secret_faults(command),
            ]
            run_config = launch_modes.build_command_config(config, command, mode)
            faults += find_faults(run_config)
            planned.append(PlannedCommand(command, mode, run_config))
        except EchelonError as error:
            faults += error.faults
    if faults:
        raise EchelonError(*dict.fromkeys(faults))
    return planned


def _find_unexpanded_variable_faults(
    command: ShellCommand, launch_mode: LaunchMode
) -> Iterator[Fault]:
    """Yield a fault for each variable of a command that nobody is asked to expand."""
    words = (*launch_mode.words, *(value for _, value in command.variables))
    for word in words if not command.expand else ():
        if word.shell is not None:
            yield Fault(
                f"{command.file}:{word.line}: {word.text} has a variable in it, and nothing says "
                "who expands it",
                "the job's shell: write the line `# echelon: expand` above; nobody: put it into "
                "single quotes",
            )


def _find_secret_faults(command: ShellCommand) -> Iterator[Fault]:
    """Yield a fault for each secret: scripts and run folders hold the words of a command."""
    words = [(word.line, word.text) for word in command.words]
    words += [(b.line, f"{a.text}={b.text}") for a, b in pairwise(command.words)]  # --key VALUE
    words += [(value.line, f"{name}={value.text}") for name, value in command.variables]
    for line, text in words:
        if is_likely_secret(text):
            yield Fault(
                f"{command.file}:{line}: what looks like a secret would be written to files "
                "that others may read",
                "put it into a file of KEY=VALUE lines with mode 0600, and name that with "
                "launch.secrets=PATH",
            )


def _choose_name(given: str | None, file: Path, commands: Sequence[ShellCommand]) -> str:
    """Return the given name, or a new one by the command file or the only command."""
    if given is not None:
        if fault := check_run_name(given):
            raise EchelonError(fault)
        return given
    is_single = len(commands) == 1
    return generate_run_name(commands[0].argv if is_single else [str(file.with_suffix(".sh"))])


def _find_free_name(wanted: str, root: Path, command_count: int) -> str:
    """Return the name, or the first of NAME.2, NAME.3, … that no run and no submission has.

    Nothing of an older submission is replaced: its folders hold what its commands wrote.
    """
    names = itertools.chain([wanted], (f"{wanted}.{number}" for number in itertools.count(2)))
    name = next(name for name in names if not _is_name_in_use(name, root, command_count))
    if fault := check_run_name(name):
        raise EchelonError(fault)
    return name


def _is_name_in_use(name: str, root: Path, command_count: int) -> bool:
    numbers = range(command_count) if command_count > 1 else ()
    if any(os.path.lexists(root / each) for each in (name, *(f"{name}-{n}" for n in numbers))):
        return True
    # A run NAME-1 that was submitted alone keeps nobody from being called NAME.
    members = find_numbered_runs(name, root)
    return any(not (run.folder / SUBMISSION_FILE).exists() for run in members)


def _assign_run_names(
    planned: Sequence[PlannedCommand], name: str, runs_folder: Path
) -> tuple[PlannedCommand, ...]:
    """Return the commands with names for their runs: NAME, or NAME-0, NAME-1 … of several."""

    def assign(number: int, config: Config) -> Config:
        run_name = name if len(planned) == 1 else f"{name}-{number}"
        return replace(config, run=replace(config.run, name=run_name, dir=str(runs_folder)))

    return tuple(replace(p, config=assign(i, p.config)) for i, p in enumerate(planned))


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
    plan = plan_environment(source, location=request.env, environ=env)
    return plan if plan.kind != "none" else None

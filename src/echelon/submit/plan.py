"""A submission before it happens: which commands, how, in which environment, from which code."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from echelon import runs
from echelon.config.check import faults_of, name_fault
from echelon.config.compose import compose
from echelon.config.defaults import Defaults, has_secret
from echelon.config.schema import Config
from echelon.envs import EnvPlan, activation
from echelon.envs import plan as plan_environment
from echelon.envs.places import MARKER
from echelon.errors import EchelonError, Fault
from echelon.gpus import visible_count
from echelon.launch.slurm import array, script
from echelon.runs import Run
from echelon.submit import commands, modes
from echelon.submit.modes import Way
from echelon.submit.source import Source, survey
from echelon.submit.words import Command


@dataclass(frozen=True)
class Request:
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
class Entry:
    """One command and its run."""

    command: Command
    way: Way
    config: Config

    def to_dict(self) -> dict[str, Any]:
        return {
            "file": self.command.file,
            "line": self.command.line,
            "argv": self.command.argv,
            "variables": {name: value.text for name, value in self.command.variables},
            "mode": self.way.mode,
            "why": self.way.why,
            "program": self.config.program,
            "run": self.config.run.name,
        }


@dataclass(frozen=True)
class Job:
    """What is one call of sbatch's: a run, or an array of runs that are alike."""

    configs: Sequence[Config]
    script: str
    array: array.Array | None


@dataclass(frozen=True)
class Submission:
    name: str
    folder: Path
    """Of the code as it was; where there is one command only, its run's folder too."""
    entries: tuple[Entry, ...]
    source: Source
    environment: EnvPlan | None
    build: str
    where: str
    """The environment is kept: cache or source."""

    @property
    def kind(self) -> str:
        return self.entries[0].config.launch.kind

    @property
    def copy(self) -> Path:
        return self.folder / "source"

    @property
    def configs(self) -> list[Config]:
        return [entry.config for entry in self.entries]

    @property
    def runs(self) -> list[Run]:
        return [Run.of(config) for config in self.configs]

    def enter(self) -> list[str]:
        """Lines of the shell that make and enter the environment."""
        if self.environment is None:
            return []
        made = [] if self.build == "login" else [self._building(self.environment)]
        folder = self.environment.folder
        key, marker = f'"key": "{self.environment.key}"', shlex.quote(str(folder / MARKER))
        told = shlex.quote(f"error: {folder} is not what this was submitted with; submit it again")
        there = f"grep -qsF '{key}' {marker} || {{ echo {told} >&2; fail 1; }}"
        return [*made, *activation(self.environment), there]

    def _building(self, environment: EnvPlan) -> str:
        cache = shlex.quote(str(environment.folder.parents[1]))  # as seen from here
        words = ["-m", "echelon", "env", "build", "--source", str(self.copy), "--where", "cache"]
        python = script.python(self.configs[0])
        return f"ECHELON_CACHE={cache} {python} {shlex.join(words)} || fail $?"

    def from_copy(self, env: Mapping[str, str]) -> Submission:
        """With the environment that the copy asks for: what is edited while it is built gets
        neither into it nor under its key."""
        if self.environment is None:
            return self
        source = self.source.folder
        found = plan_environment(self.copy, where=self.where, environ=env, beside=source)
        return replace(self, environment=found)

    def jobs(self) -> list[Job]:
        """Of one shape each, so that Slurm can take them together."""
        if self.kind != "slurm":
            return []
        scene = script.Scene(self.copy, tuple(self.enter()))
        found = []
        for alike in _alike(self.configs):
            if len(alike) == 1 or array.max_size(os.environ) <= 1:
                found += [Job([c], script.render(c, Run.of(c), scene), None) for c in alike]
            else:
                arrays = array.arrays(alike, scene)
                found += [Job(each.configs, each.script, each) for each in arrays]
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "folder": str(self.folder),
            "launch": self.kind,
            "commands": [entry.to_dict() for entry in self.entries],
            "environment": self.environment.to_dict() if self.environment else None,
            "build": self.build if self.environment else None,
            "source": self.source.to_dict(),
        }


def _alike(configs: Sequence[Config]) -> Iterator[list[Config]]:
    """The first of each shape decides where its group stands."""
    shapes = [(config.launch, config.mode) for config in configs]
    order = [shapes.index(shape) for shape in shapes]
    for _, group in groupby(sorted(range(len(configs)), key=order.__getitem__), order.__getitem__):
        yield [configs[at] for at in group]


# --- from what was typed ---


def plan(request: Request, defaults: Defaults, env: Mapping[str, str]) -> Submission:
    source = request.source or Path()
    file = request.configs or source / commands.DEFAULT_FILE
    read = commands.read(file)
    config = _composed(request, defaults, read[0])
    place = Path(config.run.dir).absolute()
    surveyed = survey(source, place, request.links, config.launch.secrets)
    visible = visible_count(env) if config.launch.kind == "local" else 0
    chosen = config.mode if "mode" in _keys(request) else None
    entries = _entries(read, config, chosen, surveyed.folder, visible)
    name = _name(request.name or config.run.name, file, read)
    environment = _environment(request, surveyed.folder, env)
    return Submission(
        name,
        place / name,
        _named(entries, name, place),
        surveyed,
        environment,
        request.build,
        request.env,
    )


def _composed(request: Request, defaults: Defaults, first: Command) -> Config:
    words = [] if "launch" in _keys(request) else ["launch=slurm"]
    config = compose([*words, *request.overrides], program=first.argv, defaults=defaults)
    if config.launch.kind not in ("slurm", "local"):
        raise EchelonError(
            Fault(
                f"launch={config.launch.kind}: commands are submitted to Slurm, or run here",
                "leave it out for launch=slurm, or say launch=local",
            )
        )
    asked_for = "launch.max_requeues" in (*_keys(request), *defaults.launch)
    if request.requeue or asked_for or config.launch.kind != "slurm":
        return config
    return replace(config, launch=replace(config.launch, max_requeues=0))


def _keys(request: Request) -> list[str]:
    """What was set by typing it."""
    return [word.partition("=")[0] for word in request.overrides]


def _entries(
    read: Sequence[Command], config: Config, chosen: str | None, source: Path, visible: int
) -> list[Entry]:
    entries: list[Entry] = []
    faults: list[Fault] = []
    for command in read:
        try:
            way = modes.see(command, config, chosen, source, visible)
            faults += [*_unasked_variables(command, way), *_secrets(command)]
            own = modes.with_way(config, command, way)
            faults += faults_of(own)
            entries.append(Entry(command, way, own))
        except EchelonError as error:
            faults += error.faults
    if faults:
        raise EchelonError(*dict.fromkeys(faults))
    return entries


def _unasked_variables(command: Command, way: Way) -> Iterator[Fault]:
    words = (*way.words, *(value for _, value in command.variables))
    for word in words if not command.expand else ():
        if word.shell is not None:
            yield Fault(
                f"{command.file}:{word.line}: {word.text} has a variable in it, and nothing says "
                "who is to fill it in",
                "the job's shell: write the line `# echelon: expand` above; nobody: put it into "
                "single quotes",
            )


def _secrets(command: Command) -> Iterator[Fault]:
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


def _name(typed: str | None, file: Path, read: Sequence[Command]) -> str:
    if typed is not None:
        if fault := name_fault(typed):
            raise EchelonError(fault)
        return typed
    return runs.new_name([str(file.with_suffix(".sh"))] if len(read) > 1 else read[0].argv)


def _named(entries: Sequence[Entry], name: str, place: Path) -> tuple[Entry, ...]:
    def own(number: int) -> str:
        return name if len(entries) == 1 else f"{name}-{number}"

    def config(number: int, old: Config) -> Config:
        return replace(old, run=replace(old.run, name=own(number), dir=str(place)))

    return tuple(replace(e, config=config(i, e.config)) for i, e in enumerate(entries))


def _environment(request: Request, source: Path, env: Mapping[str, str]) -> EnvPlan | None:
    if request.env == "none":
        return None
    if request.env == "source" and request.build == "job":
        raise EchelonError(
            Fault(
                "--env source is made in the source folder, which a job does not see as it was",
                "leave out --build job, or --env source",
            )
        )
    found = plan_environment(source, where=request.env, environ=env)
    return found if found.kind != "none" else None

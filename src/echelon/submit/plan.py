"""A submission before it happens: which commands, how, in which environment, from which code."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from echelon import runs
from echelon.config.check import faults_of, name_fault
from echelon.config.compose import compose
from echelon.config.defaults import Defaults
from echelon.config.schema import Config
from echelon.envs import EnvPlan, activation
from echelon.envs import plan as plan_environment
from echelon.envs.places import MARKER
from echelon.errors import EchelonError, Fault, nearest
from echelon.gpus import visible_count
from echelon.launch.plan import columns
from echelon.launch.slurm import array, script
from echelon.runs import Run
from echelon.submit import commands, modes
from echelon.submit.commands import Command
from echelon.submit.modes import Way
from echelon.submit.source import Source, survey

PLACES = ("cache", "source", "none")


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
        return [Run(Path(c.run.dir) / str(c.run.name)) for c in self.configs]

    def enter(self) -> list[str]:
        """Lines of the shell that make and enter the environment."""
        if self.environment is None:
            return []
        made = [] if self.build == "login" else [_building(self.copy)]
        whole = shlex.quote(str(self.environment.folder / MARKER))
        there = f"[ -e {whole} ] || {{ echo error: there is no {whole} >&2; fail 1; }}"
        return [*made, there, *activation(self.environment)]

    def jobs(self) -> list[Job]:
        """Of one shape each, so that Slurm can take them together."""
        scene = script.Scene(self.copy, tuple(self.enter()))
        found = []
        for alike in _alike(self.configs):
            if len(alike) == 1:
                run = Run(Path(alike[0].run.dir) / str(alike[0].run.name))
                found.append(Job(alike, script.render(alike[0], run, scene), None))
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


def _building(source: Path) -> str:
    words = ["-m", "echelon", "env", "build", "--source", str(source), "--where", "cache"]
    return f"{shlex.quote(sys.executable)} {shlex.join(words)} || fail $?"


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
    surveyed = survey(source, place, request.links)
    visible = visible_count(env) if config.launch.kind == "local" else 0
    entries = _entries(read, config, _said(request, "mode"), surveyed.folder, visible)
    name = _name(request, file, read)
    environment = _environment(request, surveyed.folder, env)
    submission = Submission(
        name,
        place / name,
        _named(entries, name, place),
        surveyed,
        environment,
        request.build,
    )
    _require_all_there(submission, env)
    return submission


def _composed(request: Request, defaults: Defaults, first: Command) -> Config:
    words = request.overrides
    chosen = any(word.startswith("launch=") for word in words)
    config = compose(
        [*([] if chosen else ["launch=slurm"]), *words], program=first.argv, defaults=defaults
    )
    if config.launch.kind not in ("slurm", "local"):
        raise EchelonError(
            Fault(
                f"launch={config.launch.kind}: commands are submitted to Slurm, or run here",
                "leave it out for launch=slurm, or say launch=local",
            )
        )
    asked = [word.partition("=")[0] for word in words]
    asked_for = "launch.max_requeues" in (*asked, *defaults.launch)
    if request.requeue or asked_for or config.launch.kind != "slurm":
        return config
    return replace(config, launch=replace(config.launch, max_requeues=0))


def _said(request: Request, key: str) -> str | None:
    """The value that was typed for a setting."""
    said = [word.partition("=")[2] for word in request.overrides if word.startswith(f"{key}=")]
    return said[-1] if said else None


def _entries(
    read: Sequence[Command], config: Config, chosen: str | None, source: Path, visible: int
) -> list[Entry]:
    entries: list[Entry] = []
    faults: list[Fault] = []
    for command in read:
        try:
            way = modes.see(command, config, chosen, source, visible)
            faults += _unasked_variables(command, way)
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


def _name(request: Request, file: Path, read: Sequence[Command]) -> str:
    typed = request.name or _said(request, "run.name")
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
    if request.env not in PLACES:
        raise EchelonError(
            Fault(f"--env {request.env}: there is no such place", nearest(request.env, PLACES))
        )
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


# --- what would fail only in the job ---


def _require_all_there(submission: Submission, env: Mapping[str, str]) -> None:
    faults = [
        fault
        for entry in submission.entries
        for fault in (*_program_faults(entry, submission, env), *_data_faults(entry, submission))
    ]
    if faults:
        raise EchelonError(*dict.fromkeys(faults))


def _program_faults(entry: Entry, s: Submission, env: Mapping[str, str]) -> Iterator[Fault]:
    program, *arguments = entry.way.words
    where = f"{entry.command.file}:{program.line}"
    if program.shell is None and "/" in program.text:
        if not shutil.which(s.source.folder / program.text):
            yield Fault(f"{where}: {program.text} is no program", "mend the path, or chmod +x it")
    elif program.shell is None and not _found(program.text, entry, s, env):
        hint = "mend the name, or say how the job finds it with launch.setup"
        yield Fault(f"{where}: there is no program {program.text}", hint)
    script = arguments[0] if arguments else program
    is_python = program.text.rpartition("/")[2].startswith("python")
    names_script = script.shell is None and script.text.endswith(".py")
    if is_python and names_script and not (s.source.folder / script.text).exists():
        known = [name for name in s.source.files if name.endswith(".py")]
        hint = nearest(script.text, known) if known else "name the folder with --source DIR"
        yield Fault(f"{where}: {script.text} is not in {s.source.folder}", hint)


def _found(program: str, entry: Entry, s: Submission, env: Mapping[str, str]) -> bool:
    """Where the environment is not there yet, or lines of the job's add to the PATH, nobody can
    tell."""
    if entry.config.launch.setup or (s.environment and not s.environment.ready):
        return True
    folders = [f"{s.environment.folder}/bin"] if s.environment else []
    own = next((v.text for n, v in entry.command.variables if n == "PATH"), env.get("PATH", ""))
    return shutil.which(program, path=":".join([*folders, own])) is not None


def _data_faults(entry: Entry, s: Submission) -> Iterator[Fault]:
    """A path that is there now, and will not be where the job runs."""
    missing = set(s.source.left_out)
    for word in entry.command.words:
        path = os.path.normpath(word.text.rpartition("=")[2])
        top = path.partition("/")[0]
        if top in missing and (s.source.folder / path).exists():
            yield Fault(
                f"{entry.command.file}:{word.line}: {path} is in the source folder, but git "
                "ignores it, so that it is not copied",
                f"add --link {top} to have it linked to, or give an absolute path",
            )


# --- how it looks ---


def show(submission: Submission, jobs: Sequence[Job], as_json: bool) -> None:
    if as_json:
        texts = [{"runs": [c.run.name for c in job.configs], "script": job.script} for job in jobs]
        print(json.dumps(submission.to_dict() | {"jobs": texts}, indent=2))
    else:
        print("\n".join(_lines(submission, jobs)))


def _lines(s: Submission, jobs: Sequence[Job]) -> Iterator[str]:
    count = len(s.entries)
    yield f"{count} command{'s' * (count > 1)} of {s.entries[0].command.file}, launch={s.kind}"
    yield from columns([("line", "run", "mode", "command"), *map(_row, s.entries)])
    yield from ("", *_reasons(s.entries))
    yield from ("", *_source_lines(s), *_environment_lines(s))
    for job in jobs:
        array = f" of an array of {len(job.configs)}" if job.array else ""
        yield from ("", f"script{array}:", *(f"  {line}" for line in job.script.splitlines()))


def _row(entry: Entry) -> tuple[str, ...]:
    return (
        str(entry.command.line),
        str(entry.config.run.name),
        entry.way.mode,
        exact([f"{n}={v.text}" for n, v in entry.command.variables] + entry.command.argv),
    )


def exact(words: Sequence[str]) -> str:
    """On one line, every word told from the next."""
    joined = shlex.join(words)
    return joined if joined.isprintable() else json.dumps(list(words), ensure_ascii=False)


def _reasons(entries: Sequence[Entry]) -> Iterator[str]:
    ways: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        ways.setdefault((entry.way.mode, entry.way.why), []).append(str(entry.command.line))
    for (mode, why), lines in ways.items():
        shown = ", ".join(lines[:8]) + ", …" * (len(lines) > 8)
        yield f"mode={mode}: {why} (line{'s' * (len(lines) > 1)} {shown})"


def _source_lines(s: Submission) -> Iterator[str]:
    commit = f"commit {s.source.commit[:12]}, " if s.source.commit else ""
    size = f"{len(s.source.files)} files, {s.source.size / 1e6:.3g} MB"
    yield f"source: {s.source.folder} ({commit}{size}), copied to {s.copy}"
    if s.source.links:
        yield f"  linked to: {', '.join(s.source.links)}"
    if s.source.left_out:
        yield f"  stays behind: {', '.join(s.source.left_out)} (--link NAME links to one)"


def _environment_lines(s: Submission) -> Iterator[str]:
    if s.environment is None:
        yield "environment: that of this shell; no requirements.txt, Pipfile or the like is used"
        return
    e = s.environment
    ready = (
        "ready" if e.ready else "is built " + ("in the job" if s.build == "job" else "first, here")
    )
    yield f"environment: {', '.join(map(str, e.files))} → {e.folder} ({e.builder}; {ready})"
    if e.ignored:
        yield f"  ignored: {', '.join(map(str, e.ignored))}"
    if not e.ready:
        yield from (f"  $ {command}" for command in e.commands)

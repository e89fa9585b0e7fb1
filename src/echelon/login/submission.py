"""Submitting runs by a login node, so that nothing is submitted twice or by half.

1. The laptop writes down what it is about to submit, under an id (`runs/.login/KEY-….json`).
2. The source, the environment and the submission follow in one ssh session; the login node carries
   out an id once (`host/submit_once.py`).
3. The copy of the run folder is made here, and the note is removed.

Killed anywhere, the same command typed again finds the note, asks what became of the id, and either
takes over the run that was queued or goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shlex
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from echelon.config.schema import Config, LaunchConfig, build_config
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.launch.launcher import read_launch_secrets
from echelon.launch.plan import LaunchPlan, LocalMachine
from echelon.launch.registry import make_launcher
from echelon.launch.slurm.batch_script import is_started_by_srun
from echelon.login.connection import (
    LoginConnection,
    LoginLostError,
    LoginTarget,
    open_connection,
    raise_faults,
)
from echelon.login.host.source_store import RUNS_FOLDER, STATE_FOLDER
from echelon.login.local_copy import create_copy, require_free_or_copy
from echelon.login.package_archive import list_required_modules, list_requirements
from echelon.login.refresh import LIST_LIMIT_S, refresh_copies
from echelon.login.source_manifest import (
    SourceManifest,
    find_source_folder,
    read_manifest,
    send_source,
)
from echelon.object_store.urls import is_url
from echelon.runs.origin import NOTES_FOLDER, RunOrigin, read_origin
from echelon.runs.process_record import identify_this_process, is_alive
from echelon.runs.run_folder import Run
from echelon.utils.files import read_json_object, write_json_atomically
from echelon.utils.text import format_count

_NOTE_KEPT_S = 86400.0


@dataclass(frozen=True)
class LoginSubmission:
    """Runs that are to be submitted by a login node."""

    target: LoginTarget
    configs: Sequence[Config]
    """As they were composed here, with names."""
    source: Path | None
    """The folder whose code they need."""
    works_alone: bool = False
    """Whether each is a command that works in a copy of the source of its own."""
    uses_environment: bool = True
    """Whether the environment that the source asks for is built."""
    extra: str = ""
    """The extra of Echelon that jobs need, such as `sweep`."""
    call: Mapping[str, Any] | None = None
    """Which function the only run calls, and with which arguments (`submission.call_function`)."""

    @property
    def needs_echelon(self) -> bool:
        """Whether jobs run Echelon with the Python of the cluster. Programs that srun itself starts
        need not even have torch, and containers have a Python of their own."""
        plain = [config for config in self.configs if not config.launch.container]
        if not plain:
            return False
        return bool(self.extra or self.call) or not all(map(is_started_by_srun, plain))

    def keep_only(self, names: Collection[str]) -> LoginSubmission:
        """Return the submission of the runs with these names."""
        return replace(self, configs=[c for c in self.configs if str(c.run.name) in names])

    @classmethod
    def from_configs(cls, configs: Sequence[Config]) -> LoginSubmission:
        """Return the submission of runs that differ in nothing of the launch."""
        launch = configs[0].launch
        if any(config.launch != launch for config in configs):
            raise EchelonError(
                Fault(
                    "the runs differ in settings of launch, and the jobs of one array are alike",
                    "type one command for each choice of launch",
                )
            )
        source = find_source_folder(configs[0])
        target = LoginTarget.from_launch(launch, (source or Path.cwd()).name or "project")
        return cls(target, configs, source)

    @property
    def runs(self) -> list[Run]:
        """The folders here."""
        return [Run.from_config(config) for config in self.configs]

    def make_remote_config(self, config: Config, root: str) -> Config:
        """Return the configuration of a run as it is on the cluster: with the paths there."""
        launch = replace(config.launch, login=None, remote_dir=None, python=None, secrets=None)
        launch = replace(launch, ssh=LaunchConfig().ssh)
        name = str(config.run.name)
        experiment = dict(config.experiment)
        file, _, function = str(experiment.get("entry") or "").rpartition(":")
        if file.endswith(".py") and self.source is not None:
            inside = Path(file).resolve().relative_to(self.source).as_posix()
            experiment["entry"] = f"{root}/{STATE_FOLDER}/code/{name}/{inside}:{function}"
        # The project and the user of wandb may stand in variables of this machine.
        wandb = config.track.wandb
        wandb = replace(
            wandb,
            project=wandb.project or os.environ.get("WANDB_PROJECT"),
            entity=wandb.entity or os.environ.get("WANDB_ENTITY"),
        )
        return replace(
            config,
            experiment=experiment,
            launch=launch,
            track=replace(config.track, wandb=wandb),
            run=replace(config.run, dir=f"{root}/{RUNS_FOLDER}"),
            trainer=replace(config.trainer, resume=self._map_snapshot(config.trainer.resume)),
        )

    def _map_snapshot(self, given: str) -> str:
        """Return where a snapshot is on the cluster, of a run that this machine has a copy of."""
        if given in ("auto", "never") or is_url(given):
            return given
        path = Path(os.path.abspath(given))
        for folder in path.parents:
            origin = read_origin(Run(folder))
            if origin is not None and origin.host == self.target.host:
                return f"{origin.folder}/{path.relative_to(folder).as_posix()}"
        return given

    def compute_key(self) -> str:
        """Return what is the same when the same command is typed again: all but generated names."""
        nameless = [replace(c, run=replace(c.run, name=None)).to_dict() for c in self.configs]
        what = [vars(self.target), str(self.source), nameless, self.call]
        text = json.dumps(what, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


# --- what was begun ---


class SubmissionNote:
    """What this machine has written down of a submission before it began.

    Each has a file of its own, so that the same command may be typed twice at once. One whose
    process is gone is taken up by the next command of the same words.
    """

    def __init__(self, submission: LoginSubmission, given_name: str | None) -> None:
        folder = Path(submission.configs[0].run.dir).absolute() / NOTES_FOLDER
        text = f"{submission.compute_key()} {given_name}"
        key = hashlib.sha256(text.encode()).hexdigest()[:24]
        self._before: dict[str, Any] = {}
        self.file = folder / f"{key}-{secrets.token_hex(4)}.json"
        for file in sorted(folder.glob(f"{key}-*.json")):
            note = read_json_object(file) or {}
            if not is_alive(note.get("process")):
                self.file, self._before = file, note
                break

    @property
    def id(self) -> str | None:
        """The id of a submission of the same command that did not come to its end."""
        found = self._before.get("id")
        return found if isinstance(found, str) and found.isalnum() else None

    @property
    def names(self) -> list[str]:
        """The names of its runs."""
        return [str(name) for name in self._before.get("names", [])]

    def write(self, submission: LoginSubmission) -> str:
        """Write down what is submitted, and return its id: that of an earlier try, or a new one."""
        note_id = self.id or secrets.token_hex(12)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        note = {
            "id": note_id,
            "names": [str(config.run.name) for config in submission.configs],
            "process": identify_this_process(),
            "time": time.time(),
            "target": vars(submission.target),
            "source": str(submission.source) if submission.source else None,
            "works_alone": submission.works_alone,
            "configs": [config.to_dict() for config in submission.configs],
        }
        write_json_atomically(self.file, note, durable=True, names_code=True)
        return note_id

    def remove(self) -> None:
        """Remove it: the submission has come to its end, or never began."""
        self.file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.file.parent.rmdir()


# --- the steps ---


def submit_by_login(configs: Sequence[Config], given_name: str | None) -> LoginSubmission:
    """Submit runs, and return the submission with the names that they have.

    `given_name` is the name that was typed, if one was: otherwise names are generated, and those of
    an earlier try are taken again.
    """
    submission, result = carry_out(LoginSubmission.from_configs(configs), given_name)
    _print_result(submission, result, sys.stdout)
    return submission


def carry_out(
    submission: LoginSubmission, given_name: str | None
) -> tuple[LoginSubmission, dict[str, Any]]:
    """Submit runs, and return the submission with the names that they have, and what the login node
    says of its jobs."""
    configs = submission.configs
    note = SubmissionNote(submission, given_name)
    if note.id is not None and len(note.names) == len(configs):
        submission = replace(submission, configs=_rename(configs, note.names))
    for run in submission.runs:
        require_free_or_copy(run, submission.target.host)
    runs_folder = Path(configs[0].run.dir).absolute()
    launch = submission.configs[0].launch
    secrets_text = render_secrets(submission.configs[0])
    manifest = read_manifest(submission.source, runs_folder, os.environ, launch.secrets)
    submission_id = note.write(submission)
    # Whether it is open what became of the id: until the login node has said so.
    is_open = note.id is not None
    try:
        with open_connection(submission.target) as connection:
            result = _find_earlier(connection, note.id)
            is_open = result is not None
            if result is None:
                python = prepare_jobs(connection, submission, manifest)
                is_open = True
                request = {"do": "submit", "id": submission_id, "digest": manifest.digest}
                mapped = [
                    submission.make_remote_config(config, connection.root).to_dict()
                    for config in submission.configs
                ]
                wanted = {
                    "configs": mapped,
                    "secrets": secrets_text,
                    "works_alone": submission.works_alone,
                    "call": submission.call,
                }
                try:
                    result = submit_request(connection, request | python, wanted)
                except LoginLostError:
                    raise
                except EchelonError:
                    is_open = False  # it was refused: nothing was queued
                    raise
            else:
                print(
                    "an earlier command, which did not come to its end, had submitted this",
                    file=sys.stderr,
                )
            submission = submission.keep_only([str(run["name"]) for run in result["runs"]])
            _adopt(connection, submission, result)
            is_open = False
    finally:
        if not is_open:
            note.remove()
    if refused := result.get("refused"):
        _print_result(submission, result, sys.stdout)
        print("Slurm has not taken the other runs:", file=sys.stderr, flush=True)
        raise_faults(submission.target.host, refused)
    return submission, result


def submit_request(
    connection: LoginConnection, request: dict[str, Any], wanted: Mapping[str, Any]
) -> dict[str, Any]:
    """Have the login node carry the submission out, and return what it says of the jobs."""
    connection.step = "submitting the job"
    result = connection.ask(request, json.dumps(wanted).encode())
    if result.get("unknown"):
        raise _make_unknown_error(connection.target.host)
    return result


def _make_unknown_error(host: str) -> LoginLostError:
    return LoginLostError(
        Fault(
            f"{host} ended the process that submitted the job, before it could say whether it did",
            "type the same command again: it finds out what became of it",
        ),
        exit=ExitCode.FAILED,
    )


def _find_earlier(connection: LoginConnection, note_id: str | None) -> dict[str, Any] | None:
    """Return what became of an earlier try of the same command; None if it submitted nothing."""
    if note_id is None:
        return None
    connection.step = "asking what became of an earlier command"
    found: dict[str, Any] | None = connection.ask({"do": "submission", "id": note_id})["result"]
    return found


def adopt_interrupted(root: Path) -> None:
    """Make copies of runs that were submitted by commands which were killed before they could.

    Where nothing was submitted, the note stays for a day: the command may be typed again.
    """
    for file in sorted((root / NOTES_FOLDER).glob("*.json")):
        note = read_json_object(file) or {}
        with contextlib.suppress(KeyError, TypeError, OSError):
            if is_alive(note["process"]):
                continue
            submission = LoginSubmission(
                LoginTarget(**note["target"]),
                [build_config(config) for config in note["configs"]],
                Path(note["source"]) if note["source"] else None,
                bool(note["works_alone"]),
            )
            with open_connection(submission.target, LIST_LIMIT_S, asks_questions=False) as opened:
                result = _find_earlier(opened, str(note["id"]))
                if result is not None:
                    _adopt(opened, submission, result)
                    print("a command that did not come to its end had submitted:", file=sys.stderr)
                    _print_result(submission, result, sys.stderr)
            if result is not None or time.time() - float(note["time"]) > _NOTE_KEPT_S:
                file.unlink()
    with contextlib.suppress(OSError):
        (root / NOTES_FOLDER).rmdir()


def prepare_jobs(
    connection: LoginConnection, submission: LoginSubmission, manifest: SourceManifest
) -> dict[str, Any]:
    """Send the source and have the Python of the jobs prepared; returns what a submission says of
    it."""
    sent = send_source(connection, manifest)
    if sent:
        print(f"sent {sent} of {manifest.describe()}", file=sys.stderr, flush=True)
    connection.step = "preparing the environment"
    launch = submission.configs[0].launch
    connection.send(
        {
            "do": "python",
            "digest": manifest.digest,
            "named": launch.python,
            "setup": launch.setup,
            "requirements": list_requirements(submission.extra) if submission.needs_echelon else [],
            "modules": list_required_modules(submission.extra) if submission.needs_echelon else [],
            "environment": submission.uses_environment and not launch.container,
        }
    )
    while True:
        message, _ = connection.receive()
        if "line" in message:
            print(f"{submission.target.host}: {message['line']}", file=sys.stderr, flush=True)
        else:
            return {"python": message["command"], "lines": message["lines"]}


def _adopt(
    connection: LoginConnection, submission: LoginSubmission, result: Mapping[str, Any]
) -> None:
    """Make the copies of the runs that were submitted, and fill them."""
    target = submission.target
    folders = {str(run["name"]): str(run["folder"]) for run in result["runs"]}
    copies = []
    for config, run in zip(submission.configs, submission.runs, strict=True):
        origin = RunOrigin(
            target.host,
            target.ssh,
            target.remote_dir,
            folders[run.name],
            target.python,
            str(submission.source or ""),
            config.to_dict(),
            submission.works_alone,
        )
        copies.append(create_copy(run, origin, config))
    if len(copies) > 1:  # by which all of them are found under the name they have in common
        listed = "".join(f"{copy.run.folder}\n" for copy in copies)
        copies[0].run.array_file.write_text(listed, encoding="utf-8", errors="surrogateescape")
    refresh_copies(connection, copies, with_logs=False)


def _print_result(submission: LoginSubmission, result: Mapping[str, Any], stream: TextIO) -> None:
    runs, host = result["runs"], submission.target.host
    if len(runs) == 1:
        run = runs[0]
        print(
            f"job {run['job']}: run {run['name']} on {host} in {run['folder']}",
            file=stream,
            flush=True,
        )
        return
    for job in sorted({str(run["job"]).partition("_")[0] for run in runs}):
        names = [run["name"] for run in runs if str(run["job"]).partition("_")[0] == job]
        print(
            f"job {job}: {len(names)} runs on {host}, {names[0]} … {names[-1]}",
            file=stream,
            flush=True,
        )


def render_secrets(config: Config) -> str:
    """Return the secrets of a configuration as the lines of the file that jobs read."""
    variables = read_launch_secrets(config, False)
    return "".join(f"{name}={value}\n" for name, value in variables.items())


def _rename(configs: Sequence[Config], names: Sequence[str]) -> list[Config]:
    return [
        replace(config, run=replace(config.run, name=name))
        for config, name in zip(configs, names, strict=True)
    ]


# --- before anything happens ---


def plan_by_login(submission: LoginSubmission, environ: Mapping[str, str]) -> LaunchPlan:
    """Return the plan of a submission, as `--dry-run` shows it. No network is used."""
    target, configs = submission.target, submission.configs
    first = configs[0]
    manifest = read_manifest(
        submission.source, Path(first.run.dir).absolute(), environ, first.launch.secrets
    )
    # The home folder there is not known: the shell of the job would put it in place of the ~.
    config = submission.make_remote_config(first, target.remote_dir)
    config = replace(config, launch=replace(config.launch, python=target.python or "python3"))
    launcher = make_launcher(config)
    plan = launcher.plan(config, LocalMachine(environ, target.host, 0))
    if faults := launcher.find_config_faults(config, plan, LocalMachine(environ, target.host, 0)):
        raise EchelonError(*faults)
    code = manifest.describe() if manifest.entries else "no code: the experiment is Echelon's own"
    count = format_count(len(configs), "run")
    steps = (
        f"log in to {target.host} with `{target.ssh}`, and send what is not there yet: {code}",
        _describe_python(submission),
        f"there, submit {count} once: {shlex.join(plan.commands[0])}",
        *plan.steps[2:],
        f"what the run writes comes back into {Run.from_config(first).folder}; its snapshots stay "
        f"on {target.host} until `echelon pull {first.run.name}`",
    )
    return replace(plan, steps=steps)


def _describe_python(submission: LoginSubmission) -> str:
    if submission.target.python is not None:
        return f"jobs use {submission.target.python}"
    has_setup = bool(submission.configs[0].launch.setup)
    found = "python3 after launch.setup" if has_setup else "the Python that is found there"
    if submission.source is None or not submission.uses_environment:
        return f"jobs use {found}"
    return (
        f"jobs use the environment that {submission.source} asks for, which is built there once by "
        f"its key; where it asks for none, {found}"
    )

"""Answers the requests of one laptop, one after another, until its connection ends.

The program that ssh starts (`login/bootstrap.py`) calls `serve`. A request is a frame with the name
of what is asked for; every answer ends with a frame that has `done` or `faults`.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.login.frames import ConnectionLostError, receive_frame, send_frame
from echelon.login.host.clean_up import clean_up_sometimes
from echelon.login.host.job_commands import run_job_command
from echelon.login.host.job_python import PythonRequest, prepare_job_python
from echelon.login.host.run_files import SentFiles, send_states
from echelon.login.host.snapshot_files import send_snapshots
from echelon.login.host.source_store import RUNS_FOLDER, SourceStore, split_chunks
from echelon.login.host.submit_once import (
    RunRequest,
    describe_faults,
    read_submission,
    submit_once,
    with_job_python,
)
from echelon.login.host.sweep_jobs import SweepSubmission
from echelon.runs.run_folder import Run
from echelon.sweep.trial_command import format_override_value

_POLL_S = 0.5
_STATES_EVERY_S = 5.0
_COMMAND_LIMIT_S = 300.0
_STEPS = {
    "source": "sending the source",
    "python": "preparing the environment",
    "submit": "submitting the job",
    "sweep": "submitting the workers",
    "preflight": "checking the nodes",
}
"""What is being done when a file cannot be written, in words for the laptop."""


def serve(requests: BinaryIO, answers: BinaryIO, root: Path, package: Path) -> None:
    """Answer until the laptop closes its side, or is gone."""
    session = HostSession(requests, answers, root, package)
    try:
        while True:
            request, data = receive_frame(requests)
            session.answer(request, data)
    except ConnectionLostError:
        return


class HostSession:
    """One connection of a laptop."""

    def __init__(self, requests: BinaryIO, answers: BinaryIO, root: Path, package: Path) -> None:
        self._requests, self._answers, self._package = requests, answers, package
        self._store = SourceStore(root)
        self._handlers: dict[str, Callable[[dict[str, Any], bytes], None]] = {
            "source": self._receive_source,
            "python": self._prepare_python,
            "submit": self._submit,
            "sweep": self._submit_sweep,
            "submission": self._tell_submission,
            "refresh": self._refresh,
            "follow": self._follow,
            "command": self._run_command,
            "preflight": self._check_nodes,
            "snapshots": self._send_snapshots,
        }

    def answer(self, request: dict[str, Any], data: bytes) -> None:
        """Answer one request; what is wrong here is an answer too."""
        try:
            self._handlers[str(request["do"])](request, data)
        except ConnectionLostError:
            raise
        except Exception as error:  # a bug of ours is shown on the laptop, where somebody reads it
            code = error.exit if isinstance(error, EchelonError) else ExitCode.FAILED
            step = _STEPS.get(str(request["do"]), str(request["do"]))
            faults = [[fault.what, fault.do] for fault in describe_faults(error, step)]
            self._send({"faults": faults, "exit": int(code)})

    def _send(self, message: dict[str, Any], data: bytes = b"") -> None:
        send_frame(self._answers, message, data)

    # --- code, environment, submission ---

    def _receive_source(self, request: dict[str, Any], _: bytes) -> None:
        """Make the tree of a manifest, of which the laptop sends what is not here."""
        store, digest = self._store, str(request["digest"])
        if not store.get_tree(digest).is_dir():
            self._send({"want": "manifest"})
            entries = json.loads(receive_frame(self._requests)[1])
            missing = store.find_missing(entries)
            self._send({"want": "files"}, json.dumps(missing).encode())
            parts: dict[str, list[bytes]] = {}
            while True:
                message, data = receive_frame(self._requests)
                if message.get("end"):
                    break
                names, sizes = message["files"], message["sizes"]
                for name, chunk in zip(names, split_chunks(sizes, data), strict=True):
                    parts.setdefault(name, []).append(chunk)
                if not message["goes_on"]:
                    for name, chunks in parts.items():
                        store.add_content(name, chunks)
                    parts = {}
            store.make_tree(digest, entries)
        store.note_use(self._package, store.get_tree(digest))
        store.link_data(store.get_tree(digest))
        self._send({"done": True, "folder": str(store.get_tree(digest))})

    def _prepare_python(self, request: dict[str, Any], _: bytes) -> None:
        wanted = PythonRequest(
            request["named"],
            tuple(request["setup"]),
            tuple(request["requirements"]),
            tuple(request["modules"]),
            bool(request["environment"]),
        )
        python = prepare_job_python(
            wanted,
            self._store.get_tree(str(request["digest"])),
            self._package,
            self._store.folder,
            lambda line: self._send({"line": line}),
        )
        self._send(
            {"done": True, "command": python.command, "lines": list(python.lines)}
            | {"described": python.described}
        )

    def _submit(self, request: dict[str, Any], data: bytes) -> None:
        wanted = json.loads(data)
        secrets = self._keep_secrets(str(request["id"]), wanted["secrets"])
        lines, works_alone = list(request["lines"]), bool(wanted["works_alone"])
        shared_lines = [] if works_alone else lines
        configs = [
            with_job_python(config, request["python"], shared_lines, secrets)
            for config in wanted["configs"]
        ]
        work_lines = lines if works_alone else None
        submission = RunRequest(
            str(request["id"]), str(request["digest"]), configs, work_lines, wanted["call"]
        )
        self._send(submit_once(self._store, submission) | {"done": True})
        clean_up_sometimes(self._store)

    def _submit_sweep(self, request: dict[str, Any], data: bytes) -> None:
        wanted = json.loads(data)
        secrets = self._keep_secrets(str(request["id"]), wanted["secrets"])
        settings = dict(wanted["settings"])
        if secrets:  # news of a sweep are sent by its workers
            settings["overrides"] = [
                *settings["overrides"],
                f"launch.secrets={format_override_value(secrets)}",
            ]
        submission = SweepSubmission(
            str(request["id"]),
            str(request["digest"]),
            self._get_run_folder(f"{self._store.root}/{RUNS_FOLDER}/{wanted['name']}").name,
            with_job_python(wanted["config"], request["python"], request["lines"], secrets),
            settings,
            str(wanted["text"]),
            int(wanted["parallel"]),
        )
        self._send(submit_once(self._store, submission) | {"done": True})
        clean_up_sometimes(self._store)

    def _keep_secrets(self, submission_id: str, text: str) -> str | None:
        """Write the secrets of a submission into a file that is its owner's alone, for the job."""
        if not text:
            return None
        file = self._store.folder / "secrets" / submission_id
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(text)
        return str(file)

    def _tell_submission(self, request: dict[str, Any], _: bytes) -> None:
        result = read_submission(self._store, str(request["id"]))
        self._send({"done": True, "result": result})

    # --- runs ---

    def _open_runs(self, data: bytes) -> list[SentFiles]:
        return [
            SentFiles(self._get_run_folder(folder), known, trials)
            for folder, known, trials in json.loads(data)
        ]

    def _get_run_folder(self, folder: str) -> Path:
        """Return the folder of a run of this project; the laptop may ask for no other one."""
        path = Path(folder)
        if path.parent != self._store.root / RUNS_FOLDER or path.name.startswith("."):
            raise EchelonError(
                Fault(
                    f"{folder} is not a run of {self._store.root}",
                    "name a run that was submitted from here",
                )
            )
        return path

    def _refresh(self, request: dict[str, Any], data: bytes) -> None:
        runs = self._open_runs(data)
        # States first: a job that ends meanwhile has written its files before it leaves the queue.
        send_states(self._answers, self._store.folder, runs)
        for each in runs:
            each.send_changes(self._answers, bool(request["logs"]))
        self._send({"done": True})
        clean_up_sometimes(self._store)

    def _follow(self, request: dict[str, Any], data: bytes) -> None:
        """Send what changes until the laptop closes its side."""
        runs = self._open_runs(data)
        next_states = 0.0
        while True:
            # States first: what a job that is over has written is all there.
            is_due = time.monotonic() >= next_states
            if is_due:
                send_states(self._answers, self._store.folder, runs)
                next_states = time.monotonic() + _STATES_EVERY_S
            changed = False
            for each in runs:
                changed = each.send_changes(self._answers, bool(request["logs"])) or changed
            if changed or is_due:
                self._send({"beat": True})  # by which the laptop knows how old its copy is
            if select.select([self._requests], [], [], _POLL_S)[0]:
                raise ConnectionLostError

    def _run_command(self, request: dict[str, Any], _: bytes) -> None:
        """Run a command of Echelon's own for runs of this project."""
        words = [str(word) for word in request["words"]]
        path = os.pathsep.join([str(self._package), str(self._package / "beside")])
        try:
            done = subprocess.run(
                [sys.executable, "-m", "echelon", *words],
                cwd=self._store.root,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=_COMMAND_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            raise EchelonError(
                Fault(
                    f"`echelon {words[0]}` did not end within {_COMMAND_LIMIT_S:g} s",
                    "log in there and look what it waits for",
                ),
                exit=ExitCode.FAILED,
            ) from None
        self._send({"done": True, "code": done.returncode, "out": done.stdout, "err": done.stderr})

    def _check_nodes(self, request: dict[str, Any], data: bytes) -> None:
        """Check the nodes of a job, in a process that has the Python of the jobs."""
        composed = json.loads(data)
        setup = [*composed["launch"]["setup"], *request["lines"]]
        config = with_job_python(composed, request["python"], request["lines"], None)
        with tempfile.NamedTemporaryFile("w", dir=self._store.folder, suffix=".json") as file:
            json.dump(config, file)
            file.flush()
            limits = ["--limit", str(request["limit"]), "--wait", str(request["wait"])]
            code, out = run_job_command(
                self._requests,
                setup,
                request["python"],
                ["preflight", "--composed", file.name, *limits],
                self._store.get_tree(str(request["digest"])),
                lambda line: self._send({"line": line}),
            )
        self._send({"done": True, "code": code}, out)

    def _send_snapshots(self, request: dict[str, Any], _: bytes) -> None:
        run = Run(self._get_run_folder(str(request["folder"])))
        send_snapshots(self._answers, run, str(request["which"]), dict(request["have"]))
        self._send({"done": True})

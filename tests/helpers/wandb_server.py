"""A stand-in for wandb's server: the part of its protocol that a run uses, on a port of its own.

There is none to install. What the real client sends is kept as it came; `answer` makes the server
ill: an HTTP status for everything, or `hang`; `then` does so once a run has been made.

Of sweeps it hands out what a test has put into `trials`; a search is none of its business.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

HANG_S = 120.0
SWEEP = "sw33p"
_ME = {"id": "1", "name": "me"}


@dataclass
class ServedRun:
    """What arrived of one run."""

    config: dict[str, Any] = field(default_factory=dict)
    history: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By the number of the line in the file that the client writes to."""
    summary: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    ends: list[dict[str, Any]] = field(default_factory=list)
    """Every `complete` it was told, with the exit code."""
    preempting: bool = False

    def rows(self) -> list[dict[str, Any]]:
        return [self.history[line] for line in sorted(self.history)]


@dataclass
class ServedSweep:
    config: str = ""
    """YAML, as a client has sent it."""
    trials: list[dict[str, Any]] = field(default_factory=list)
    """Parameters of the runs to hand out, by their numbers."""
    again: list[str] = field(default_factory=list)
    """Runs to give to the next agent that asks, once more."""
    stop: set[str] = field(default_factory=set)
    """Runs that their agents are told to stop."""
    agents: int = 0
    handed: list[str] = field(default_factory=list)
    """Every run that was given to an agent, in order."""
    beats: list[dict[str, bool]] = field(default_factory=list)
    """What agents said of their runs."""

    def commands(self, said: dict[str, bool], begun: Container[str]) -> list[dict[str, Any]]:
        self.beats.append(said)
        running = [run for run, alive in said.items() if alive]
        if running:
            stop = [run for run in running if run in self.stop and run in begun]
            return [{"type": "stop", "run_id": run} for run in stop]
        if self.again:
            return [self._run("resume", self.again.pop(0))]
        new = [f"trial{number}" for number in range(len(self.trials))]
        left = [run for run in new if run not in self.handed]
        return [self._run("run", left[0])] if left else [{"type": "exit"}]

    def _run(self, kind: str, name: str) -> dict[str, Any]:
        self.handed.append(name)
        given = self.trials[int(name.removeprefix("trial"))]
        args = {key: {"value": value} for key, value in given.items()}
        program = yaml.safe_load(self.config).get("program")
        return {"type": kind, "run_id": name, "args": args, "program": program}


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, address: str) -> None:
        super().__init__((address, port), _Handler)
        self.runs: dict[str, ServedRun] = {}
        self.sweep = ServedSweep()
        self._turn = threading.Lock()
        self.asked: list[str] = []
        self.answer: int | str = 200
        self.then: int | str = 200

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that is killed breaks off; that is none of the test's output."""

    # --- what it does ---

    def graphql(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        name = query.replace("(", " ").split()[1]
        self.asked.append(name)
        with self._turn:
            return self._answer(name, given)

    def _answer(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        match name:
            case "UpsertSweep":
                self.sweep.config = given["config"]
                project = {"id": "2", "name": given["projectName"], "entity": _ME}
                made = {"name": SWEEP, "project": project}
                return {"upsertSweep": {"sweep": made, "configValidationWarnings": []}}
            case "SweepWithRuns" | "SweepConfig":
                found = {"id": "5", "name": SWEEP, "state": "RUNNING", "config": self.sweep.config}
                return {"project": {"sweep": found | {"runs": {"edges": []}}}}
            case "CreateAgent":
                self.sweep.agents += 1
                return {"createAgent": {"agent": {"id": f"agent{self.sweep.agents}"}}}
            case "Heartbeat":
                commands = self.sweep.commands(json.loads(given["runState"]), self.runs)
                beat = {"agent": {"id": given["id"]}, "commands": json.dumps(commands)}
                return {"agentHeartbeat": beat}
            case "UpsertBucket":
                return self._upsert(given)
            case "RunResumeStatus":
                return {"model": self._resume_status(given["name"])}
            case "CreateRunFiles":
                files = [{"name": f, "uploadUrl": f"{self.url}/put/{f}"} for f in given["files"]]
                made = {"runID": given["run"], "uploadHeaders": [], "files": files}  # type: ignore[dict-item]
                return {"createRunFiles": made}
            case "Viewer":
                teams: dict[str, Any] = {"edges": []}
                who = {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": teams}
                return {"viewer": who}
            case "RunStoppedStatus":
                return {"project": {"run": {"stopped": given.get("runId") in self.sweep.stop}}}
        return {"serverInfo": {"features": []}}

    def _upsert(self, given: dict[str, Any]) -> dict[str, Any]:
        new = given["name"] not in self.runs
        run = self.runs.setdefault(given["name"], ServedRun())
        run.config.update({k: v["value"] for k, v in json.loads(given["config"] or "{}").items()})
        run.about.update({k: v for k, v in given.items() if v is not None})
        project = {"id": "2", "name": given["project"], "entity": _ME}
        bucket: dict[str, Any] = {
            "id": "3",
            "name": given["name"],
            "displayName": given["displayName"],
            "config": given["config"],
            "project": project,
            "historyLineCount": len(run.history),
        }
        return {"upsertBucket": {"bucket": bucket, "inserted": new}}

    def _resume_status(self, name: str) -> dict[str, Any] | None:
        run = self.runs.get(name)
        if run is None:
            return None
        tail = [json.dumps(row) for row in run.rows()[-1:]]
        bucket = {  # type: ignore[var-annotated]
            "id": "3",
            "name": name,
            "summaryMetrics": json.dumps(run.summary),
            "displayName": run.about.get("displayName"),
            "logLineCount": 0,
            "historyLineCount": len(run.history),
            "eventsLineCount": 0,
            "historyTail": json.dumps(tail),
            "eventsTail": "[]",
            "config": json.dumps({k: {"value": v} for k, v in run.config.items()}),
            "tags": [],
            "notes": None,
            "wandbConfig": json.dumps({"t": 1}),
        }
        return {"id": "2", "name": "p", "entity": _ME, "bucket": bucket}

    def stream(self, name: str, sent: dict[str, Any]) -> None:
        run = self.runs[name]
        files = sent.get("files") or {}
        if history := files.get("wandb-history.jsonl"):
            for number, text in enumerate(history["content"], history["offset"]):
                run.history[number] = json.loads(text)
        if summary := files.get("wandb-summary.json"):
            run.summary = json.loads(summary["content"][-1])
        run.preempting = run.preempting or bool(sent.get("preempting"))
        if sent.get("complete"):
            run.ends.append({k: v for k, v in sent.items() if k != "files"})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if self.server.answer == "hang":
            time.sleep(HANG_S)
            return
        if self.server.answer != 200:
            self._reply(int(self.server.answer), {"errors": [{"message": "ill on purpose"}]})
        elif self.path == "/graphql":
            asked = json.loads(body)
            given = asked.get("variables") or {}
            data = self.server.graphql(asked["query"], given)
            if self.server.runs:  # before the client has heard, and asks for more
                self.server.answer = self.server.then
            self._reply(200, {"data": data})
        elif self.path.endswith("/file_stream"):
            self.server.stream(self.path.split("/")[-2], json.loads(body))
            self._reply(200, {"exitcode": None, "limits": {}})
        else:
            self._reply(200, {})

    do_GET = do_PUT = do_POST

    def _reply(self, status: int, data: dict[str, Any]) -> None:
        text = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def serving(port: int = 0, address: str = "127.0.0.1") -> Iterator[Server]:
    server = Server(port, address)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()

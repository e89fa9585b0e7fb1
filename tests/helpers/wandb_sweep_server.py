"""As much of wandb's server as its agent talks to: a sweep, and a queue of trials."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CONFIG = "method: grid\nprogram: {program}\nparameters: {{}}\n"


class Sweep(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: str, program: str, trials: list[dict[str, Any]]) -> None:
        super().__init__((address, 0), _Handler)
        self.program, self.waiting = program, list(trials)
        self.heard: list[str] = []
        """The operations, in order."""

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}"

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        if operation == "CreateAgent":
            return {"createAgent": {"agent": {"id": "agent"}}}
        if operation == "Heartbeat":
            at_work = variables.get("runState", "{}") != "{}"
            commands = json.dumps([] if at_work else [self._next()])
            return {"agentHeartbeat": {"agent": {"id": "agent"}, "commands": commands}}
        viewer = {"id": "u", "entity": "me", "username": "me", "email": "", "admin": False}
        viewer |= {"flags": "{}", "teams": {"edges": []}, "name": "me", "apiKeys": None}
        sweep: dict[str, object] = {
            "id": "s",
            "name": "s",
            "config": CONFIG.format(program=self.program),
        }
        sweep |= {"state": "RUNNING", "method": "grid", "runs": {"edges": []}}
        return {"viewer": viewer, "project": {"sweep": sweep}, "serverInfo": None}

    def _next(self) -> dict[str, Any]:
        if not self.waiting:
            return {"type": "exit"}
        values = {key: {"value": value} for key, value in self.waiting.pop(0).items()}
        run = f"trial{len(self.heard)}"
        return {"type": "run", "run_id": run, "program": self.program, "args": values}


class _Handler(BaseHTTPRequestHandler):
    server: Sweep

    def do_POST(self) -> None:
        body, data = self.rfile.read(int(self.headers["Content-Length"])), b"{}"
        if self.path == "/graphql":
            asked = json.loads(body)
            names = str(asked["query"]).replace("(", " ").replace("{", " ").split()
            self.server.heard.append(names[1])
            answer = self.server.answer(names[1], asked.get("variables") or {})
            data = json.dumps({"data": answer}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(address: str, program: str, trials: list[dict[str, Any]]) -> Iterator[Sweep]:
    server = Sweep(address, program, trials)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()

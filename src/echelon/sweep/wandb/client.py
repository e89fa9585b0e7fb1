"""The requests of an agent to wandb's server, each sent once.

wandb's own client retries silently for minutes. The server may hand out a trial in an answer to an
agent that has given up waiting: nobody would read that answer, and the trial would be lost.
"""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

import yaml

from echelon.errors import EchelonError, ExitCode, Fault

_TIMEOUT_S = 10.0
_MAX_ANSWER_BYTES = 4 * 1024 * 1024

_CREATE_AGENT_MUTATION = """mutation CreateAgent($host: String!, $projectName: String,
$entityName: String, $sweep: String!) { createAgent(input: {host: $host, projectName: $projectName,
entityName: $entityName, sweep: $sweep}) { agent { id } } }"""
_HEARTBEAT_MUTATION = """mutation Heartbeat($id: ID!, $metrics: JSONString, $runState: JSONString) {
agentHeartbeat(input: {id: $id, metrics: $metrics, runState: $runState}) {
agent { id } commands } }"""
_SWEEP_QUERY = """query SweepConfig($entity: String, $project: String, $sweep: String!) {
project(name: $project, entityName: $entity) { sweep(sweepName: $sweep) { id config } } }"""
_VIEWER_QUERY = "query Viewer { viewer { id entity } }"


class ServerUnavailableError(Exception):
    """The server did not answer, or answered that it cannot now."""


@dataclass(frozen=True)
class WandbServer:
    """A server of wandb and the key of a user. Every method is one request.

    They raise ServerUnavailableError if it may be sent again, else EchelonError.
    """

    url: str
    key: str = field(repr=False)

    def query_user(self) -> str:
        """Return the default entity of the user that the key belongs to."""
        return str((self._query(_VIEWER_QUERY, {}).get("viewer") or {}).get("entity") or "")

    def register_agent(self, host: str, sweep: str) -> str:
        """Register an agent for a sweep ENTITY/PROJECT/SWEEP, and return its id."""
        entity, project, name = sweep.split("/")
        variables = {"host": host, "entityName": entity, "projectName": project, "sweep": name}
        return str(self._query(_CREATE_AGENT_MUTATION, variables)["createAgent"]["agent"]["id"])

    def query_sweep_config(self, sweep: str) -> dict[str, Any]:
        """Return the configuration of a sweep ENTITY/PROJECT/SWEEP as its owner wrote it."""
        entity, project, name = sweep.split("/")
        answer = self._query(_SWEEP_QUERY, {"entity": entity, "project": project, "sweep": name})
        found = (answer.get("project") or {}).get("sweep")
        if not found:
            raise EchelonError(
                Fault(f"there is no sweep {sweep} on wandb's server", "check its name"),
                exit=ExitCode.NOT_FOUND,
            )
        try:
            config = yaml.safe_load(found["config"])
        except (yaml.YAMLError, KeyError, AttributeError) as error:
            raise ServerUnavailableError(f"its answer makes no sense: {error}") from None
        return config if isinstance(config, dict) else {}

    def send_heartbeat(self, agent_id: str, running_ids: list[str]) -> list[dict[str, Any]]:
        """Report what an agent runs, and return the commands of the server for it."""
        state = json.dumps(dict.fromkeys(running_ids, True))
        answer = self._query(
            _HEARTBEAT_MUTATION, {"id": agent_id, "metrics": "{}", "runState": state}
        )
        commands = json.loads(answer["agentHeartbeat"]["commands"])
        return [command for command in commands if isinstance(command, dict)]

    def _query(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = json.loads(self._post({"query": query, "variables": variables}))
            errors = answer.get("errors")
            if not errors:
                data: dict[str, Any] = answer["data"]
                return data
            message = str(errors[0].get("message"))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ServerUnavailableError(f"its answer makes no sense: {error}") from None
        raise EchelonError(
            Fault(f"wandb's server refuses: {message[:200]}", "look at the sweep there"),
            exit=ExitCode.FAILED,
        )

    def _post(self, body: dict[str, Any]) -> bytes:
        credentials = base64.b64encode(f"api:{self.key}".encode()).decode()
        request = urllib.request.Request(
            f"{self.url}/graphql",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Basic {credentials}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                text: bytes = answer.read(_MAX_ANSWER_BYTES + 1)
        except urllib.error.HTTPError as error:
            raise _to_error(error.code) from None
        except (OSError, http.client.HTTPException) as error:
            raise ServerUnavailableError(str(getattr(error, "reason", error))) from None
        if len(text) > _MAX_ANSWER_BYTES:
            raise EchelonError(
                Fault(
                    f"wandb's server answers with more than {_MAX_ANSWER_BYTES >> 20} MiB, and a "
                    "trial is a few numbers",
                    "look at what the sweep there sets",
                ),
                exit=ExitCode.FAILED,
            )
        return text


def _to_error(code: int) -> Exception:
    """Return the error for an HTTP status: final for the sweep, or worth another try."""
    reasons = {
        401: ("does not accept the key", "`wandb login` stores another"),
        403: ("does not give this key access to the sweep", "ask its owner, or log in as another"),
        404: ("has no such sweep any more", "start another one under another --name"),
    }
    if code not in reasons:
        return ServerUnavailableError(f"it answers {code}")
    what, do = reasons[code]
    return EchelonError(Fault(f"wandb's server {what}", do), exit=ExitCode.FAILED)

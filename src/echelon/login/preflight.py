"""`echelon preflight` by a login node, which asks Slurm for the nodes as the job would."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from echelon.config.schema import Config
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.login.connection import open_connection, raise_faults
from echelon.login.source_manifest import read_manifest
from echelon.login.submission import LoginSubmission, prepare_jobs
from echelon.preflight.check_nodes import report_node_checks
from echelon.runs.create import assign_name


def run_preflight_by_login(config: Config, as_json: bool, limit_s: float, wait_s: float) -> int:
    """Check the nodes of a job on a cluster, print the verdicts, and return the exit code."""
    submission = LoginSubmission.from_configs([assign_name(config)])
    [named], host = submission.configs, submission.target.host
    runs = Path(named.run.dir).absolute()
    manifest = read_manifest(submission.source, runs, os.environ, named.launch.secrets)
    with open_connection(submission.target) as connection:
        python = prepare_jobs(connection, submission, manifest)
        connection.step = "checking the nodes"
        remote = submission.make_remote_config(named, connection.root)
        request = {"do": "preflight", "digest": manifest.digest, "limit": limit_s, "wait": wait_s}
        connection.send(request | python, json.dumps(remote.to_dict()).encode())
        while True:
            message, data = connection.receive()
            if message.get("done"):
                break
            print(message["line"], file=sys.stderr, flush=True)
    try:
        document = json.loads(data)
    except ValueError:
        if message["code"]:  # what it said of that is on the screen
            return int(message["code"])
        raise EchelonError(
            Fault(f"`echelon preflight` printed no result on {host}", "type it on that machine"),
            exit=ExitCode.FAILED,
        ) from None
    raise_faults(host, document)
    return report_node_checks(document, config.run.name, as_json)

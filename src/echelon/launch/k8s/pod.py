"""`echelon pod`: this pod as one node of a run of launch=k8s, as its Job has started it.

The same agent as everywhere takes part in the run: its number is the pod's index in the Job, and
the key is in the environment, from the Secret.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from echelon.config.schema import Config, build_config
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.gpus import count_visible_gpus
from echelon.launch.env_launcher import agree_on_run, read_node_variables
from echelon.launch.launcher import Launcher
from echelon.launch.node.service import make_network_variables, make_thread_variables, run_node
from echelon.launch.plan import NodeSpec, count_local_processes
from echelon.launch.registry import make_launcher
from echelon.runs.create import create_run
from echelon.runs.run_folder import Run
from echelon.runs.writer import claim_run_folder
from echelon.utils.os_errors import format_os_error_reason
from echelon.world.sealed_store import SealedStore

_INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
"""Kubernetes sets it in the pods of an Indexed Job."""
_START_KEY = "k8s_start"
"""In status.json: which start of the run its pods are of."""
_POLL_S = 0.5


def run_pod(file: str) -> int:
    """Be the node that this pod is; returns the exit code of the run. `file` has the configuration,
    from the ConfigMap."""
    config, start = _read_start(Path(file))
    os.environ.setdefault("NODE_RANK", os.environ.get(_INDEX_VARIABLE, ""))
    rank, total, host, port = read_node_variables(os.environ)
    _wait_for_name(host, config.launch.join_timeout_s)
    procs = count_local_processes(config, count_visible_gpus(os.environ))
    os.environ |= make_thread_variables(config, procs, os.environ)
    os.environ |= make_network_variables(config, host, os.environ)
    # A run needs all of its pods: with fewer it saves and ends, and Kubernetes starts them again.
    of_node = replace(config, launch=replace(config.launch, min_nodes=total))
    node = NodeSpec(rank, total, procs, host, port)
    launcher: Launcher = make_launcher(config)
    return run_node(launcher, of_node, node, partial(_agree_on_run, config, start, node))


def _read_start(file: Path) -> tuple[Config, str]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        return build_config(document["config"]), str(document["start"])
    except OSError as error:
        reason = format_os_error_reason(error)
    except (ValueError, KeyError, TypeError):
        reason = "it is not what launch=k8s writes"
    raise EchelonError(
        Fault(
            f"{file} cannot be read: {reason}",
            "pods of launch=k8s call this, with the file of their ConfigMap",
        ),
        exit=ExitCode.NOT_FOUND,
    )


def _wait_for_name(host: str, limit_s: float) -> None:
    """Wait until the name of node 0 leads to an address: the DNS of the cluster knows it only some
    time after its pod was made."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise EchelonError(
                    Fault(
                        f"the name of node 0, {host}, has no address after {limit_s:g} s: "
                        f"{format_os_error_reason(error)}",
                        "see `kubectl get pods`: all pods of the run have to be running",
                    ),
                    exit=ExitCode.RENDEZVOUS,
                ) from None
        time.sleep(_POLL_S)


def _agree_on_run(
    config: Config,
    start: str,
    node: NodeSpec,
    store: SealedStore,
    wait_for_key: Callable[[str], str],
) -> Run:
    """Return the run. Node 0 makes its folder, or takes it up where its pods were made again."""
    return agree_on_run(config, node, partial(_open_run, config, start), store, wait_for_key)


def _open_run(config: Config, start: str) -> Run:
    run = Run.from_config(config)
    if run.config_file.exists() and run.read_status_file().get(_START_KEY) == start:
        # Its status says how the pods before ended, which decides whether another start is in vain.
        claim_run_folder(run)
        return run
    run = create_run(config)
    run.update_status(**{_START_KEY: start, "starts": []})
    return run

"""launch=ssh: plain hosts, an agent on each, for as long as this process lives."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from echelon import runs
from echelon.config.schema import Config
from echelon.errors import EchelonError, Exit
from echelon.launch import interface
from echelon.launch.node import variables
from echelon.launch.plan import Here, Place, Plan, on_failure, places, processes_for, what_runs
from echelon.launch.process import launched
from echelon.launch.ssh import remote, sessions, shipping, survey
from echelon.launch.ssh.hosts import Host, listed
from echelon.runs import Run


def plan(config: Config, here: Here) -> Plan:
    hosts, run = listed(config.launch), _run(config)
    remote.carried(here.env, config.launch.carry)
    commands = tuple(_command(config, hosts, node, run) for node in range(len(hosts)))
    return Plan(
        "ssh",
        _places(config, hosts),
        variables(config, max(h.procs or 1 for h in hosts), here.env)
        | interface.planned(config.launch.interface, here.env),
        (
            f"ask all {len(hosts)} hosts at once: can they be reached, are Python, torch and "
            f"echelon the same, which devices are there, is {run.folder} shared",
            f"where it is not, send {shipping.code_folder(config) or 'the configuration'} there, "
            "and bring back what the run made",
            *map(shlex.join, commands),
            f"on each host {_how_many(hosts, config.replica.devices)}: {what_runs(config)}",
            on_failure(config),
        ),
        commands,
    )


def _how_many(hosts: list[Host], each: int) -> str:
    if all(host.procs for host in hosts):
        return "as many processes as planned"
    return f"one process for {'each visible device' if each == 1 else f'every {each} devices'}"


def _run(config: Config) -> Run:
    assert config.run.name is not None
    return Run(Path(config.run.dir).absolute() / config.run.name)


def _places(config: Config, hosts: list[Host]) -> tuple[Place, ...]:
    """Where the number of devices decides, and nobody was asked yet, a host is one line."""
    if config.program and config.mode == "plain":
        hosts = [host._replace(procs=1) for host in hosts]
    names = [host.name for host in hosts]
    each = config.replica.devices
    found = places(names, [host.procs or 1 for host in hosts], 0, each)
    known = {host.name: host.procs for host in hosts}
    return tuple(
        place._replace(devices=_cuda_or(place.devices, place.local_rank * each))
        if known[place.host]
        else place._replace(devices=("every visible",))
        for place in found
    )


def _cuda_or(stages: tuple[str, ...], first: int) -> tuple[str, ...]:
    return tuple(f"cuda:{first + i} or {stage}" for i, stage in enumerate(stages))


def _command(config: Config, hosts: list[Host], node: int, run: Run) -> tuple[str, ...]:
    procs = hosts[node].procs
    words = [sys.executable, "-m", "echelon", "node", "--tether", "--nodes", str(len(hosts))]
    words += ["--node-rank", str(node), *(["--procs", str(procs)] if procs else [])]
    where = (str(run.code(node)), os.getcwd())
    return tuple(remote.argv(config.launch, hosts[node].name, where, [*words, str(run.folder)]))


def carry_out(config: Config, plan: Plan) -> int:
    remote.require_ssh(config.launch)
    hosts, run = listed(config.launch), _run(config)
    carried = remote.carried(os.environ, config.launch.carry)
    first = remote.first_line(carried)
    reports = survey.ask(config, hosts, run, carried)
    apart = [
        shipping.There(config.launch, host.name, node, run, first)
        for node, (host, report) in enumerate(zip(hosts, reports, strict=True))
        if not report.shared
    ]
    code = shipping.code_files(config, run) if apart else {}
    new = config.trainer.resume == "never" or not run.config_file.exists()
    runs.create(config)
    names = [host.name for host in hosts]
    each = config.replica.devices
    world = sum(
        host.procs or processes_for(r.devices, each) for host, r in zip(hosts, reports, strict=True)
    )
    run.update_status(**launched("ssh", len(hosts), world), hosts=names)
    _send(run, apart, code, new)
    outcome = sessions.Watch(sessions.start(names, plan.commands, first)).keep()
    missing = {there.host: shipping.fetch(there) for there in apart}
    return _tell(run, outcome, missing)


def _send(run: Run, apart: list[shipping.There], code: Mapping[str, Path], new: bool) -> None:
    with ThreadPoolExecutor(max(1, len(apart))) as pool:
        if new:
            suffix = time.strftime("%Y%m%d-%H%M%S")
            list(pool.map(lambda there: shipping.set_aside(there, suffix), apart))
        faults = [f for f in pool.map(lambda there: shipping.send(there, code), apart) if f]
    if faults:
        run.update_status(state="failed")
        raise EchelonError(*faults)


def _tell(run: Run, outcome: sessions.Outcome, missing: dict[str, str]) -> int:
    """The status says the same as the exit code, whoever wrote it last; the cause comes last."""
    code = outcome.code
    states: dict[int, str] = {Exit.OK: "finished", Exit.PREEMPTED: "preempted"}
    run.update_status(state=states.get(code, "failed"), failure=outcome.failure)
    for host, why in missing.items():
        if why:
            code = code or Exit.FAILED
            print(
                f"error: {run.folder} on {host} could not be brought here: {why}", file=sys.stderr
            )
    if outcome.cause:
        print(outcome.cause, file=sys.stderr)
    return code

"""launch=ssh: plain hosts, an agent on each, for as long as this process lives."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from echelon.config.schema import Config
from echelon.config.validate import check_min_batch_size, check_node_counts, find_size_faults
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.hosts.ssh import require_ssh
from echelon.launch import network_interface
from echelon.launch.containers.command import describe_container, pin_runtime
from echelon.launch.launcher import (
    Launcher,
    LaunchServices,
    read_launch_secrets,
    require_no_writer,
    require_preflight,
)
from echelon.launch.node.service import make_thread_variables
from echelon.launch.plan import (
    LaunchPlan,
    LocalMachine,
    NodeSpec,
    ProbeCommand,
    ProbeExit,
    ProbePlan,
    RankPlacement,
    describe_failure_policy,
    describe_node_policy,
    describe_program_or_experiment,
    place_ranks,
)
from echelon.launch.ssh import file_transfer, host_check, remote_command, sessions
from echelon.launch.ssh.host_list import SshHost, list_hosts
from echelon.launch.ssh.own_address import find_reached_address
from echelon.notify.news_process import start_news
from echelon.runs.create import assign_name, create_run
from echelon.runs.process_record import make_starting_status
from echelon.runs.run_folder import Run
from echelon.runs.writer import release_run_folder, start_writer_beats
from echelon.world.device_fit import get_default_process_count
from echelon.world.network_key import KEY_VARIABLE, make_key


class SshLauncher(Launcher):
    """Runs an agent on each host, through an ssh session that lasts as long as this process."""

    name = "ssh"
    has_compared_devices = True
    command_holds_folder = True

    def complete_config(self, config: Config, dry_run: bool) -> Config:
        """Name the run, and add the secrets to the variables that are sent to the hosts."""
        config = assign_name(config)
        secrets = read_launch_secrets(config, dry_run)
        os.environ.update(secrets)
        carry = [*config.launch.carry, *secrets]
        return pin_runtime(replace(config, launch=replace(config.launch, carry=carry)))

    def plan(self, config: Config, machine: LocalMachine) -> LaunchPlan:
        hosts, run = list_hosts(config.launch), _resolve_run(config)
        if faults := [*check_node_counts(config.launch, len(hosts))]:
            raise EchelonError(*faults)
        remote_command.select_variables(machine.env, config.launch.carry)
        commands = tuple(_make_node_command(config, hosts, node, run) for node in range(len(hosts)))
        training = hosts[: len(hosts) - config.launch.spares]
        code_folder = file_transfer.find_code_folder(config)
        how_many = _describe_process_count(hosts, config.replica.devices)
        return LaunchPlan(
            self.name,
            _place_ranks(config, training),
            make_thread_variables(config, max(h.procs or 1 for h in hosts), machine.env)
            | network_interface.plan_interface_variables(config.launch.interface, machine.env),
            (
                f"ask all {len(hosts)} hosts at once: can they be reached, are Python, torch and "
                f"echelon the same, which devices are there, is {run.folder} shared",
                f"where it is not, send {code_folder or 'the configuration'} there, and bring back "
                "what the run made",
                *describe_container(config),
                *map(shlex.join, commands),
                f"on each host {how_many}: {describe_program_or_experiment(config)}",
                describe_failure_policy(config, sum(h.procs or 1 for h in training)),
                *describe_node_policy(config, len(training)),
            ),
            commands,
        )

    def find_config_faults(
        self, config: Config, plan: LaunchPlan, machine: LocalMachine
    ) -> list[Fault]:
        """Without their number of processes, hosts are asked before it is known whether shards
        divide them; then there is at least one on each."""
        if all(host.procs for host in list_hosts(config.launch)):
            return super().find_config_faults(config, plan, machine)
        fault = check_min_batch_size(config.trainer.batch_size, len(plan.places))
        return [fault] if fault and not config.program else []

    def check_trackers(self, config: Config, plan: LaunchPlan, machine: LocalMachine) -> None:
        """Trackers run on the first host, where other packages may be installed."""

    def check(self, config: Config, plan: LaunchPlan, services: LaunchServices) -> None:
        require_no_writer(config)
        require_preflight(config, services)

    def start(self, config: Config, plan: LaunchPlan, services: LaunchServices) -> int:
        """Check the hosts, send what they lack, run an agent on each, and bring back what was made.

        The hosts are asked here and not in `check`, because what they answer is needed here.
        """
        # Forked for a trial of a sweep, this process has the stop signals blocked. Nothing here
        # waits for them before the sessions are open.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGUSR2))
        require_ssh(config.launch.ssh, "launch.ssh")
        hosts, run = list_hosts(config.launch), _resolve_run(config)
        carried = remote_command.select_variables(os.environ, config.launch.carry)
        first_line = remote_command.encode_variables(carried)
        reports = host_check.check_hosts(config, hosts, run, carried)
        nodes = len(hosts) - config.launch.spares
        world = sum(
            host.procs or get_default_process_count(report.devices, config.replica.devices)
            for host, report in list(zip(hosts, reports, strict=True))[:nodes]
        )
        if faults := find_size_faults(config, world):
            raise EchelonError(*faults)
        separate_hosts = [
            file_transfer.RemoteRunFolder(config.launch, host.name, node, run, first_line)
            for node, (host, report) in enumerate(zip(hosts, reports, strict=True))
            if not report.shared
        ]
        code = file_transfer.list_code_files(config, run) if separate_hosts else {}
        new = config.trainer.resume == "never" or not run.config_file.exists()
        # Only now, after all hosts have answered: a host that is down must not leave a run behind.
        create_run(config, is_snapshot_here=False)
        run.stack_agent_file.unlink(missing_ok=True)  # node 0 writes it here, if it shares this
        news = start_news(run, config)
        try:
            names = [host.name for host in hosts]
            run.update_status(**make_starting_status("ssh", nodes, world), hosts=names)
            _send_files(run, separate_hosts, code, new)
            keyed = remote_command.encode_variables(carried | {KEY_VARIABLE: make_key()})

            def start_session(host: int, node: int) -> sessions.SshSession:
                command = _make_node_command(config, hosts, host, run, node)
                return sessions.start_session(node, host, names[host], command, keyed)

            started = sessions.SshSessions(names, start_session, config.launch.silence_s)
            start_writer_beats(run)
            outcome = started.wait_for_all()
            missing = {each.host: file_transfer.fetch_results(each) for each in separate_hosts}
            return _report_outcome(run, outcome, missing)
        finally:
            if news is not None:
                news.close()
            release_run_folder(run)

    def get_max_nodes(self, node: NodeSpec) -> int:
        """As many as there are hosts."""
        return node.node_count + node.spares

    def record_node_start(self, run: Run, node_count: int, world_size: int) -> None:
        """Write nothing: the command that launched the run has written its start."""

    def plan_probes(
        self, config: Config, env: Mapping[str, str], probe: Sequence[str]
    ) -> ProbePlan:
        launch = config.launch
        require_ssh(launch.ssh, "launch.ssh")
        # Nothing was sent to the hosts yet, so the current folder may not exist there: then "/".
        hosts, folders = list_hosts(launch), (os.getcwd(), "/")
        variables = remote_command.encode_variables(
            remote_command.select_variables(env, launch.carry)
        )
        return ProbePlan(
            [host.name for host in hosts],
            [host.procs for host in hosts],
            [
                ProbeCommand(
                    remote_command.make_argv(
                        launch,
                        host.name,
                        folders,
                        host_check.wrap_for_host(config, [*probe, str(node)]),
                    ),
                    [node],
                    variables,
                )
                for node, host in enumerate(hosts)
            ],
        )

    def explain_failed_probe(self, config: Config, node_name: str, probe_exit: ProbeExit) -> Fault:
        host, (code, output) = SshHost(node_name, None), probe_exit
        return host_check.explain_ssh_failure(config, host, sys.executable, code, output)

    def suggest_after_probe_timeout(self, config: Config) -> str:
        return f"check whether `{config.launch.ssh} HOST true` ends"

    def find_own_address(self, node_count: int, env: Mapping[str, str]) -> str:
        return find_reached_address(node_count, env).strip("[]")


def _describe_process_count(hosts: list[SshHost], devices_per_replica: int) -> str:
    """Return how many processes a host gets, in words."""
    if all(host.procs for host in hosts):
        return "as many processes as planned"
    if devices_per_replica == 1:
        return "one process for each visible device"
    return f"one process for every {devices_per_replica} devices"


def _resolve_run(config: Config) -> Run:
    """Return the folder of the run, which has a name by now."""
    assert config.run.name is not None
    return Run(Path(config.run.dir).absolute() / config.run.name)


def _place_ranks(config: Config, hosts: list[SshHost]) -> tuple[RankPlacement, ...]:
    """Return where each rank will be. Where the number of devices decides, nobody was asked yet, so
    a host is one line."""
    if config.program and config.mode == "plain":
        hosts = [host._replace(procs=1) for host in hosts]
    names = [host.name for host in hosts]
    placements = place_ranks(names, [host.procs or 1 for host in hosts], 0, config)
    procs_by_host = {host.name: host.procs for host in hosts}
    placements = tuple(
        place._replace(
            devices=_name_devices(place.devices, place.local_rank * config.replica.devices)
        )
        if procs_by_host[place.host]
        else place._replace(devices=("every visible",))
        for place in placements
    )
    if all(procs_by_host.values()):
        return placements
    return tuple(place._replace(replica=None, shard=None) for place in placements)


def _name_devices(stages: tuple[str, ...], first: int) -> tuple[str, ...]:
    """Names of devices before it is known whether the host has GPUs."""
    return tuple(f"cuda:{first + i} or {stage}" for i, stage in enumerate(stages))


def _make_node_command(
    config: Config, hosts: list[SshHost], host: int, run: Run, node: int | None = None
) -> tuple[str, ...]:
    """Return the ssh command that runs an agent on a host. It has the number of the host, unless it
    is one that has come back."""
    procs, number = hosts[host].procs, host if node is None else node
    words = [sys.executable, "-m", "echelon", "node", "--tether", "--nodes", str(len(hosts))]
    words += ["--node-rank", str(number), *(["--procs", str(procs)] if procs else [])]
    folders = (str(run.get_code_folder(host)), os.getcwd())
    words = host_check.wrap_for_host(config, [*words, str(run.folder)])
    return tuple(remote_command.make_argv(config.launch, hosts[host].name, folders, words))


def _send_files(
    run: Run,
    separate_hosts: list[file_transfer.RemoteRunFolder],
    code: Mapping[str, Path],
    new: bool,
) -> None:
    """Send code and configuration to hosts that do not share the run folder; raises all faults."""
    with ThreadPoolExecutor(max(1, len(separate_hosts))) as pool:
        if new:
            suffix = time.strftime("%Y%m%d-%H%M%S")
            list(
                pool.map(
                    lambda remote: file_transfer.set_aside_old_run(remote, suffix), separate_hosts
                )
            )
        faults = [
            f
            for f in pool.map(lambda remote: file_transfer.send_files(remote, code), separate_hosts)
            if f
        ]
    if faults:
        run.update_status(state="failed")
        raise EchelonError(*faults)


def _report_outcome(run: Run, outcome: sessions.SshLaunchOutcome, missing: dict[str, str]) -> int:
    """Write the outcome into the status, print its cause last, and return the exit code.

    The status agrees with the exit code, whoever wrote it last.
    """
    code = outcome.code
    states: dict[int, str] = {ExitCode.OK: "finished", ExitCode.PREEMPTED: "preempted"}
    run.update_status(state=states.get(code, "failed"), failure=outcome.failure)
    for host, why in missing.items():
        if why:
            code = code or ExitCode.FAILED
            print(
                f"error: {run.folder} on {host} could not be brought here: {why}", file=sys.stderr
            )
    if outcome.cause:
        print(outcome.cause, file=sys.stderr)
    return code

"""One node of a world: its workers, under torchrun's elastic agent in this process.

Every launcher ends here: `local` in the process that was typed, `env` on each node by hand, `ssh`
and `slurm` through `echelon node`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from echelon.config.schema import Config
from echelon.errors import EchelonError, ExitCode
from echelon.gpus import count_visible_gpus
from echelon.gpus.energy import EnergyMeter
from echelon.launch.launcher import Launcher
from echelon.launch.node.fork_server import ForkServer
from echelon.launch.node.invitation import remove_invitation
from echelon.launch.node.lifeline import Lifeline
from echelon.launch.node.membership import Member
from echelon.launch.plan import NodeSpec, ReportNodes, make_program_words
from echelon.notify.news_process import NewsProcess, start_news
from echelon.runs import failure as failures
from echelon.runs.failure import Failure
from echelon.runs.history import record_start, record_stop, record_training
from echelon.runs.run_folder import Run
from echelon.runs.submitted_run import get_submitted_run
from echelon.runs.writer import claim_run_folder, release_run_folder, start_writer_beats
from echelon.tracking.summary import format_rows
from echelon.utils.files import read_json_object
from echelon.utils.imports import pause_garbage_collection
from echelon.utils.processes import count_cores
from echelon.world.network_key import derive_key, read_key
from echelon.world.sealed_store import SealedStore, derive_store_key

if TYPE_CHECKING:
    from echelon.launch.node.agent import NodeAgent

EXPERIMENT_ENTRYPOINT = "echelon.train.worker:run_worker"
PROGRAM_ENTRYPOINT = "echelon.launch.node.program:exec_program"
_PRELOADED_MODULES = ("torch", "echelon.train.worker", "echelon.recipes")

_TAKEOVER_LIMIT_S = 10.0
"""How long a node that was cut off waits for a sign that the others go on without it."""
_CLAIM_INTERVAL_S = 1.0

ResolveRun: TypeAlias = Callable[[SealedStore, Callable[[str], str]], Run]
"""From the store, and a function that waits for what node 0 puts there, to the run's folder."""


def print_failure(failure: Failure) -> None:
    """Print a failure as the last thing on the screen."""
    print(f"\n{failure}", file=sys.stderr, flush=True)


def run_node(
    launcher: Launcher,
    config: Config,
    node: NodeSpec,
    resolve_run: ResolveRun,
    on_port: Callable[[int], None] | None = None,
    report_failure: Callable[[Failure], None] = print_failure,
    record_exit: Callable[[int], None] = lambda code: None,
    report_nodes: ReportNodes = lambda report: None,
) -> int:
    """Start this node's workers and watch them to the end; returns the exit code of the run.

    `launcher` is the one that the configuration names. `resolve_run` returns the folder of the run
    once the store is open. `on_port` is called with the port of the store. `report_failure` shows
    the first failure of the world, on the node that leads; there `record_exit` is called with the
    exit code, and `report_nodes` with the nodes that go on when one is lost or comes back.
    """
    read_key(os.environ)  # one that can be guessed is refused before anything starts
    with pause_garbage_collection():
        import torch  # noqa: F401  once: what is forked from here shares it

    fork_server = ForkServer(_list_preloaded_modules(config))
    # From here on threads may start; the fork server imports the rest at the same time.
    from echelon.launch.node.key_agreement import agree_on_key
    from echelon.launch.node.rendezvous import host_or_join_store

    code, service, agreed = int(ExitCode.FAILED), None, None
    try:
        store = host_or_join_store(node, config.launch.join_timeout_s)
        if on_port is not None and node.rank == 0:
            on_port(store.port)
        unsealed = SealedStore(store, None)
        agreed = agree_on_key(unsealed, node, os.environ, Path(config.run.dir).absolute())
        sealed = unsealed.with_key(derive_store_key(agreed.key))
        service = _NodeService(
            launcher, config, node, report_failure, sealed, agreed.key, on_port, report_nodes
        )
        code = service.run(fork_server, resolve_run)
    except EchelonError as error:
        code = error.exit
        raise
    finally:
        if service.leads if service is not None else node.rank == 0:
            record_exit(code)
            if agreed is not None:
                agreed.remove_file()
    return code


def _list_preloaded_modules(config: Config) -> tuple[str, ...]:
    """Return what is imported once, and not by every worker."""
    if config.program:
        return ()
    return (*_PRELOADED_MODULES, "torch._dynamo") if uses_dynamo(config) else _PRELOADED_MODULES


def uses_dynamo(config: Config) -> bool:
    """Return whether torch._dynamo itself is needed: torch's FSDP and recomputation ask for more
    of it than `utils/deferred_dynamo.py` stands in for."""
    replica = config.replica
    return config.trainer.compile or replica.kind == "fsdp" or replica.checkpoint


class _NodeService:
    """One node's part in a run: it opens the lifeline, runs the agent and records how it ended."""

    def __init__(
        self,
        launcher: Launcher,
        config: Config,
        node: NodeSpec,
        report_failure: Callable[[Failure], None],
        store: SealedStore,
        key: str,
        on_port: Callable[[int], None] | None,
        report_nodes: ReportNodes,
    ) -> None:
        from echelon.launch.node.rendezvous import FixedRendezvous

        self._config, self._node, self._report_failure, self._store = (
            config,
            node,
            report_failure,
            store,
        )
        self._launcher, self._key, self._on_port = launcher, key, on_port
        self._report_nodes = report_nodes
        self._lifeline = Lifeline(_make_member(node, store))
        self._lifeline.is_leader = node.rank == 0
        self._standby_store: SealedStore | None = None
        """What the world uses, should this node lead."""
        self._rendezvous = FixedRendezvous(store, config.run.name or "echelon", node, config.launch)
        self._rendezvous.raise_if_failed = self._raise_if_failed
        self._run: Run | None = None
        self._news: NewsProcess | None = None
        self._energy: EnergyMeter | None = None
        self._has_left = False

    @property
    def leads(self) -> bool:
        """Whether this node speaks for the run: it leads, and is not the smaller side of a cut
        network."""
        return self._lifeline.is_leader and not self._lifeline.is_isolated

    def run(self, fork_server: ForkServer, resolve_run: ResolveRun) -> int:
        """Run the agent to its end; returns the exit code of the run.

        Whatever is raised here is reported to the other nodes, which would otherwise wait for it.
        """
        self._open_lifeline()  # nobody can be told that it failed
        try:
            return self._run_agent(fork_server, resolve_run)
        finally:
            if self._run is not None:
                if self.leads:
                    remove_invitation(self._run)
                if self._energy is not None:
                    self._energy.close()
                if self._news is not None:
                    self._news.close(is_over=self.leads and not self._has_left)
                release_run_folder(self._run)

    def _run_agent(self, fork_server: ForkServer, resolve_run: ResolveRun) -> int:
        from echelon.launch.node.agent import NodeLeft, SpareReleased

        try:
            run = self._run = resolve_run(self._store, self._rendezvous.wait_for_key)
            self._record_start(run)
            if self._node.rank == 0:
                self._start_news(run)
            if not self._is_within_command(run):  # whose agent measures already
                devices = self._node.procs * self._config.replica.devices
                counted = None if self._config.program else devices
                self._energy = EnergyMeter(run.energy_folder, os.environ, counted)
            agent = self._make_agent(run, fork_server)
            result = agent.run()
        except _WorldFailed as verdict:
            return self._finish_with_failure(verdict.failure)
        except SpareReleased as end:
            self._lifeline.leave()
            return end.code
        except NodeLeft:
            self._has_left = True
            self._lifeline.leave()
            return ExitCode.LEFT
        except Exception as error:  # a full disk, a store that went away: the other nodes must know
            if self._node.rank >= self._node.node_count + self._node.spares:
                raise  # it came later, and is nobody's loss
            first_rank = self._node.rank * self._node.procs
            failure = failures.make_failure_from_exception(error, first_rank, None)
            # Not of one attempt: those before it may have failed by something else.
            self._lifeline.end_every_attempt(failure)
            return self._finish_with_failure(self._lifeline.find_failure(0) or failure)
        if result.is_failed():
            assert agent.failure is not None
            code = self._finish_with_failure(agent.failure)
            if self._node.rank == 0 and agent.is_rank_killed(0):
                _print_wandb_hints(run)
            return code
        code = int(max(result.return_values.values()))
        self._lifeline.announce_over(code)
        self._lifeline.leave()
        self._record_program_end(run, "finished" if code == ExitCode.OK else "preempted")
        return code

    def _make_agent(self, run: Run, fork_server: ForkServer) -> NodeAgent:
        """Return the agent, once this node has compared itself with node 0."""
        from echelon.launch.node.agent import NodeAgent, NodeJob, make_worker_spec
        from echelon.launch.node.node_scaling import ScaleLimits
        from echelon.launch.node.rank_replacement import ReplacementLimits
        from echelon.launch.node.rendezvous import compare_with_node_0

        config, node = self._config, self._node
        facts = _collect_facts_to_compare(self._launcher, config)
        compare_with_node_0(self._store, node, facts, self._rendezvous.wait_for_key)
        restarts = self._count_restarts_left(run)
        self._record_program_start(run)
        entry = PROGRAM_ENTRYPOINT if config.program else EXPERIMENT_ENTRYPOINT
        program = make_program_words(config, node.node_count, node.procs)
        job = NodeJob(
            run,
            node,
            entry,
            config.launch.hang_s,
            self._key,
            ReplacementLimits(
                config.launch.max_replacements,
                config.launch.min_nodes or 1,
                config.launch.max_node_faults,
            ),
            ScaleLimits(
                config.launch.min_nodes or 1,
                self._launcher.get_max_nodes(node),
                config.trainer.batch_size,
            ),
            program,
            config.mode == "plain",
            self._report_nodes,
            node.procs * config.replica.devices,
            self._launcher.agents_print_to_screen,
        )
        self._copy_to_standby_store("card/0", "restarts")
        spec = make_worker_spec(self._rendezvous, node.procs, restarts)
        agent = NodeAgent(
            spec, self._store, fork_server, self._lifeline, job, self._standby_store, self._lead
        )
        agent.install_signal_handlers()
        return agent

    def _record_start(self, run: Run) -> None:
        """Write the start of the run into its status, on node 0.

        A training that a submitted command starts leaves launcher and process as they are: by them
        `echelon cancel` ends the whole command.
        """
        node = self._node
        world_size = node.node_count * node.procs
        if node.rank != 0:
            return
        run.membership_file.unlink(missing_ok=True)
        remove_invitation(run)
        if self._is_within_command(run):
            run.update_status(world=world_size)
        else:
            self._launcher.record_node_start(run, node.node_count, world_size)
        start_writer_beats(run)

    def _start_news(self, run: Run) -> None:
        """Send the news of the run from here, unless whoever started this process does."""
        if not self._launcher.command_holds_folder and not self._is_within_command(run):
            self._news = start_news(run, self._config, self._node.rank)

    def _is_within_command(self, run: Run) -> bool:
        """Return whether a submitted command has started this training, and is this run."""
        return not self._config.program and run == get_submitted_run(os.environ)

    def _record_program_start(self, run: Run) -> None:
        """Write the start of a program into its status and history. An experiment does so itself,
        and knows its step."""
        node = self._node
        if self._config.program and node.rank == 0:
            run.update_status(state="running")
            job = run.read_status_file().get("job")
            world_size = node.node_count * node.procs
            gpus = count_visible_gpus(os.environ) * node.node_count
            threads = self._config.launch.threads or (1 if node.procs > 1 else None)
            cpus = count_cores(node.procs, threads) * node.node_count
            name = self._launcher.name
            record_start(run, name, node.node_count, world_size, job, gpus=gpus, cpus=cpus)
            record_training(run, None, None)

    def _record_program_end(self, run: Run, state: str) -> None:
        """Write the end of a program into its status and history."""
        if self._config.program and self._node.rank == 0:
            run.update_status(state=state)
            record_stop(run, None, None, state)

    def _count_restarts_left(self, run: Run) -> int:
        """Restarts that are left, over all jobs of a run. Node 0 counts and tells the others,
        because all nodes restart together."""
        if self._node.rank == 0:
            left = self._launcher.count_restarts_left(run, self._config)
            self._store.set("restarts", str(left))
        return int(self._rendezvous.wait_for_key("restarts"))

    def _raise_if_failed(self, attempt: int) -> None:
        """Raise if the lifeline knows of a failure in this attempt."""
        if verdict := self._lifeline.find_failure(attempt):
            raise _WorldFailed(verdict)

    def _finish_with_failure(self, failure: Failure) -> int:
        """Record and report a failure; returns the exit code. The whole story is printed once, by
        the node that leads."""
        if self._lifeline.is_leader:
            self._record_unless_others_go_on(failure)
            self._lifeline.announce_over(failure.exit)
            self._lifeline.leave()
            self._report_failure(failure)
        else:
            self._lifeline.leave()
            print(f"stopped: rank {failure.rank} on {failure.host} failed", file=sys.stderr)
        return failure.exit

    def _exit_without_others(self, failure: Failure) -> None:
        """End this process when the others are lost. There is nothing to continue with, and the
        main thread may be waiting for them; the workers end with this process."""
        try:
            self._record_unless_others_go_on(failure)
            self._report_failure(failure)
        finally:  # the disk may be full, and nobody may read what is printed
            os._exit(failure.exit)

    def _record_unless_others_go_on(self, failure: Failure) -> None:
        """Write the failure into the status. The smaller side of a cut network first waits for a
        sign of the other one: where that goes on, the run has not failed."""
        if self._lifeline.is_isolated and self._run is not None:
            deadline = time.monotonic() + _TAKEOVER_LIMIT_S
            while time.monotonic() < deadline:
                written = read_json_object(self._run.membership_file) or {}
                if written.get("epoch", -1) > self._lifeline.committed.epoch:
                    return
                time.sleep(0.2)
        self._record_failure(failure)

    # --- the nodes of the world ---

    def _open_lifeline(self) -> None:
        """Connect to the other nodes; see `lifeline.py`."""
        node, launch, key = self._node, self._config.launch, derive_key(self._key, "lifeline")
        nodes = node.node_count + node.spares
        if nodes == 1:
            return
        from echelon.launch.node.key_agreement import LIFELINE_KEY, read_lifeline_port
        from echelon.launch.node.rendezvous import find_listening_address

        self._lifeline = lifeline = Lifeline(_make_member(node, self._store), launch.silence_s)
        if node.rank == 0:
            port = lifeline.open_as_leader(
                find_listening_address(node), node.master_host, key, nodes
            )
            self._store.with_key(None).set(LIFELINE_KEY, str(port))
            return
        lifeline.is_leader = False
        leader = f"{node.master_host}:{read_lifeline_port(self._store, node)}"
        may_lead = not self._config.program and launch.max_replacements > 0
        host_store = self._host_standby_store if may_lead else lambda address: ""
        lifeline.open_as_follower(leader, key, nodes, self._exit_without_others, host_store)

    def _host_standby_store(self, address: str) -> str:
        from echelon.launch.node.rendezvous import host_standby_store

        self._standby_store = SealedStore(host_standby_store(address), derive_store_key(self._key))
        return f"{address}:{self._standby_store.port}"

    def _lead(self) -> None:
        """Do what node 0 did until now: hold the folder of the run, and say where it leads."""
        assert self._run is not None
        self._start_news(self._run)  # at once: the run may end before the folder can be claimed
        threading.Thread(target=self._claim_folder, daemon=True, name="claim").start()
        from echelon.launch.node.key_agreement import LIFELINE_KEY

        assert self._standby_store is not None
        port = self._lifeline.own.lifeline.rpartition(":")[2]
        self._standby_store.with_key(None).set(LIFELINE_KEY, port)
        if self._on_port is not None:
            self._on_port(self._standby_store.port)

    def _copy_to_standby_store(self, *keys: str) -> None:
        """Copy what a node needs that joins later, should this one lead."""
        if self._standby_store is not None:
            for key in keys:
                self._standby_store.set(key, self._store.get(key))

    def _claim_folder(self) -> None:
        """Become the writer of the run's folder, once the leader before has let go of it."""
        assert self._run is not None
        while True:
            with contextlib.suppress(EchelonError):
                claim_run_folder(self._run, shares_with_command=self._launcher.command_holds_folder)
                start_writer_beats(self._run)
                return
            time.sleep(_CLAIM_INTERVAL_S)

    def _record_failure(self, failure: Failure) -> None:
        """Write the failure into the status, once it is known which run this is.

        A program that trained with Echelon has written its own, which says more than its exit code.
        """
        if self._run is None:
            return
        has_trained = self._config.program and self._run.command_file.exists()
        before = self._run.read_status_file() if has_trained else {}
        self._launcher.record_failure(self._run, self._config, failure)
        if before.get("failure"):
            self._run.update_status(failure=before["failure"], step=before.get("step"))
        # Rank 0 may have been killed before it could.
        record_stop(self._run, failure.step, None, f"failed: {failure.summary}")


def make_thread_variables(config: Config, procs: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are set for every worker before torch is imported, whose thread
    pools read them.

    With several processes on a node each gets one thread, unless the user has set another number.
    """
    threads = config.launch.threads or (1 if procs > 1 else None)
    return {"OMP_NUM_THREADS": str(threads)} if threads and "OMP_NUM_THREADS" not in env else {}


def make_network_variables(config: Config, host: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which NCCL and gloo find their network interface.

    What a person has set stays. Else it is the interface of the route to node 0. torch is told not
    to warn of host names that cannot be looked up.
    """
    from echelon.launch import network_interface

    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    name = config.launch.interface or network_interface.find_interface_to(host)
    wanted = quiet | (dict.fromkeys(network_interface.INTERFACE_VARIABLES, name) if name else {})
    chosen = config.launch.interface and network_interface.INTERFACE_VARIABLES
    return {key: value for key, value in wanted.items() if key not in env or key in (chosen or ())}


def _collect_facts_to_compare(launcher: Launcher, config: Config) -> dict[str, object]:
    """Return what all nodes must have in common, beside torch's version."""
    known = config.launch.procs or launcher.has_compared_devices
    devices = None if known else count_visible_gpus(os.environ)
    return {"devices": devices, "settings": config.select_numerics_settings()}


# --- what `echelon jobs` shows ---


def _print_wandb_hints(run: Run) -> None:
    """Print how to send what wandb keeps in its files, for a rank 0 that was killed."""
    from echelon.tracking import wandb_run

    for line in format_rows(wandb_run.get_url_and_sync_rows(run)):
        print(line, file=sys.stderr, flush=True)


# --- the other nodes ---


class _WorldFailed(Exception):
    """The lifeline reported a failure while this node was waiting."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.summary)
        self.failure = failure


def _make_member(node: NodeSpec, store: SealedStore) -> Member:
    """Return this node as the others know it."""
    place = -1 if node.is_spare else node.rank
    address = f"{node.master_host}:{store.port}" if node.rank == 0 else ""
    return Member(
        node.rank,
        socket.gethostname(),
        node.procs,
        store=address,
        place=place,
        is_added=node.is_added,
    )

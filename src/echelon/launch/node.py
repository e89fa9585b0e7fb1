"""One node of a world: its workers, under torchrun's elastic agent in this process.

Every launcher ends here: `local` in the process that was typed, `env` on each node by hand, `ssh`
and `slurm` through `echelon node`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeAlias

from echelon import failure as failures
from echelon.config.schema import Config
from echelon.errors import Exit
from echelon.failure import Failure
from echelon.gpus import visible_count
from echelon.launch import interface
from echelon.launch.lifeline import Alone, Hub, Spoke
from echelon.launch.plan import Node
from echelon.launch.process import launched
from echelon.launch.slurm import requeue, script
from echelon.launch.slurm.queue import this_job
from echelon.launch.zygote import Zygote
from echelon.runs import Run
from echelon.track import wandb_run
from echelon.track.summary import titled

if TYPE_CHECKING:
    import torch.distributed as dist

    from echelon.launch.agent import Agent

EXPERIMENT = "echelon.train.worker:work"
PROGRAM = "echelon.launch.program:execute"
_PRELOADED = ("torch", "torch._dynamo", "echelon.train.worker", "echelon.experiments")
"""DDP and torch's optimizers import torch._dynamo on first use, in every process."""

FindRun: TypeAlias = "Callable[[dist.Store, Callable[[str], str]], Run]"
"""From the store, and a way to wait for what node 0 puts there."""


def show(failure: Failure) -> None:
    print(f"\n{failure}", file=sys.stderr, flush=True)


def serve(
    config: Config,
    node: Node,
    find_run: FindRun,
    on_port: Callable[[int], None] | None = None,
    tell: Callable[[Failure], None] = show,
) -> int:
    """Start this node's workers and watch them to the end; the exit code is the training's."""
    import torch  # noqa: F401  once: what is forked from here shares it

    zygote = Zygote(() if config.program else _PRELOADED)
    # From here on threads may start; the zygote imports the rest at the same time.
    from echelon.launch.meeting import open_store

    store = open_store(node, config.launch.join_timeout_s)
    if on_port is not None:
        on_port(store.port)
    return _Service(config, node, tell, store).run(zygote, find_run)


class _Service:
    """One node's part in a run."""

    def __init__(
        self, config: Config, node: Node, tell: Callable[[Failure], None], store: dist.TCPStore
    ) -> None:
        from echelon.launch.meeting import Meeting

        self._config, self._node, self._tell, self._store = config, node, tell, store
        self._line = Alone()
        self._meeting = Meeting(store, config.run.name or "echelon", node, config.launch)
        self._meeting.give_up = self._raise_verdict
        self._run: Run | None = None

    def run(self, zygote: Zygote, find_run: FindRun) -> int:
        try:
            self._line = _lifeline(self._store, self._node, self._without_node_0)
            run = self._run = find_run(self._store, self._meeting.ask)
            _note_start(run, self._node, self._config)
            agent = self._agent(run, zygote)
            result = agent.run()
        except _Verdict as verdict:
            return self._failed(verdict.failure)
        except Exception as error:  # a full disk, a store that went away: the others must hear it
            first_rank = self._node.rank * self._node.procs
            failure = failures.from_exception(error, first_rank, None)
            return self._failed(self._line.agree(0, failure))
        if result.is_failed():
            assert agent.failure is not None
            code = self._failed(agent.failure)
            if self._node.rank == 0 and agent.was_killed(0):
                _speak_for_rank_0(run)
            return code
        self._line.part()
        code = int(max(result.return_values.values()))
        _note_program(run, self._node, self._config, "finished" if code == Exit.OK else "preempted")
        return code

    def _agent(self, run: Run, zygote: Zygote) -> Agent:
        from echelon.launch.agent import Agent, Job, worker_spec
        from echelon.launch.meeting import compare

        config, node = self._config, self._node
        compare(self._store, node, _card(config), self._meeting.ask)
        restarts = self._restarts_left(run)
        _note_program(run, node, config, "running")
        entry = PROGRAM if config.program else EXPERIMENT
        program = script.program_words(config, node.count, node.procs)
        job = Job(run, node, entry, config.launch.hang_s, program, config.mode == "plain")
        spec = worker_spec(self._meeting, node.procs, restarts)
        agent = Agent(spec, self._store, zygote, self._line, job)
        agent.listen()
        return agent

    def _restarts_left(self, run: Run) -> int:
        """Over all jobs of a run; node 0 counts and tells the others, as they fail together."""
        if self._config.launch.kind != "slurm":
            return self._config.launch.max_restarts
        if self._node.rank == 0:
            self._store.set("restarts", str(requeue.begin(run, self._config.launch)))
        return int(self._meeting.ask("restarts"))

    def _raise_verdict(self, attempt: int) -> None:
        if verdict := self._line.verdict(attempt):
            raise _Verdict(verdict)

    def _failed(self, failure: Failure) -> int:
        """The whole story is told once, by node 0."""
        if self._node.rank == 0:
            self._note(failure)
            self._line.part()
            self._tell(failure)
        else:
            self._line.part()
            print(f"stopped: rank {failure.rank} on {failure.host} failed", file=sys.stderr)
        return failure.exit

    def _without_node_0(self, failure: Failure) -> None:
        """There is nothing to go on with; the workers end with this process."""
        self._note(failure)
        self._tell(failure)
        os._exit(failure.exit)

    def _note(self, failure: Failure) -> None:
        if self._run is not None:
            self._run.update_status(state="failed", step=failure.step, failure=asdict(failure))
            requeue.after(self._run, self._config.launch, failure)


def variables(config: Config, procs: int, env: Mapping[str, str]) -> dict[str, str]:
    """Set for every worker of a node, before torch is imported: its thread pools read it."""
    threads = config.launch.threads or (1 if procs > 1 else None)
    return {"OMP_NUM_THREADS": str(threads)} if threads and "OMP_NUM_THREADS" not in env else {}


def network_variables(config: Config, host: str, env: Mapping[str, str]) -> dict[str, str]:
    """What a person has set stays; else the interface of the route to the first node, and quiet
    about names that cannot be looked up."""
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    name = config.launch.interface or interface.towards(host)
    wanted = quiet | (dict.fromkeys(interface.VARIABLES, name) if name else {})
    chosen = config.launch.interface and interface.VARIABLES
    return {key: value for key, value in wanted.items() if key not in env or key in (chosen or ())}


def _card(config: Config) -> dict[str, object]:
    """What all nodes must have in common, beside torch's version."""
    known = config.launch.procs or config.launch.kind == "ssh"  # which has compared them
    devices = None if known else visible_count(os.environ)
    return {"devices": devices, "settings": config.numbers()}


# --- what `echelon jobs` shows ---


def _note_start(run: Run, node: Node, config: Config) -> None:
    """What was typed elsewhere, for ssh and Slurm, has been noted there."""
    kind, world = config.launch.kind, node.count * node.procs
    if node.rank != 0 or kind == "ssh":
        return
    if kind == "slurm":  # perhaps by hand, with sbatch
        run.update_status(launcher=kind, job=this_job(os.environ), world=world)
    else:
        run.update_status(**launched("env" if kind == "env" else "local", node.count, world))


def _speak_for_rank_0(run: Run) -> None:
    """Killed, it could not say how to send what wandb keeps in its files."""
    for line in titled(wandb_run.last_words(run)):
        print(line, file=sys.stderr, flush=True)


def _note_program(run: Run, node: Node, config: Config, state: str) -> None:
    """An experiment says so itself."""
    if config.program and node.rank == 0:
        run.update_status(state=state)


# --- hearing of each other ---


class _Verdict(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.summary)
        self.failure = failure


def _lifeline(store: dist.TCPStore, node: Node, on_lost: Callable[[Failure], None]) -> Alone:
    if node.count == 1:
        return Alone()
    from echelon.launch.meeting import listening_address

    if node.rank == 0:
        hub = Hub(listening_address(node), node.count)
        store.set("lifeline", hub.key)
        return hub
    return Spoke(node.host, store.get("lifeline").decode(), node.rank, on_lost)

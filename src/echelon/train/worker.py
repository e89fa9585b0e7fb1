"""One rank, from start to exit: meet the others, build, restore, train, and say what went wrong."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from echelon import failure as failures
from echelon import runs
from echelon.config.check import batch_fault, cpu_faults, replica_fault
from echelon.config.schema import Config
from echelon.errors import EchelonError, Exit, Fault
from echelon.failure import Failure
from echelon.gpus import visible_count
from echelon.launch.process import launched
from echelon.pulse import Pulse
from echelon.runs import Run, launch_id
from echelon.track.summary import spoken, summary, titled
from echelon.train.group import Group, PeerFailed, meet, tell_agent
from echelon.train.loop import Training, train
from echelon.train.memory import explained, out_of_memory
from echelon.train.number import untaken
from echelon.train.output import Output
from echelon.train.prepare import prepare
from echelon.train.stop import Stop
from echelon.train.swept import with_parameters
from echelon.world import World, detect

_WAIT_FOR_CAUSE_S = 5.0
"""A broken connection is rarely the cause: the rank that failed first is given time to say so."""


def work(folder: str) -> NoReturn:
    """A rank that an agent started: it is given the run folder and nothing else."""
    run = Run(Path(folder))
    leave(Rank(run.config(), has_agent=True).live(lambda group: run))


def train_here(config: Config) -> int:
    """This process as one rank: alone, or of a world that torchrun, srun or a person made."""
    rank = Rank(config)
    code = rank.live(lambda group: _agreed_run(rank.config, group))
    if rank.group is not None and rank.group.store is not None:
        leave(code)
    return code


def leave(code: int) -> NoReturn:
    """End the process without destroying its process group (see Group.part)."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Rank:
    """What this process knows while it lives, for the report if it dies."""

    def __init__(self, config: Config, has_agent: bool = False) -> None:
        self.config = config
        self.has_agent = has_agent
        self.stop = Stop()
        self.output = Output()
        self.pulse = Pulse()
        self.number = 0
        self.group: Group | None = None
        self.folder: Run | None = None
        self.training: Training | None = None
        self.parted = False
        """Whether the others have left, and hear nothing any more."""

    def live(self, find_run: Callable[[Group], Run]) -> int:
        self.stop.listen()
        try:
            world = _world(self.config)
            self.number = world.rank
            _require_possible(self.config, world)
            _warn_of_cpu(self.config, world)
            self.group = meet(world, self.config, os.environ)
            if not self.has_agent:  # which was given what its launcher took
                self.config = with_parameters(self.config, self.group, os.environ)
            self.group.require_equal(self.config)
            self.folder = find_run(self.group)
            if self.has_agent:
                self._show_life(self.folder, world)
            if world.rank == 0:
                self._open(self.folder, world)
            self.training = prepare(
                self.config, self.folder, self.group, self.stop, self.pulse, self.output
            )
            begun = (self.training.step, time.monotonic())
            if world.rank == 0:
                self.folder.update_status(
                    step=self.training.step, total_steps=self.training.total_steps
                )
            outcome = train(self.training)
            self.group.part()
            self.parted = True
            self.training.close()
            self._require_saved(outcome)
            if world.rank == 0:
                self._report(outcome, *begun)
            return outcome
        except BaseException as error:
            return self._fail(error)
        finally:
            self.stop.over = True
            if self.training is not None and self.training.profile is not None:
                self.training.profile.close()
            self.output.close()

    def _show_life(self, run: Run, world: World) -> None:
        """Let the agent see progress, and ask for a stack where there is none."""
        self.pulse = Pulse(run.pulse_file(world.node_rank), world.local_rank)
        file = run.stack_file(world.rank).open("w", encoding="utf-8")
        faulthandler.register(signal.SIGQUIT, file, all_threads=True)
        faulthandler.enable()  # a crash in compiled code leaves the Python stack in the log
        self._stack_file = file

    def _open(self, run: Run, world: World) -> None:
        self.output.log_to(run.log_file(0))
        mine = {} if self.has_agent else launched("inline", world.nodes, world.size)
        now = {"state": "running", "since": time.time(), "pid": os.getpid(), "failure": None}
        run.update_status(**mine | now, launch_id=launch_id(os.environ))

    def _require_saved(self, outcome: Exit) -> None:
        """A disk that was full for a while is a warning; one that is full at the end has lost
        what was computed. A run that was stopped says so as well, and goes on from the snapshot
        before: it may be queued again, and the disk may have room then."""
        t = self.training
        assert t is not None
        if t.unsaved is not None and outcome is Exit.OK:
            raise EchelonError(
                Fault(
                    f"finished after step {t.step} of {t.total_steps}, but this step is not "
                    f"saved: {t.unsaved}",
                    f"mend that, then go on: echelon resume {spoken(t.run)}",
                ),
                exit=Exit.FAILED,
            )

    def _report(self, outcome: Exit, first_step: int, begun: float) -> None:
        t = self.training
        assert t is not None
        state = "preempted" if outcome is Exit.PREEMPTED else "finished"
        t.run.update_status(state=state, step=t.step, total_steps=t.total_steps, best=t.best)
        seconds = time.monotonic() - begun if t.step > first_step else -1.0
        tracked = t.close_trackers(outcome)
        longer = "trainer.epochs" if t.config.trainer.steps is None else "trainer.steps"
        so_far = (t.step, t.total_steps, seconds)
        text = summary(t.run, outcome, *so_far, self.stop.reason, tracked, longer, t.unsaved)
        print(text, file=sys.stderr)

    def _fail(self, error: BaseException) -> int:
        if self.training is not None:
            self.training.screen.close()
        failure = self._cause(error)
        if self.group is not None:
            self.group.publish(failure, stay=not self.parted)
        if self.has_agent and (self.group is None or self.group.store is None):
            tell_agent(failure, os.environ)
        if self.folder is not None and self.number == 0 and not self.has_agent:
            self.folder.update_status(state="failed", step=failure.step, failure=failure.__dict__)
        if not (self.has_agent and self.number == 0):  # there the agent says it, once
            print(failure, file=sys.stderr, flush=True)
        self._close_trackers()
        return failure.exit

    def _close_trackers(self) -> None:
        if self.training is None:
            return
        for line in titled(self.training.close_trackers(Exit.FAILED)):
            print(line, file=sys.stderr, flush=True)

    def _cause(self, error: BaseException) -> Failure:
        """The first failure of the world, which need not be this rank's."""
        if isinstance(error, PeerFailed):
            return error.failure
        if self.group is not None and _lost_a_peer(error):
            told = self.group.first_failure(_WAIT_FOR_CAUSE_S)
            if told is not None:
                return told
        if self.group is not None and (full := out_of_memory(error)):
            error = explained(full, self.config, self.group.world, self.folder, self.training)
        step = self.pulse.step if self.training is not None else None
        fault = untaken(error)
        if fault is not None and not failures.users_lines(error):
            error = EchelonError(fault)
        hint = fault.do if fault is not None else ""
        return failures.from_exception(error, self.number, step, hint)


def _world(config: Config) -> World:
    world = detect(
        os.environ,
        rank=config.rank,
        world_size=config.world_size,
        master=config.master,
        visible=visible_count(os.environ),
        devices_per_replica=config.replica.devices,
        share_devices=config.launch.share_devices,
    ).world
    if config.launch.threads:
        torch.set_num_threads(config.launch.threads)
    return world


def _require_possible(config: Config, world: World) -> None:
    """What only the world and its devices say about the settings."""
    faults = [batch_fault(config.trainer.batch_size, world.size), replica_fault(config, world.size)]
    if world.devices[0].startswith("cpu"):
        faults += cpu_faults(config)
    if found := [fault for fault in faults if fault]:
        raise EchelonError(*found)


def _warn_of_cpu(config: Config, world: World) -> None:
    """A torch without CUDA, or a driver that is gone, would be noticed by the hours it takes."""
    asked = config.launch.gpus_per_node
    if asked and world.devices[0].startswith("cpu") and world.local_rank == 0:
        print(
            f"warning: launch.gpus_per_node={asked}, but torch {torch.__version__} sees no GPU on "
            f"{socket.gethostname()}, so it trains on the CPU; `echelon doctor` there says why",
            file=sys.stderr,
        )


def _agreed_run(config: Config, group: Group) -> Run:
    """Rank 0 makes the folder; the others, perhaps on another machine, hear of it."""
    mine = ""
    if group.world.rank == 0:
        mine = str((runs.restarted(config, os.environ) or runs.create(config)).folder)
    return Run(Path(group.share("run", mine)))


def _lost_a_peer(error: BaseException) -> bool:
    """What a rank sees when another one dies: never the cause."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or "gloo" in text or "connection " in text

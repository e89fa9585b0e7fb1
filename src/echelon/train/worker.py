"""One rank from start to exit: join the world, build, restore, train, and report what went
wrong."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.config.schema import Config
from echelon.config.validate import check_cpu_support, find_size_faults
from echelon.data.loader_errors import explain_dead_loader, remove_death_signal
from echelon.errors import EchelonError, ExitCode, Fault, TransientError
from echelon.experiment.definition import Experiment
from echelon.experiment.error_hints import (
    explain_batch_error,
    explain_process_group_error,
    suggest_remedy,
)
from echelon.experiment.loading import call_function, takes_session
from echelon.experiment.loss_check import PartInputError
from echelon.experiment.training_info import find_info_parameter
from echelon.gpus import count_visible_gpus
from echelon.gpus.energy import EnergyMeter
from echelon.notify.news_process import NewsProcess, start_news
from echelon.object_store.urls import is_url
from echelon.parallel.join_world import join_world, publish_failure_to_agent
from echelon.parallel.model_parallel import get_process_devices
from echelon.parallel.process_group import RankGroup
from echelon.parallel.round_membership import RoundMembership
from echelon.parallel.store import PeerFailedError
from echelon.runs import failure as failures
from echelon.runs.accounting import account_for_run
from echelon.runs.create import create_run, find_restarted_run, get_launch_id
from echelon.runs.failure import Failure
from echelon.runs.heartbeat import Heartbeat
from echelon.runs.history import (
    read_history,
    record_return,
    record_start,
    record_stop,
    record_training,
)
from echelon.runs.latest import record_first_step
from echelon.runs.process_record import make_starting_status
from echelon.runs.run_folder import Run
from echelon.runs.submitted_run import get_submitted_run, take_submitted_run
from echelon.runs.writer import claim_run_folder, release_run_folder, start_writer_beats
from echelon.snapshot.mirror import SnapshotMirror
from echelon.snapshot.state import pack_rng_state, restore_rng_state
from echelon.tracking.summary import (
    TrainingProgress,
    format_effective_time,
    format_rows,
    render_summary,
    suggest_resume,
)
from echelon.train.loop import Training, train
from echelon.train.memory_copies import KeptLoop, MemoryCopies, WholeCopies
from echelon.train.mirroring import FAILED_LIMIT_S, begin_mirror, get_close_limit_s
from echelon.train.output_tee import OutputTee
from echelon.train.prepare import build_parts, load_training_function, prepare_training
from echelon.train.prepare_session import prepare_session
from echelon.train.prepare_steps import prepare_steps
from echelon.train.regroup import (
    KeptTraining,
    find_regroup_obstacle,
    leave_training,
    make_copies,
)
from echelon.train.round_end import RankLeft, RoundLost, is_round_end
from echelon.train.sanity_check import check_evaluation
from echelon.train.session import Session
from echelon.train.session_engine import SessionEngine
from echelon.train.stack_answers import answer_stack_requests
from echelon.train.step_boundary import RegroupRequested, TrainingStopped
from echelon.train.stop_signals import StopSignals
from echelon.utils.deferred_dynamo import defer_dynamo
from echelon.utils.processes import count_cores
from echelon.utils.streams import use_tolerant_streams
from echelon.world import World, detect

Prepare = Callable[["KeptLoop | None"], "tuple[Training | SessionEngine, Callable[[], None]]"]
"""Return a training and its loop; what is kept is given where ranks come from another round."""
_NEXT_ROUND_TIMEOUT_S = 20.0
"""How long a rank that has lost its peers waits for the agents to say how it goes on."""
_RELEASED_KEY = "output is released"
_RELEASE_TIMEOUT_S = 30.0
_POLL_S = 0.01
_CAUSE_TIMEOUT_S = 5.0
"""How long to wait for the rank that failed first to publish the cause."""
_SANITY_HINT = (
    "this was the check of the evaluation before the first step; for a metric that needs more "
    "samples than a few batches have: trainer.sanity_steps=0"
)


def run_worker(folder: str) -> NoReturn:
    """Runs a rank that an agent started. It is given the run folder and nothing else; never
    returns."""
    run = Run(Path(folder))
    with use_tolerant_streams():
        exit_process(RankWorker(run.read_config(), has_agent=True).run_rank(lambda group: run))


def train_in_process(config: Config) -> int:
    """Trains in this process as one rank: alone, or in a world that torchrun, srun or a person
    started.

    Returns the exit code of a process that is alone. A rank of a larger world ends its process.
    """
    rank = RankWorker(config)
    code = rank.run_rank(lambda group: agree_on_run(rank.config, group))
    if rank.group is not None and rank.group.store is not None:
        exit_process(code)
    return code


def exit_process(code: int) -> NoReturn:
    """Ends the process without destroying its process group (see
    `RankGroup.barrier_before_exit`)."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class RankWorker:
    """What this process knows during its life, so that it can be reported if it fails."""

    current: ClassVar[RankWorker | None] = None
    """The one that this process is now, if it is one."""

    def __init__(self, config: Config, has_agent: bool = False) -> None:
        defer_dynamo()
        self.config = config
        self.has_agent = has_agent
        self.stop = StopSignals()
        self.output = OutputTee()
        self.heartbeat = Heartbeat()
        self.rank = 0
        self.group: RankGroup | None = None
        self.rounds: RoundMembership | None = None
        """Present where the world can go on without a rank."""
        self.run: Run | None = None
        self.training: Training | SessionEngine | None = None
        self.mirror: SnapshotMirror | None = None
        self.news: NewsProcess | None = None
        """Where this process leads the run, and the run asks for news."""
        self.energy: EnergyMeter | None = None
        self.has_left_group = False
        """Whether the other ranks have left and no longer read the store."""
        self._rng_state: Tensor | None = None
        """The random state in which code of the user is called, in every round."""
        self._began = (0, 0.0)
        """The step and the time at which the training began."""

    def run_rank(self, find_run: Callable[[RankGroup], Run]) -> int:
        """Runs the rank and returns its exit code. Every error is reported here and nowhere
        else."""
        try:
            world = self.begin(find_run)
            assert self.run is not None
            function = load_training_function(self.config, self.run, world)
            if self.rounds is not None:
                self._rng_state = pack_rng_state(*get_process_devices(world))
            if takes_session(function):
                outcome = self._run_session(function, world)
            else:
                outcome = self._run_experiment(function, world)
            self.end(outcome)
            return outcome
        except RankLeft:
            return self._leave_world()
        except BaseException as error:
            return self.handle_failure(error)
        finally:
            self.close()

    def begin(self, find_run: Callable[[RankGroup], Run], takes_trial: bool = True) -> World:
        """Join the world, find its run and open that; returns this process's place.

        `takes_trial`: parameters of a `wandb agent` become settings of the run.
        """
        RankWorker.current = self
        self.stop.install()
        world = _detect_world(self.config)
        self.rank = world.rank
        _require_valid_world(self.config, world)
        _warn_about_cpu(self.config, world)
        self.group = join_world(world, self.config, os.environ)
        if takes_trial and not self.has_agent:  # an agent's launcher has applied them already
            from echelon.train.wandb_trial import apply_trial_parameters

            self.config = apply_trial_parameters(self.config, self.group, os.environ)
        self.group.require_equal_configs(self.config)
        self.run = find_run(self.group)
        if self.has_agent:
            self._start_heartbeat(self.run, world)
            self.rounds = self._open_rounds(self.group)
        elif (
            world.local_rank == 0 and world.devices[0].startswith("cuda") and not self._is_submitted
        ):
            count = world.local_size * len(world.devices)
            self.energy = EnergyMeter(self.run.energy_folder, os.environ, count)
        if world.rank == 0 and not (self.rounds is not None and self.rounds.is_replacement):
            self._open_run(self.run, world)
            self.config, self.mirror = begin_mirror(self.config, self.run, _print_message)
        return world

    def _open_rounds(self, group: RankGroup) -> RoundMembership | None:
        """Return this rank's part in the rounds of its world; None where it is alone, or lost ranks
        are not replaced."""
        if group.store is None or not self.config.launch.max_replacements:
            return None
        assert self.run is not None
        store = group.store.root
        heartbeat, limit_s = self.heartbeat, group.timeout_s
        file = self.run.get_round_file(group.world.node_rank)
        return RoundMembership(store, group.world, os.environ, limit_s, heartbeat, file)

    def end(self, outcome: ExitCode) -> None:
        """End a training that was not failed by an error: wait for the other ranks and for the last
        snapshot, and write how it ended."""
        assert self.group is not None
        assert self.training is not None
        if not self.has_left_group:
            self.group.barrier_before_exit()
        self.has_left_group = True
        self.training.close_writer()
        self._require_final_snapshot(outcome)
        now_s = time.monotonic()
        stopped_s = now_s - (self.stop.requested_s or now_s)
        mirrored = self.training.close_mirror(get_close_limit_s(self.config, outcome, stopped_s))
        if self.rank == 0:
            self._write_final_status(outcome, *self._began, mirrored)
        self.training.close_sources()

    def close(self) -> None:
        """Release what the process holds of the run, however that ended."""
        RankWorker.current = None
        self.stop.is_over = True
        if self.training is not None and self.training.profile is not None:
            self.training.profile.discard_profile()
        self._close_mirror()
        self.output.close()
        if self.energy is not None:
            self.energy.close()
        if self.news is not None:
            self.news.close()
        if self.run is not None:
            release_run_folder(self.run)

    def _close_mirror(self) -> None:
        """Leave the mirror, which is open where the run has failed. What is saved is worth a
        moment."""
        if self.training is not None:
            self.training.close_mirror(FAILED_LIMIT_S)
        elif self.mirror is not None:
            self.mirror.close(0.0, lambda seconds: None)

    def _run_experiment(self, function: Callable[..., Any], world: World) -> ExitCode:
        """Train the experiment that the function builds; returns how it ended."""
        assert self.run is not None
        assert self.group is not None
        built = build_parts(self.config, self.run, self.group, function)
        if (copies := make_copies(self.config, built[0], self.group)) is not None:
            return self._run_in_rounds(partial(self._prepare_anew, function, [built]), copies)
        experiment, is_placed_by_user = built
        kept = KeptTraining() if self._join_as_replacement() else None
        while True:
            prepare = partial(
                prepare_training, *self._rank_parts, experiment, is_placed_by_user, kept
            )
            try:
                return self._train_in_round(prepare, kept)
            except BaseException as error:
                kept = self._leave_training(error, kept)

    @property
    def _rank_parts(
        self,
    ) -> tuple[Config, Run, RankGroup, StopSignals, Heartbeat, OutputTee]:
        """What every kind of training is prepared with."""
        assert self.run is not None
        assert self.group is not None
        return (self.config, self.run, self.group, self.stop, self.heartbeat, self.output)

    def _prepare_anew(
        self,
        function: Callable[..., Any],
        built: list[tuple[Experiment, bool]],
        kept: KeptLoop | None,
    ) -> tuple[Training | SessionEngine, Callable[[], None]]:
        """Return the training of an experiment and its loop. After the first round it is built
        anew: a model may be cut into shards for other ranks, and code of the user has seen steps
        that are made again."""
        assert self.run is not None
        assert self.group is not None
        if kept is None:
            experiment, is_placed_by_user = built.pop()
        else:
            built.clear()
            experiment, is_placed_by_user = build_parts(
                self.config, self.run, self.group, function, kept
            )
        if experiment.step is not None:
            loop = prepare_steps(*self._rank_parts, experiment, kept)
            return loop.engine, loop.run
        training = prepare_training(*self._rank_parts, experiment, is_placed_by_user, copied=kept)
        self.training = training  # a report of a failed check says that it was one
        if kept is None and check_evaluation(training):
            training.speed.restart_interval(training.step, training.samples)
        return training, partial(train, training)

    def _train_in_round(
        self, prepare: Callable[[], Training], kept: KeptTraining | None
    ) -> ExitCode:
        """Prepare a training and run it to its end; returns how it ended."""
        self.training = None
        training = self.training = prepare()
        if kept is not None:
            kept.forget()
        if kept is None and check_evaluation(training):
            training.speed.restart_interval(training.step, training.samples)
        self._begin_loop(training, is_first=kept is None)
        if (rounds := self.rounds) is not None:
            training.is_round_planned = lambda: rounds.is_round_planned
            if find_regroup_obstacle(training) is None:
                rounds.confirm_round()
        outcome = self._run_loop(partial(train, training))
        self._end_round(training.group)
        return outcome

    def _end_round(self, group: RankGroup) -> None:
        """Wait until all ranks have made all steps. One that is lost before is still missed; one
        that is lost later is not."""
        if self.rounds is not None:
            self.rounds.end_round()
        try:
            group.barrier_before_exit()
        except RuntimeError:
            if self.rounds is None or not self.rounds.have_all_ended(_NEXT_ROUND_TIMEOUT_S):
                raise
        self.has_left_group = True

    def _run_in_rounds(self, prepare: Prepare, copies: MemoryCopies) -> ExitCode:
        """Run a loop to its end; returns how it ended. In every round it is prepared anew, and
        continues from the newest copy in the memory of the ranks."""
        kept = KeptLoop(copies)
        self._join_as_replacement()
        try:
            while True:
                try:
                    return self._run_loop_in_round(prepare, kept)
                except BaseException as error:
                    self._leave_loop(error, kept)
        finally:
            copies.leave_round()

    def _run_loop_in_round(self, prepare: Prepare, kept: KeptLoop) -> ExitCode:
        assert self.run is not None
        assert self.group is not None
        self.training = None
        is_first = self.rounds is None or self.rounds.round.number == 0
        if not is_first:
            kept.agree_on_copy(self.config, self.run, self.group)
            if self.rank == 0 and not kept.has_copy and is_url(self.config.trainer.resume):
                self.config, self.mirror = begin_mirror(self.config, self.run, _print_message)
        training, run_loop = prepare(None if is_first else kept)
        self._begin_loop(training, is_first)
        if self.rank == 0 and kept.left_step > training.step:
            record_return(self.run, kept.left_step, training.step)
            if kept.has_copy:  # otherwise it is said that the run resumes
                _print_message(f"going back to step {training.step}, which is in memory")
        if (rounds := self.rounds) is not None and find_regroup_obstacle(training) is None:
            kept.begin_round(training.group)
            training.copies = kept.copies
            training.take_part_in_rounds(lambda: rounds.is_round_planned, rounds.confirm_round)
        outcome = self._run_loop(run_loop)
        self._end_round(training.group)
        return outcome

    def _join_as_replacement(self) -> bool:
        """Wait for the round that a process belongs to which replaces a lost rank; returns whether
        this is one."""
        if self.rounds is None or not self.rounds.is_replacement:
            return False
        assert self.run is not None
        if self.rank == 0:
            self.output.log_to(self.run.get_rank_log_file(0))
        self._enter_group(self.rounds.wait_as_replacement())
        if self._rng_state is not None:
            restore_rng_state(self._rng_state, *get_process_devices(self.rounds.world))
        return True

    def _leave_training(self, error: BaseException, kept: KeptTraining | None) -> KeptTraining:
        """Go over to the next round, if the error says that there is one; returns what is kept of
        the training. Otherwise the error is raised again."""
        training = self.training
        next_group = self._find_next_round(error, training is not None or kept is not None)
        if isinstance(training, Training):
            kept = leave_training(training)
        assert kept is not None
        training = None
        self._enter_round(error, next_group)
        return kept

    def _leave_loop(self, error: BaseException, kept: KeptLoop) -> None:
        """Go over to the next round, if the error says that there is one. Otherwise the error is
        raised again."""
        kept.copies.leave_round()
        training, rounds = self.training, self.rounds
        can_leave = rounds is not None and (rounds.is_confirmed or rounds.is_replacement)
        next_group = self._find_next_round(error, can_leave)
        assert rounds is not None
        left, kept.output = kept.output or training, None
        if training is not None:
            kept.left_step = training.step
            training.leave_round()
        if isinstance(left, SessionEngine) and isinstance(error, RegroupRequested):
            kept.output = left if left.group.world.rank == 0 else None
        elif left is not None:
            left.release_output()  # to be opened again, perhaps at an earlier step
        training = left = None
        self._enter_round(error, next_group)
        assert self._rng_state is not None
        restore_rng_state(self._rng_state, *get_process_devices(rounds.world))

    def _find_next_round(self, error: BaseException, can_leave: bool) -> RankGroup:
        """Return the group of the next round, if the error says that there is one. Otherwise the
        error is raised again, or what has caused it."""
        assert self.group is not None
        if self.rounds is not None and can_leave and is_round_end(error):
            self.group.interrupt_process_group()  # so that all leave the round
            # A leader that has fallen silent is noticed first, and another one elected.
            limit_s = _NEXT_ROUND_TIMEOUT_S + 2 * self.config.launch.silence_s
            first_slot = self.rounds.round.slots[0]
            found = self.rounds.wait_for_next_round(self.group, limit_s)
            if found is None and self.rounds.is_left_out:
                raise RankLeft
            if found is not None:
                is_rank_0_gone = first_slot not in self.rounds.round.slots
                if is_rank_0_gone and found.world.rank == 0 and isinstance(error, RegroupRequested):
                    self._wait_for_output(self.group)
                return found
        raise (error.__cause__ if isinstance(error, RoundLost) else None) or error

    def _leave_world(self) -> ExitCode:
        """End as a rank of a node that leaves on purpose. If it was rank 0, another one goes on
        with its files."""
        if self.training is not None:
            self.training.leave_round()
            self.training.release_output()
        self._close_mirror()
        if self.rank == 0 and self.group is not None and self.group.store is not None:
            with contextlib.suppress(dist.DistError):
                self.group.set_value(_RELEASED_KEY, "1")
        return ExitCode.LEFT

    def _wait_for_output(self, group: RankGroup) -> None:
        """Wait until a rank 0 that leaves on purpose has closed the files of the run."""
        deadline = time.monotonic() + _RELEASE_TIMEOUT_S
        assert group.store is not None
        with contextlib.suppress(dist.DistError):  # it was killed before
            while not group.store.check([_RELEASED_KEY]) and time.monotonic() < deadline:
                time.sleep(_POLL_S)

    def _enter_round(self, error: BaseException, next_group: RankGroup) -> None:
        """Close the group of a round that this process has left because of an error, and enter the
        next one."""
        assert self.group is not None
        self.training = None
        self.heartbeat.suspend()
        held: BaseException | None = error
        while held is not None:
            held.__traceback__ = None  # whose frames hold what holds the process group
            held = held.__cause__ or held.__context__
        self.group.close_process_group()
        gc.collect()
        self._enter_group(next_group)

    def _enter_group(self, group: RankGroup) -> None:
        """Note which rank this process is from now on."""
        self.group, self.rank = group, group.world.rank
        if group.store is not None:  # as every rank says in the first round
            group.set_value(f"rank {self.rank}", socket.gethostname())
        if self.rank != 0 and self.mirror is not None:  # the new rank 0 takes it
            self.mirror.close(FAILED_LIMIT_S, lambda seconds: self.heartbeat.suspend())
            self.mirror = None

    def _run_session(self, function: Callable[..., Any], world: World) -> ExitCode:
        """Call the function that has a loop of its own; returns how it ended."""
        assert self.run is not None
        entry = self.run.get_entry_point(self.config, world.node_rank)
        settings = self.config.experiment_settings

        def prepare(kept: KeptLoop | None) -> tuple[Training | SessionEngine, Callable[[], None]]:
            engine, _ = prepare_session(*self._rank_parts, kept=kept)
            provided: dict[str, Any] = {"session": Session(engine)}
            if info_parameter := find_info_parameter(function):
                provided[info_parameter] = engine.make_info()

            def run_loop() -> None:
                call_function(function, entry, settings, **provided)
                engine.finish("the training function returned")

            return engine, run_loop

        assert self.group is not None
        return self._run_in_rounds(prepare, WholeCopies(self.group))

    def open_session(self) -> SessionEngine:
        """Return the engine of a script's session, whose loop is about to begin."""
        engine, _ = prepare_session(*self._rank_parts)
        self._begin_loop(engine, is_first=True)
        return engine

    def _run_loop(self, run_loop: Callable[[], None]) -> ExitCode:
        """Run a loop to its end; returns how it ended."""
        try:
            run_loop()
        except TrainingStopped:
            return ExitCode.PREEMPTED
        return ExitCode.OK

    def _begin_loop(self, training: Training | SessionEngine, is_first: bool) -> None:
        """Note that the loop of a training begins, in the first round or in a later one."""
        assert self.run is not None
        self.training = training
        if not is_first:
            if self.rank == 0:
                self._take_over_run(training)
            return
        training.mirror = self.mirror
        training.start_mirror()
        self._began = (training.step, time.monotonic())
        if self.rank == 0:
            training.on_first_step = partial(record_first_step, self.run)
            if isinstance(training, Training) or training.evaluations.evaluator is not None:
                self.run.update_status(best_is=training.config.trainer.best_is)
            record_training(self.run, training.step, training.samples)

    def _take_over_run(self, training: Training | SessionEngine) -> None:
        """Go on as rank 0 with what another process may have begun."""
        if not self._began[1]:
            phase = read_history(training.run, is_running=True).phases[-1]
            self._began = (phase.first_step or 0, time.monotonic() - phase.trained_s)
        if self.mirror is None and self.config.trainer.mirror is not None:
            self.config, self.mirror = begin_mirror(self.config, training.run, _print_message)
        if training.mirror is None:  # otherwise it goes on with that of the round before
            training.mirror = self.mirror
            training.start_mirror()

    def _start_heartbeat(self, run: Run, world: World) -> None:
        """Lets the agent see progress, and request a stack trace where there is none."""
        self.heartbeat = Heartbeat(run.get_heartbeat_file(world.node_rank), world.local_rank)
        answer_stack_requests(run, world.rank)
        faulthandler.enable()  # a crash in native code leaves the Python stack in the log

    def _open_run(self, run: Run, world: World) -> None:
        """Opens rank 0's log and marks the run as running.

        A submitted command has both already: its output is the log, and its launcher's process
        is the one to signal. Of a rank without an agent, this process is the writer of the folder.
        """
        start_writer_beats(run)
        start: dict[str, Any] = {}
        if not self._is_submitted:
            self.output.log_to(run.get_rank_log_file(0))
            if not self.has_agent:
                start = make_starting_status("inline", world.nodes, world.size)
        now = {"state": "running", "since": time.time(), "pid": os.getpid(), "failure": None}
        run.update_status(**start | now, launch_id=get_launch_id(os.environ))
        status = run.read_status_file()
        job = status.get("job") or os.environ.get("SLURM_JOB_ID")
        launcher = str(status.get("launcher") or "")
        submitted = self._is_submitted
        is_on_gpu = world.devices[0].startswith("cuda")
        gpus = world.size * len(world.devices) if is_on_gpu else 0
        if self.config.launch.share_devices:
            gpus = min(gpus, world.nodes * count_visible_gpus(os.environ))
        cpus = count_cores(world.size // world.nodes or 1, torch.get_num_threads()) * world.nodes
        size = (world.nodes, world.size)
        record_start(run, launcher, *size, job, submitted, os.environ, gpus=gpus, cpus=cpus)
        if not self.has_agent and not submitted:
            self.news = start_news(run, self.config)

    @property
    def _is_submitted(self) -> bool:
        """Whether the run is that of a submitted command, of which this training is a part."""
        return self.run is not None and self.run == get_submitted_run(os.environ)

    def _record_end(self, run: Run, state: str, **fields: Any) -> None:
        """Writes how the training ended.

        The state of a submitted command is its launcher's to write: the command may have more to
        do. Of a batch job Slurm knows whether it is over, and nobody else writes its state.
        """
        is_ours = not self._is_submitted or run.read_job_id()
        run.update_status(**fields | ({"state": state} if is_ours else {}))

    def _require_final_snapshot(self, outcome: ExitCode) -> None:
        """Raises where a finished run could not save its last state.

        A disk that was full for a while is only a warning; one that is full at the end has lost
        what was computed. A run that was stopped is not failed for it: it continues from the
        snapshot before, may be queued again, and the disk may have room then.
        """
        t = self.training
        assert t is not None
        if t.unsaved_reason is not None and outcome is ExitCode.OK:
            raise EchelonError(
                Fault(
                    f"finished after step {t.step} of {t.total_steps}, but this step is not "
                    f"saved: {t.unsaved_reason}",
                    f"fix that, then continue: {suggest_resume(t.run, t.config.script)}",
                ),
                exit=ExitCode.FAILED,
            )

    def _write_final_status(
        self, outcome: ExitCode, first_step: int, begun: float, mirrored: str
    ) -> None:
        """Writes the final status and prints the summary of the run."""
        t = self.training
        assert t is not None
        state = "preempted" if outcome is ExitCode.PREEMPTED else "finished"
        self._record_end(t.run, state, step=t.step, total_steps=t.total_steps, best=t.best_value)
        seconds = time.monotonic() - begun
        stopped_by = self.stop.find_reason() if outcome is ExitCode.PREEMPTED else ""
        cause = f"stopped by {stopped_by}" if stopped_by else state
        record_stop(t.run, t.step, t.samples, cause)
        history = read_history(t.run, is_running=False)
        progress = TrainingProgress(first_step, t.step, t.total_steps, seconds, history.trained_s)
        effective = ""
        if (accounting := account_for_run(history)) is not None:
            t.run.update_status(accounting=accounting.to_json())
            effective = format_effective_time(accounting) if accounting.has_faults else ""
        if t.copies is not None:
            t.run.update_status(memory_copies=t.copies.describe())
        tracked = t.close_trackers(outcome)
        longer = "trainer.epochs" if t.config.trainer.steps is None else "trainer.steps"
        text = render_summary(
            t.run,
            outcome,
            progress,
            stopped_by,
            {"effective": effective, "mirror": mirrored, **tracked},
            longer,
            t.unsaved_reason,
            t.config.script,
        )
        print(text, file=sys.stderr)

    def handle_failure(self, error: BaseException) -> int:
        """Reports the failure to the other ranks, the agent, the run's status and the screen;
        returns the exit code."""
        # First: a loader process of the experiment's own that dies now must not raise in here.
        remove_death_signal()
        if self.training is not None:
            self.training.close_screen()
        failure = self._find_cause(error)
        if self._leaves_alone(error):
            assert self.rounds is not None
            self.rounds.report_transient(failure)
            print(failure, file=sys.stderr, flush=True)
            return ExitCode.TRANSIENT
        if self.group is not None:
            self.group.publish_failure(failure, wait_for_readers=not self.has_left_group)
        if self.has_agent and (self.group is None or self.group.store is None):
            if self.rounds is not None:
                self.rounds.publish_failure(failure)
            else:
                publish_failure_to_agent(failure, os.environ)
        if self.run is not None and self.rank == 0 and not self.has_agent:
            self._record_end(self.run, "failed", step=failure.step, failure=failure.__dict__)
        if self.run is not None and self.rank == 0:
            samples = self.training.samples if self.training is not None else None
            record_stop(self.run, failure.step, samples, f"failed: {failure.summary}")
        if not (self.has_agent and self.rank == 0):  # there the agent prints it, once
            print(failure, file=sys.stderr, flush=True)
        self._close_trackers()
        return failure.exit

    def _leaves_alone(self, error: BaseException) -> bool:
        """Return whether this rank ends alone, to be replaced while the others go on."""
        from echelon.monitoring.out_of_memory import find_out_of_memory

        if self.rounds is None or self.has_left_group:
            return False
        if not self.rounds.is_confirmed:  # a failure of a replacement is no matter of the others
            return self.rounds.is_replacement
        return isinstance(error, TransientError) or find_out_of_memory(error) is not None

    def _close_trackers(self) -> None:
        """Closes the trackers of a failed run."""
        if self.training is None:
            return
        for line in format_rows(self.training.close_trackers(ExitCode.FAILED)):
            print(line, file=sys.stderr, flush=True)

    def _find_cause(self, error: BaseException) -> Failure:
        """Return the first failure of the world, which need not be this rank's own.

        A broken connection is rarely the cause: the rank that failed first gets some seconds to say
        so. Running out of memory, a loader process that died and a loss that got the wrong output
        are explained in sentences.
        """
        from echelon.monitoring.out_of_memory import explain_out_of_memory, find_out_of_memory

        if isinstance(error, PeerFailedError):
            return error.failure
        part_error = error if isinstance(error, PartInputError) else None
        if part_error is not None and part_error.__cause__ is not None:
            error = part_error.__cause__
        if dead_loader := explain_dead_loader(error, self.config.trainer.loader_workers):
            error, part_error = dead_loader, None
        if self.group is not None and _is_connection_error(error):
            peer_failure = self.group.wait_for_failure(_CAUSE_TIMEOUT_S)
            if peer_failure is not None:
                return peer_failure
        if self.group is not None and (full := find_out_of_memory(error)):
            training = self.training if isinstance(self.training, Training) else None
            error = explain_out_of_memory(full, self.config, self.group.world, self.run, training)
            part_error = None
        elif part_error is None and (mistake := self._explain_mistake(error)):
            error = mistake
        is_check = self.training is not None and self.training.is_sanity_check
        step = self.heartbeat.step if self.training is not None and not is_check else None
        # A loss of the user's own keeps its traceback, with the remedy as a hint; the traceback of
        # a loss of torch would show the user nothing, so the fault replaces it.
        if part_error is not None and not failures.find_user_frame_indices(error):
            error = EchelonError(part_error.fault, exit=part_error.exit)
        hint = part_error.fault.do if part_error is not None else suggest_remedy(error)
        if is_check:
            hint = f"{hint}; {_SANITY_HINT}" if hint else _SANITY_HINT
        return failures.make_failure_from_exception(error, self.rank, step, hint)

    def _explain_mistake(self, error: BaseException) -> EchelonError | None:
        """Return the error of a mistake in the experiment that torch reports in its own words."""
        location = failures.find_last_user_line(error)
        if location and (fault := explain_process_group_error(error, location)):
            return EchelonError(fault)
        if not isinstance(self.training, Training) or isinstance(error, EchelonError):
            return None
        if failures.is_from_user_code(error):
            return None
        data_name = "eval_data" if self.training.evaluations.is_running else "train_data"
        fault = explain_batch_error(error, self.training.experiment, data_name)
        return EchelonError(fault, exit=ExitCode.FAILED) if fault else None


def _detect_world(config: Config) -> World:
    """Return this process's place in the world, and set torch's number of threads."""
    world = detect(
        os.environ,
        rank=config.rank,
        world_size=config.world_size,
        master=config.master,
        visible_devices=count_visible_gpus(os.environ),
        devices_per_replica=config.replica.devices,
        share_devices=config.launch.share_devices,
    ).world
    if config.launch.threads:
        torch.set_num_threads(config.launch.threads)
    return world


def _require_valid_world(config: Config, world: World) -> None:
    """Raises faults that depend on the world: its size and its devices."""
    faults = find_size_faults(config, world.size)
    if world.devices[0].startswith("cpu"):
        faults += check_cpu_support(config)
    if faults:
        raise EchelonError(*faults)


def _warn_about_cpu(config: Config, world: World) -> None:
    """Warns where GPUs were requested but torch sees none.

    A torch without CUDA, or a missing driver, would otherwise be noticed only by the hours it
    takes.
    """
    asked = config.launch.gpus_per_node
    if asked and world.devices[0].startswith("cpu") and world.local_rank == 0:
        print(
            f"warning: launch.gpus_per_node={asked}, but torch {torch.__version__} sees no GPU on "
            f"{socket.gethostname()}, so it trains on the CPU; `echelon doctor` there says why",
            file=sys.stderr,
        )


def _print_message(text: str) -> None:
    print(text, file=sys.stderr)


def agree_on_run(config: Config, group: RankGroup) -> Run:
    """Return the run of this world. Rank 0 creates the folder; the others receive its path."""
    folder = ""
    if group.world.rank == 0:
        if get_submitted_run(os.environ) is not None:
            run = take_submitted_run(config, os.environ)
        elif (run := find_restarted_run(config, os.environ)) is not None:
            claim_run_folder(run)
        folder = str((run or create_run(config)).folder)
    return Run(Path(group.share_from_rank0("run", folder)))


def _is_connection_error(error: BaseException) -> bool:
    """Return whether a rank sees such an error when another one dies. It is never the cause."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or "gloo" in text or "connection " in text

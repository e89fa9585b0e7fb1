"""Build the experiment on this rank, restore its snapshot, put the parts of the loop together."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from echelon.config.schema import Config
from echelon.data.batches import TensorSource, WholeBatches, source_of
from echelon.errors import EchelonError, Fault
from echelon.pulse import Pulse
from echelon.runs import Run
from echelon.track.choice import trackers
from echelon.track.screen import screen
from echelon.train.blocks import blocks_of, recompute, require_blocks, require_shardable
from echelon.train.capture import Capture, not_captured, obstacle, of_all, too_few
from echelon.train.checks import require_best
from echelon.train.compiled import Compiled
from echelon.train.evaluate import Evaluator
from echelon.train.experiment import Experiment, build_experiment
from echelon.train.group import Group
from echelon.train.loop import Training
from echelon.train.modes import begin_training
from echelon.train.optimizers import Ways, follow, fuse
from echelon.train.output import Output
from echelon.train.precision import Precision
from echelon.train.profile import profile_of
from echelon.train.replica import Replica
from echelon.train.resume import choose
from echelon.train.same_data import require_same_data
from echelon.train.schedule import Schedule
from echelon.train.shards import ShardedWriter, collect_rows, collect_whole, folder_is_shared
from echelon.train.speed import speed_of
from echelon.train.stages import Sample, Stage, accept, described, devices_of, place
from echelon.train.state import load_model, restore, seed_all
from echelon.train.stop import Stop
from echelon.train.tables import require_same_rows
from echelon.train.writer import Writer
from echelon.utils.text import format_count
from echelon.world import World

_BUILD_TIMEOUT_S = 3600.0
"""Ranks may need very different times to prepare data; a failure is told at once all the same."""


def prepare(
    config: Config, run: Run, group: Group, stop: Stop, pulse: Pulse, output: Output
) -> Training:
    trainer, world = config.trainer, group.world
    devices = devices_of(world)
    device = devices[0]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    seed_all(config.seed)  # the same weights on every rank
    entry = run.entry(config, world.node_rank)
    experiment, by_hand = build_experiment(entry, config.settings, devices)
    require_best(trainer.best, experiment)
    if world.size > 1:
        _require_real(experiment.model)
        require_same_rows(experiment.model)
    speed = speed_of(experiment, config, group)  # whose model is as the user gave it
    sharded = config.replica.kind == "fsdp"
    # Shards go to their device block by block, as all of them together need not fit.
    stages = [] if sharded else _place(experiment, config, world, by_hand)
    blocks = _blocks(experiment, config)
    follow(experiment.optimizer)
    ways = Ways(experiment.optimizer)
    precision = Precision(trainer.precision, device)
    precision.use(experiment)
    source = source_of(experiment.train_data, "train_data", trainer.loader_workers, device)
    evaluator = _evaluator(experiment, config, group, devices, pulse, precision)
    group.all_ready("built", _BUILD_TIMEOUT_S)
    require_same_data(experiment, group)
    group.open(_backend(device, config.launch.share_devices))
    seed_all(config.seed + 1 + world.rank)  # other random numbers on every rank
    training = Training(
        config=config,
        run=run,
        group=group,
        experiment=experiment,
        source=source,
        evaluator=evaluator,
        stop=stop,
        pulse=pulse,
        device=device,
        ways=ways,
    )
    # The schedule takes the experiment's rates, so it is made before a snapshot brings others.
    training.schedule = Schedule(trainer, training.total_steps, experiment)
    _go_on(training)
    training.profile = profile_of(
        trainer.profile, training.step, training.total_steps, run.traces, world.rank, device
    )
    training.speed = speed
    fuse(experiment, device)
    if world.rank == 0:
        training.writer = Writer(run.snapshots, trainer.keep_last, after=training.step)
    if sharded:
        _shard(training, blocks, precision)
    else:
        training.replica = replica = Replica(experiment, world, device, trainer, precision, pulse)
        replica.capture = _capture(training, replica)
    begin_training(experiment.model)
    if world.rank == 0:
        for line in (_opening(training, stages), *_notes(training)):
            _say(line)
        training.trackers = trackers(config, run, training.step)
        training.screen = screen(config.track.progress, training.total_steps, training.step)
        output.above(training.screen.show)
    training.speed.restart(training.step, training.samples)
    return training


def _place(experiment: Experiment, config: Config, world: World, by_hand: bool) -> list[Stage]:
    devices, cpu = devices_of(world), torch.device("cpu")
    if len(devices) == 1:
        experiment.model.to(devices[0])
        return []
    if by_hand:
        return accept(experiment, world.devices, devices)
    data = source_of(experiment.train_data, "train_data", 0, cpu)
    # Two, as some layers do not take one.
    few = next(data.batches(WholeBatches(min(2, len(data)), 2, 0, 1), 0, cpu))
    share = config.trainer.batch_size / world.size / config.trainer.accumulate
    return place(experiment, world.devices, devices, Sample(few.data, share / few.mine))


def _require_real(model: nn.Module) -> None:
    faults = [
        Fault(
            f"the model's {name} is complex, which one process alone can train: gradients are "
            "sent as real numbers",
            "hold it as two real parts and put them together in forward: torch.view_as_complex",
        )
        for name, p in model.named_parameters()
        if p.is_complex()
    ]
    if faults:
        raise EchelonError(*faults)


def _capture(t: Training, replica: Replica) -> Capture | None:
    """The step as a CUDA graph, where it is wished and can be."""
    trainer, size = t.config.trainer, t.group.world.size
    must, left = trainer.capture == "always", t.total_steps - t.step
    if trainer.capture == "never" or left <= 0 or (not must and t.device.type != "cuda"):
        return None
    reason = too_few(left, must)
    if len(t.group.world.devices) > 1:
        reason = "the model lies on several devices"
    elif size > 1 and t.config.launch.share_devices:
        reason = "ranks that share a GPU send each other their gradients through the host"
    reason = of_all(reason or obstacle(t.experiment, t.source, t.device, size, trainer), size)
    if reason is None and isinstance(t.source, TensorSource):
        told, e = replica.numbers_told, t.experiment
        return Capture(replica.whole_step, replica.abandon, e, t.source, trainer, size, told)
    not_captured(reason or "", must)
    return None


def _backend(device: torch.device, share_devices: bool) -> str:
    """NCCL for GPUs, except that it refuses two ranks on one; gloo for what lies on the CPU."""
    on_gpu = device.type == "cuda" and not share_devices
    return "cpu:gloo,cuda:nccl" if on_gpu else "gloo"


def _evaluator(
    experiment: Experiment,
    config: Config,
    group: Group,
    devices: Sequence[torch.device],
    pulse: Pulse,
    precision: Precision,
) -> Evaluator | None:
    if experiment.eval_data is None:
        return None
    first, last = devices[0], devices[-1]
    source = source_of(experiment.eval_data, "eval_data", config.trainer.loader_workers, first)
    size = config.trainer.eval_batch_size or config.trainer.batch_size
    return Evaluator(experiment, source, size, group, first, last, pulse.beat, precision)


def _go_on(training: Training) -> None:
    """Take state and position from the snapshot this run goes on from, if there is one."""
    group, run = training.group, training.run
    snapshot = choose(training.config, run, _say) if group.world.rank == 0 else None
    info: dict[str, Any] | None = None
    if snapshot is not None:
        info = {**snapshot.info, "folder": str(snapshot.folder)}
        load_model(training.experiment, snapshot.load("model"))  # DDP spreads the weights
    # What is wrong with a snapshot only rank 0 sees; the others must not be in a collective then.
    group.all_ready("restored", _BUILD_TIMEOUT_S)
    info = group.broadcast_json(info)
    if info is None:
        return
    parts = {p: snapshot.load(p) for p in ("optimizer", "rng")} if snapshot else {}
    given = training.config.trainer.resume != "auto"
    restore(training.experiment, training.ways, parts, group, given)
    training.take_up(info)


def _blocks(experiment: Experiment, config: Config) -> list[nn.Module]:
    """The layers that are sharded or recomputed one by one."""
    choice = config.replica
    if choice.kind == "fsdp":
        require_shardable(experiment.model)
    if choice.kind != "fsdp" and not choice.checkpoint:
        return []
    blocks = blocks_of(experiment.model, choice.blocks)
    if choice.checkpoint:
        require_blocks(blocks)
        recompute(blocks)
    return blocks


def _shard(t: Training, blocks: list[nn.Module], precision: Precision) -> None:
    """Share the model out, and let every rank write what it then holds."""
    # torch's part of it takes a while to import where nothing else has.
    from echelon.train.sharded import ShardedReplica, Spare
    from echelon.train.sharding import shard

    trainer, run, world = t.config.trainer, t.run, t.group.world
    if trainer.compile:
        if not blocks and world.rank == 0:
            _say(
                "trainer.compile=true: not compiled: fsdp compiles layer by layer, and the model "
                "has no ModuleList or Sequential of them; name them with replica.blocks=[Block]"
            )
        for block in blocks:
            block.forward = Compiled(block.forward, t.pulse)
    shard(t.experiment, blocks, t.device, trainer)
    spare = Spare(t.source, t.device)
    t.replica = ShardedReplica(t.experiment, world, t.device, trainer, precision, t.pulse, spare)
    if t.evaluator is not None:
        t.evaluator.spare = Spare(t.evaluator.source, t.device)
    if folder_is_shared(run.snapshots, t.group):
        t.collect = collect_rows
        writer = t.writer if isinstance(t.writer, Writer) else None
        t.writer = ShardedWriter(run.snapshots, t.group, writer)
    else:
        t.collect = collect_whole
        if world.rank == 0:
            _say(f"note: not all ranks see {run.snapshots}, so rank 0 saves for all")


def _opening(t: Training, stages: Sequence[Stage]) -> str:
    """What is about to happen, in one line."""
    size, kind = t.group.world.size, t.device.type
    where = f"{size} processes ({kind})" if size > 1 else f"one process ({t.device})"
    if stages:
        kind = "stages" if kind == "cpu" else "devices"
        count = f"{size} processes" if size > 1 else "one process"
        where = f"{count} × {len(t.group.world.devices)} {kind} ({described(stages)})"
    if t.config.replica.kind == "fsdp":
        where += ", which share the model"
    batch = t.config.trainer.batch_size
    what = f"{format_count(t.size, 'sample')} in batches of {batch:,}"
    return f"run {t.run.name}: {format_count(t.total_steps, 'step')} over {what} on {where}"


def _notes(t: Training) -> Iterator[str]:
    """What is not as somebody who set it may think."""
    trainer = t.config.trainer
    if trainer.batch_size > t.size:
        yield (
            f"note: trainer.batch_size={trainer.batch_size}, but there "
            f"{'is' if t.size == 1 else 'are'} {format_count(t.size, 'sample')}: every step takes "
            "all of them"
        )
    if trainer.precision == "tf32" and t.device.type == "cpu":
        yield "note: trainer.precision=tf32 is for GPUs; on this CPU it is float32"
    if trainer.compile and t.step < t.total_steps:
        yield "note: the first steps compile the model, which takes a while"


def _say(text: str) -> None:
    print(text, file=sys.stderr)

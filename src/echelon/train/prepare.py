"""Build the experiment on this rank, restore its snapshot, put the parts of the loop together."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from echelon.config.schema import Config
from echelon.cudagraph.capture import (
    StepCapture,
    agree_on_obstacle,
    find_obstacle,
    find_step_shortage,
    report_obstacle,
)
from echelon.data.batches import EvalOrder, TensorSource, make_source
from echelon.errors import EchelonError, Fault
from echelon.experiment.checks import require_best_metric
from echelon.experiment.compilation import CompiledFunction
from echelon.experiment.definition import Experiment, build_experiment
from echelon.experiment.module_modes import enter_train_mode
from echelon.experiment.optimizer_flags import (
    OptimizerFlags,
    enable_fused_kernels,
    move_state_to_parameters,
)
from echelon.experiment.precision import Precision
from echelon.monitoring.profiler import create_profiler
from echelon.monitoring.speed import create_speed_monitor
from echelon.parallel.ddp_replica import DDPReplica
from echelon.parallel.layer_blocks import (
    checkpoint_blocks,
    find_blocks,
    require_blocks,
    require_shardable,
)
from echelon.parallel.model_parallel import (
    ModelStage,
    SampleBatch,
    describe_manual_placement,
    describe_stages,
    get_devices,
    split_model,
)
from echelon.parallel.process_group import RankGroup
from echelon.parallel.sparse_tables import require_no_max_norm
from echelon.runs.heartbeat import Heartbeat
from echelon.runs.run_folder import Run
from echelon.snapshot.distributed_writer import (
    DistributedSnapshotWriter,
    collect_shards,
    gather_full_state,
    is_folder_shared,
)
from echelon.snapshot.state import load_model, restore_state, seed_all
from echelon.snapshot.writer import SnapshotWriter
from echelon.tracking.create import create_trackers
from echelon.tracking.progress import create_progress_display
from echelon.train.evaluate import Evaluator
from echelon.train.loop import Training
from echelon.train.lr_schedule import LRSchedule
from echelon.train.output_tee import OutputTee
from echelon.train.resume import choose_snapshot
from echelon.train.same_data_check import require_same_data
from echelon.train.stop_signals import StopSignals
from echelon.utils.text import format_count
from echelon.world import World

_BUILD_TIMEOUT_S = 3600.0
"""Ranks may need very different times to prepare data; a failure is told at once all the same."""


def prepare_training(
    config: Config,
    run: Run,
    group: RankGroup,
    stop: StopSignals,
    pulse: Heartbeat,
    output: OutputTee,
) -> Training:
    trainer, world = config.trainer, group.world
    devices = get_devices(world)
    device = devices[0]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    seed_all(config.seed)  # the same weights on every rank
    entry = run.get_entry(config, world.node_rank)
    experiment, is_placed_by_user = build_experiment(entry, config.experiment_settings, devices)
    require_best_metric(trainer.best, experiment)
    if world.size > 1:
        _require_real_parameters(experiment.model)
        require_no_max_norm(experiment.model)
    speed = create_speed_monitor(experiment, config, group)  # whose model is as the user gave it
    is_sharded = config.replica.kind == "fsdp"
    # Shards go to their device block by block, as all of them together need not fit.
    stages = [] if is_sharded else _place_model(experiment, config, world, is_placed_by_user)
    blocks = _prepare_blocks(experiment, config)
    move_state_to_parameters(experiment.optimizer)
    optimizer_flags = OptimizerFlags(experiment.optimizer)
    precision = Precision(trainer.precision, device)
    precision.configure(experiment)
    source = make_source(experiment.train_data, "train_data", trainer.loader_workers, device)
    evaluator = _make_evaluator(experiment, config, group, devices, pulse, precision)
    group.wait_for_all("built", _BUILD_TIMEOUT_S)
    require_same_data(experiment, group)
    group.init_process_group(_choose_backend(device, config.launch.share_devices))
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
        optimizer_flags=optimizer_flags,
    )
    # The schedule takes the experiment's rates, so it is made before a snapshot brings others.
    training.schedule = LRSchedule(trainer, training.total_steps, experiment)
    _restore_snapshot(training)
    training.profile = create_profiler(
        trainer.profile, training.step, training.total_steps, run.traces_folder, world.rank, device
    )
    training.speed = speed
    enable_fused_kernels(experiment, device)
    if world.rank == 0:
        training.writer = SnapshotWriter(
            run.snapshots_folder, trainer.keep_last, resumed_step=training.step
        )
    if is_sharded:
        _shard_training(training, blocks, precision)
    else:
        training.replica = replica = DDPReplica(
            experiment, world, device, trainer, precision, pulse
        )
        replica.capture = _make_capture(training, replica)
    enter_train_mode(experiment.model)
    if world.rank == 0:
        for line in (_format_opening_line(training, stages), *_find_notes(training)):
            _print_message(line)
        training.trackers = create_trackers(config, run, training.step)
        training.screen = create_progress_display(
            config.track.progress, training.total_steps, training.step
        )
        output.show_above_bar(training.screen.show)
    training.speed.restart_interval(training.step, training.samples)
    return training


def _place_model(
    experiment: Experiment, config: Config, world: World, is_placed_by_user: bool
) -> list[ModelStage]:
    devices, cpu = get_devices(world), torch.device("cpu")
    if len(devices) == 1:
        experiment.model.to(devices[0])
        return []
    if is_placed_by_user:
        return describe_manual_placement(experiment, world.devices, devices)
    data = make_source(experiment.train_data, "train_data", 0, cpu)
    # Two, as some layers do not take one.
    few_samples = next(data.batches(EvalOrder(min(2, len(data)), 2, 0, 1), 0, cpu))
    microbatch_size = config.trainer.batch_size / world.size / config.trainer.accumulate
    return split_model(
        experiment,
        world.devices,
        devices,
        SampleBatch(few_samples.data, microbatch_size / few_samples.sample_count),
    )


def _require_real_parameters(model: nn.Module) -> None:
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


def _make_capture(t: Training, replica: DDPReplica) -> StepCapture | None:
    """The step as a CUDA graph, where it is wished and can be."""
    trainer, size = t.config.trainer, t.group.world.size
    is_required, steps_left = trainer.capture == "always", t.total_steps - t.step
    if (
        trainer.capture == "never"
        or steps_left <= 0
        or (not is_required and t.device.type != "cuda")
    ):
        return None
    reason = find_step_shortage(steps_left, is_required)
    if len(t.group.world.devices) > 1:
        reason = "the model lies on several devices"
    elif size > 1 and t.config.launch.share_devices:
        reason = "ranks that share a GPU send each other their gradients through the host"
    reason = agree_on_obstacle(
        reason or find_obstacle(t.experiment, t.source, t.device, size, trainer), size
    )
    if reason is None and isinstance(t.source, TensorSource):
        told, e = replica.result_width, t.experiment
        return StepCapture(
            replica.run_capturable_step, replica.abandon_step, e, t.source, trainer, size, told
        )
    report_obstacle(reason or "", is_required)
    return None


def _choose_backend(device: torch.device, share_devices: bool) -> str:
    """NCCL for GPUs, except that it refuses two ranks on one; gloo for what lies on the CPU."""
    on_gpu = device.type == "cuda" and not share_devices
    return "cpu:gloo,cuda:nccl" if on_gpu else "gloo"


def _make_evaluator(
    experiment: Experiment,
    config: Config,
    group: RankGroup,
    devices: Sequence[torch.device],
    pulse: Heartbeat,
    precision: Precision,
) -> Evaluator | None:
    if experiment.eval_data is None:
        return None
    first, last = devices[0], devices[-1]
    source = make_source(experiment.eval_data, "eval_data", config.trainer.loader_workers, first)
    size = config.trainer.eval_batch_size or config.trainer.batch_size
    return Evaluator(experiment, source, size, group, first, last, pulse.beat, precision)


def _restore_snapshot(training: Training) -> None:
    """Take state and position from the snapshot this run goes on from, if there is one."""
    group, run = training.group, training.run
    snapshot = (
        choose_snapshot(training.config, run, _print_message) if group.world.rank == 0 else None
    )
    info: dict[str, Any] | None = None
    if snapshot is not None:
        info = {**snapshot.info, "folder": str(snapshot.folder)}
        load_model(training.experiment, snapshot.load_part("model"))  # DDP spreads the weights
    # What is wrong with a snapshot only rank 0 sees; the others must not be in a collective then.
    group.wait_for_all("restored", _BUILD_TIMEOUT_S)
    info = group.broadcast_json(info)
    if info is None:
        return
    parts = {p: snapshot.load_part(p) for p in ("optimizer", "rng")} if snapshot else {}
    given = training.config.trainer.resume != "auto"
    restore_state(training.experiment, training.optimizer_flags, parts, group, given)
    training.restore_progress(info)


def _prepare_blocks(experiment: Experiment, config: Config) -> list[nn.Module]:
    """The layers that are sharded or recomputed one by one."""
    choice = config.replica
    if choice.kind == "fsdp":
        require_shardable(experiment.model)
    if choice.kind != "fsdp" and not choice.checkpoint:
        return []
    blocks = find_blocks(experiment.model, choice.blocks)
    if choice.checkpoint:
        require_blocks(blocks)
        checkpoint_blocks(blocks)
    return blocks


def _shard_training(t: Training, blocks: list[nn.Module], precision: Precision) -> None:
    """Share the model out, and let every rank write what it then holds."""
    # torch's part of it takes a while to import where nothing else has.
    from echelon.parallel.fsdp_replica import FillerBatch, FSDPReplica
    from echelon.parallel.fsdp_wrap import shard_model

    trainer, run, world = t.config.trainer, t.run, t.group.world
    if trainer.compile:
        if not blocks and world.rank == 0:
            _print_message(
                "trainer.compile=true: not compiled: fsdp compiles layer by layer, and the model "
                "has no ModuleList or Sequential of them; name them with replica.blocks=[Block]"
            )
        for block in blocks:
            block.forward = CompiledFunction(block.forward, t.pulse)
    shard_model(t.experiment, blocks, t.device, trainer)
    get_filler_batch = FillerBatch(t.source, t.device)
    t.replica = FSDPReplica(
        t.experiment, world, t.device, trainer, precision, t.pulse, get_filler_batch
    )
    if t.evaluator is not None:
        t.evaluator.get_filler_batch = FillerBatch(t.evaluator.source, t.device)
    if is_folder_shared(run.snapshots_folder, t.group):
        t.collect_state = collect_shards
        writer = t.writer if isinstance(t.writer, SnapshotWriter) else None
        t.writer = DistributedSnapshotWriter(run.snapshots_folder, t.group, writer)
    else:
        t.collect_state = gather_full_state
        if world.rank == 0:
            _print_message(
                f"note: not all ranks see {run.snapshots_folder}, so rank 0 saves for all"
            )


def _format_opening_line(t: Training, stages: Sequence[ModelStage]) -> str:
    """What is about to happen, in one line."""
    size, kind = t.group.world.size, t.device.type
    where = f"{size} processes ({kind})" if size > 1 else f"one process ({t.device})"
    if stages:
        kind = "stages" if kind == "cpu" else "devices"
        count = f"{size} processes" if size > 1 else "one process"
        where = f"{count} × {len(t.group.world.devices)} {kind} ({describe_stages(stages)})"
    if t.config.replica.kind == "fsdp":
        where += ", which share the model"
    batch = t.config.trainer.batch_size
    what = f"{format_count(t.size, 'sample')} in batches of {batch:,}"
    return f"run {t.run.name}: {format_count(t.total_steps, 'step')} over {what} on {where}"


def _find_notes(t: Training) -> Iterator[str]:
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


def _print_message(text: str) -> None:
    print(text, file=sys.stderr)

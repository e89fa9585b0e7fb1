"""Builds everything that a training needs on this rank: experiment, process group, snapshot,
replica."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from echelon.config.schema import Config
from echelon.data.bad_samples import BadSampleList
from echelon.data.batch_transform import BatchTransform
from echelon.data.batches import EvalOrder, TensorSource
from echelon.data.sharded_stream import find_stream
from echelon.errors import EchelonError, Fault
from echelon.experiment.definition import Experiment
from echelon.experiment.error_hints import require_no_process_group
from echelon.experiment.loading import build_experiment, load_function
from echelon.experiment.memory_format import apply_memory_format
from echelon.experiment.module_modes import enter_train_mode
from echelon.experiment.optimizer_flags import (
    OptimizerFlags,
    enable_fused_kernels,
    move_state_to_parameters,
)
from echelon.experiment.precision import Precision
from echelon.experiment.schedule_length import find_epoch_schedule_notes, require_long_schedule
from echelon.monitoring.profiler import create_profiler
from echelon.monitoring.speed import create_speed_monitor
from echelon.parallel.ddp_replica import DDPReplica
from echelon.parallel.filler_batch import FillerBatch
from echelon.parallel.model_parallel import (
    SampleBatch,
    StageDescription,
    describe_manual_placement,
    format_stages,
    get_process_devices,
    split_model,
)
from echelon.parallel.process_group import RankGroup
from echelon.parallel.sparse_tables import require_no_max_norm
from echelon.runs.heartbeat import Heartbeat
from echelon.runs.history import record_slow_rank
from echelon.runs.run_folder import Run
from echelon.snapshot.finite_check import FiniteCheck
from echelon.snapshot.layout import EMA_NAME
from echelon.snapshot.state import require_savable, seed_all
from echelon.snapshot.writer import SnapshotWriter
from echelon.train.loop import Training
from echelon.train.lr_schedule import LRSchedule
from echelon.train.memory_copies import KeptLoop
from echelon.train.nonfinite_cause import copy_first_weights
from echelon.train.output_tee import OutputTee
from echelon.train.prepare_evaluation import (
    make_bad_sample_list,
    make_evaluations,
    make_evaluator,
    open_data,
    resolve_best,
)
from echelon.train.regroup import KeptTraining, restore_from_ranks
from echelon.train.restore import (
    BUILD_TIMEOUT_S,
    find_training_info,
    restore_copy,
    restore_snapshot,
)
from echelon.train.same_data_check import COMPARE_TIMEOUT_S, require_same_data
from echelon.train.stop_signals import StopSignals
from echelon.train.train_data import (
    describe_samples,
    find_stream_notes,
    open_train_data,
    require_steps,
)
from echelon.train.weight_average import WeightAverage
from echelon.utils.text import format_count
from echelon.world import World

if TYPE_CHECKING:
    from echelon.cudagraph.capture import StepCapture


def set_up_user_code(config: Config, world: World) -> None:
    """Choose this process's device and set the same random numbers on all ranks, before code of
    the user runs: it may draw weights and data."""
    device = get_process_devices(world)[0]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    seed_all(config.seed)


def load_training_function(config: Config, run: Run, world: World) -> Callable[..., Any]:
    """Return the user's function, which builds an experiment or has a loop of its own. Its file is
    imported here."""
    set_up_user_code(config, world)
    return load_function(run.get_entry_point(config, world.node_rank))


def build_parts(
    config: Config,
    run: Run,
    group: RankGroup,
    function: Callable[..., Any],
    kept: KeptLoop | None = None,
) -> tuple[Experiment, bool]:
    """Return the experiment, and whether its function has placed its layers itself. Raise what can
    be seen of its parts without computing. `kept` is there where the ranks come from another round.

    All ranks have the same seed here (`load_training_function`), so they build the same weights and
    draw the same data.
    """
    experiment, is_placed_by_user = build_experiment(
        function,
        run.get_entry_point(config, group.world.node_rank),
        config.experiment_settings,
        get_process_devices(group.world),
        partial(find_training_info, config, run, group, kept),
    )
    require_savable(experiment)
    if group.world.size > 1:
        require_no_process_group()
        _require_no_complex_parameters(experiment.model)
        require_no_max_norm(experiment.model)
    return experiment, is_placed_by_user


def prepare_training(
    config: Config,
    run: Run,
    group: RankGroup,
    stop: StopSignals,
    heartbeat: Heartbeat,
    output: OutputTee,
    experiment: Experiment,
    is_placed_by_user: bool,
    kept: KeptTraining | None = None,
    copied: KeptLoop | None = None,
) -> Training:
    """Return a training of the experiment that is ready for its first step, or for the next one
    where ranks have come from another round: with the state that they have `kept`, or to begin anew
    with one that they have `copied`.

    All ranks run the same numbered steps; the comment at each says why it stands where it stands.
    """
    trainer, world = config.trainer, group.world
    devices = get_process_devices(world)
    device = devices[0]

    # 1. Check what can be checked without computing.
    if config.replica.is_sharded:
        _require_no_own_parts(experiment, config.replica.sharding)

    # 2. Create the speed monitor while the model is still as the user gave it: it counts operations
    #    on a copy, which nothing must have wrapped or sharded.
    speed = create_speed_monitor(
        experiment,
        config,
        group,
        lambda rank, host, factor: record_slow_rank(run, rank, host, factor, heartbeat.step),
    )

    # 3. Place the model. A sharded model stays where it is: step 11 moves it block by block, as the
    #    whole model need not fit one device.
    shards = config.replica.count_shards(world.size)
    bad_samples = make_bad_sample_list(config, run)
    stages = []
    if shards == 1:
        apply_memory_format(experiment.model, trainer, device, world.rank == 0 and kept is None)
        stages = _place_model(experiment, config, world, is_placed_by_user, bad_samples)
    blocks = _prepare_blocks(experiment, config, shards > 1)

    # 4. Bring the optimizer's state to the parameters, and note its flags before we change any.
    move_state_to_parameters(experiment.optimizer)
    optimizer_flags = kept.optimizer_flags if kept is not None else None
    optimizer_flags = optimizer_flags or OptimizerFlags(experiment.optimizer)

    # 5. Set the precision, which may add a gradient scaler to the experiment.
    precision = Precision(trainer.precision, device)
    precision.configure(experiment)

    # 6. Open the data. It comes after the model, whose memory decides whether the data still fits
    #    on the GPU.
    source, plan = open_train_data(
        config,
        group,
        device,
        experiment.train_data,
        "train_data",
        batch_size=trainer.batch_size,
        workers=trainer.loader_workers,
        collate_fn=experiment.collate_fn,
        sampler=experiment.sampler,
        batch_sampler=experiment.batch_sampler,
        options=experiment.loader,
        bad_samples=bad_samples,
    )
    require_steps(source, trainer.steps, "set trainer.steps")
    transform = make_batch_transform(experiment, config, world, device)
    evaluator = make_evaluator(
        experiment, config, group, devices, heartbeat, precision, bad_samples
    )
    config = resolve_best(config, evaluator)
    evaluations = make_evaluations(experiment, config, evaluator)

    # 7. Wait for all ranks in the store, where a failure of one ends the wait of all; only then
    #    open the process group, in whose collectives they would wait in vain.
    group.wait_for_all("built", BUILD_TIMEOUT_S)
    train_data, eval_data = experiment.train_data, experiment.eval_data
    require_same_data(group, plan, train_data=train_data, eval_data=eval_data)
    group.wait_for_all("given the same data", COMPARE_TIMEOUT_S)
    subgroups = group.init_process_group(
        choose_backend(device, config.launch.share_devices), shards
    )

    # 8. From here on every rank draws its own random numbers, for dropout and the like.
    seed_all(config.seed + 1 + world.rank)

    # 9. Restore the snapshot, which also brings the ranks' random numbers. The schedule comes
    #    before it, because it needs the experiment's learning rates, not the snapshot's.
    #    What is not finite now, before any step, is meant to be so.
    training = Training(
        config=config,
        run=run,
        group=group,
        experiment=experiment,
        source=source,
        plan=plan,
        evaluations=evaluations,
        stop=stop,
        heartbeat=heartbeat,
        device=device,
        optimizer_flags=optimizer_flags,
        finite_check=FiniteCheck(experiment),
        transform=transform,
    )
    if trainer.ema is not None:
        training.average = WeightAverage(experiment.model, trainer.ema)
        experiment.state = {**(experiment.state or {}), EMA_NAME: training.average}
    training.first_weights = copy_first_weights(experiment.model)
    training.schedule = LRSchedule(trainer, training.total_steps, experiment)
    if copied is not None and copied.has_copy:
        restore_copy(training, copied)
    elif kept is None:
        restore_snapshot(training, _print_message)
    else:
        _keep_first_values(training, kept)
        restore_from_ranks(training, kept)
    require_long_schedule(experiment.schedule, training.total_steps)

    # 10. Now that the first step is known: profiler and snapshot writer. Fused kernels are enabled
    #     after the restore, because a snapshot brings step counts to the CPU.
    training.profile = create_profiler(
        trainer.profile, training.step, training.total_steps, run.traces_folder, world.rank, device
    )
    training.speed = speed
    enable_fused_kernels(experiment.optimizer, experiment.model, device)
    if world.rank == 0 and kept is None:
        training.open_writer()

    # 11. Make the replica, which broadcasts rank 0's restored weights.
    if shards > 1:
        _shard_training(training, blocks, precision, subgroups, shards)
    else:
        get_filler_batch = FillerBatch(source, device, transform)
        training.replica = replica = DDPReplica(
            experiment, world, device, trainer, precision, heartbeat, get_filler_batch
        )
        replica.capture = _make_capture(training, replica)
    if trainer.verify_steps is not None:
        from echelon.train.step_verification import make_step_verifier

        training.verifier = make_step_verifier(training, is_start=kept is None)
    if training.average is not None:
        training.average.begin()
        if evaluator is not None:
            evaluator.use_weights = training.average.use_averages
    enter_train_mode(experiment.model)

    # 12. What the user can get wrong has been checked: announce the run, open
    #     trackers and progress bar.
    if world.rank == 0 and kept is None:
        opening_lines = (_format_opening_line(training, stages), *_find_notes(training))
        training.open_output(output, opening_lines if copied is None else ())
    elif kept is not None:
        _take_over_output(training, kept, output)
    training.speed.restart_interval(training.step, training.samples)
    return training


def _take_over_output(t: Training, kept: KeptTraining, output: OutputTee) -> None:
    """Let rank 0 go on with the files of the run: it had them before, or another rank leaves them.
    All ranks take part."""
    is_rank_0 = t.group.world.rank == 0
    if kept.output is not None and is_rank_0:
        t.adopt_output(kept.output)
    elif kept.output is not None:
        kept.output.release_output()
    t.group.wait_for_all("free of the run's files", BUILD_TIMEOUT_S)
    if is_rank_0:
        if t.writer is None:
            t.open_writer()
        if not t.trackers:
            t.open_output(output, ())
        t.log_missing_line(kept.last_line)


def _keep_first_values(t: Training, kept: KeptTraining) -> None:
    """Bring what was noted when the experiment was new, and is not any more."""
    t.finite_check = kept.finite_check or t.finite_check
    t.first_weights = kept.first_weights or t.first_weights
    t.built_flags = kept.built_flags or t.built_flags
    t.schedule.base_rates = kept.base_rates or t.schedule.base_rates


def _place_model(
    experiment: Experiment,
    config: Config,
    world: World,
    is_placed_by_user: bool,
    bad_samples: BadSampleList | None,
) -> list[StageDescription]:
    """Moves the model to this process's devices; returns its stages where there are several
    devices."""
    devices, cpu = get_process_devices(world), torch.device("cpu")
    if len(devices) == 1:
        experiment.model.to(devices[0])
        return []
    if is_placed_by_user:
        return describe_manual_placement(experiment, world.devices, devices)
    if find_stream(experiment.train_data) is not None:
        raise EchelonError(
            Fault(
                f"replica.devices={len(devices)}, but train_data is a stream: the model is cut by "
                "a sample of the data, and the first sample of a stream is for its first step",
                "place the layers yourself, with a second parameter `devices` of the function",
            )
        )
    data = open_data(experiment, "train_data", 0, cpu, bad_samples)
    # Two samples, as some layers do not accept a batch of one.
    few_samples = data.fetch_batch(EvalOrder(min(2, len(data)), 2, 0, 1), 0, cpu)
    sample_data = few_samples.data
    if (transform := make_batch_transform(experiment, config, world, cpu)) is not None:
        sample_data = transform.transform_data(sample_data, few_samples.sample_count, step=0)
    microbatch_size = config.trainer.batch_size / world.size / config.trainer.accumulate
    return split_model(
        experiment,
        world.devices,
        devices,
        SampleBatch(sample_data, microbatch_size / few_samples.sample_count),
    )


def make_batch_transform(
    experiment: Experiment, config: Config, world: World, device: torch.device
) -> BatchTransform | None:
    """Return what transforms this rank's training batches, where the experiment asks for it."""
    function = experiment.batch_transform
    return None if function is None else BatchTransform(function, config.seed, world.rank, device)


def _require_no_complex_parameters(model: nn.Module) -> None:
    """Raises for complex parameters, which DDP and FSDP cannot reduce."""
    faults = [
        Fault(
            f"the model's {name} is complex, which one process alone can train: gradients are "
            "sent as real numbers",
            "store it as two real parts and join them in forward with torch.view_as_complex",
        )
        for name, p in model.named_parameters()
        if p.is_complex()
    ]
    if faults:
        raise EchelonError(*faults)


def _require_no_own_parts(experiment: Experiment, sharding: str) -> None:
    """Raises a fault for each part that cannot work with shards of a model."""
    faults = []
    if experiment.evaluate is not None:
        faults.append(
            Fault(
                f"the experiment has an evaluate of its own, but with {sharding} every rank takes "
                "part in every forward pass, and the ranks have unequal numbers of batches",
                f"give eval_data and metrics instead, or leave {sharding} out",
            )
        )
    if experiment.state:
        faults.append(
            Fault(
                f"the experiment has state ({', '.join(experiment.state)}), which {sharding} "
                "cannot shard",
                f"leave it out, or {sharding}",
            )
        )
    if faults:
        raise EchelonError(*faults)


def _make_capture(t: Training, replica: DDPReplica) -> StepCapture | None:
    """Return the capture of the step as a CUDA graph, where it is wanted and possible."""
    trainer, size = t.config.trainer, t.group.world.size
    if trainer.verify_steps is not None:  # what it computes is no part of a graph
        return None
    is_required, steps_left = trainer.capture == "always", t.total_steps - t.step
    if (
        trainer.capture == "never"
        or steps_left <= 0
        or (not is_required and t.device.type != "cuda")
    ):
        return None
    from echelon.cudagraph.capture import (
        StepCapture,
        agree_on_obstacle,
        find_obstacle,
        find_step_shortage,
        report_obstacle,
    )

    reason = find_step_shortage(steps_left, is_required)
    if len(t.group.world.devices) > 1:
        reason = "the model is on several devices"
    elif size > 1 and t.config.launch.share_devices:
        reason = "ranks that share a GPU exchange gradients through the host"
    reason = agree_on_obstacle(
        reason or find_obstacle(t.experiment, t.source, t.device, size, trainer), size
    )
    if reason is None and isinstance(t.source, TensorSource):
        return StepCapture(
            replica.run_capturable_step,
            replica.abandon_step,
            t.experiment,
            t.source,
            trainer,
            size,
            replica.result_width,
        )
    report_obstacle(reason or "", is_required)
    return None


def choose_backend(device: torch.device, share_devices: bool) -> str:
    """Return NCCL for tensors on GPUs and gloo for those on the CPU.

    NCCL refuses two ranks on one GPU, so ranks that share devices use gloo for everything.
    """
    on_gpu = device.type == "cuda" and not share_devices
    return "cpu:gloo,cuda:nccl" if on_gpu else "gloo"


def _prepare_blocks(experiment: Experiment, config: Config, is_sharded: bool) -> list[nn.Module]:
    """Return the layers that are sharded or checkpointed one by one, and checkpoint them."""
    choice = config.replica
    if not is_sharded and not choice.checkpoint:
        return []
    from echelon.parallel.layer_blocks import (
        checkpoint_blocks,
        find_blocks,
        require_checkpoint_blocks,
        require_shardable,
    )

    if is_sharded:
        require_shardable(experiment.model)
    blocks = find_blocks(experiment.model, choice.blocks)
    if choice.checkpoint:
        require_checkpoint_blocks(blocks)
        checkpoint_blocks(blocks)
    return blocks


def _shard_training(
    t: Training,
    blocks: list[nn.Module],
    precision: Precision,
    subgroups: Sequence[dist.ProcessGroup],
    shards: int,
) -> None:
    """Shards the model over every so many ranks, and chooses how its state is saved.

    Every rank of the first replica writes its shards where these ranks see the run folder;
    otherwise rank 0 gathers and writes everything.
    """
    # Imported here, as torch's FSDP takes a while to import and other runs do not need it.
    from echelon.parallel.fsdp_replica import FSDPReplica, explain_weights_outside_model
    from echelon.parallel.fsdp_wrap import make_mesh, shard_model
    from echelon.snapshot.distributed_writer import (
        DistributedSnapshotWriter,
        collect_own_shards,
        collect_shards,
        gather_full_state,
        is_folder_shared,
    )

    trainer, run, world = t.config.trainer, t.run, t.group.world
    if trainer.compile:
        if not blocks and world.rank == 0:
            _print_message(
                "trainer.compile=true: not compiled: fsdp compiles layer by layer, and the model "
                "has no ModuleList or Sequential of them; name them with replica.blocks=[Block]"
            )
        from echelon.experiment.compilation import CompiledFunction

        for block in blocks:
            block.forward = CompiledFunction(block.forward, t.heartbeat)
    mesh = make_mesh(subgroups, shards, t.device.type)
    shard_model(t.experiment, blocks, t.device, trainer, mesh)
    get_filler_batch = FillerBatch(t.source, t.device, t.transform)
    t.replica = FSDPReplica(
        t.experiment, world, t.device, trainer, precision, t.heartbeat, get_filler_batch
    )
    if (evaluator := t.evaluations.evaluator) is not None:
        assert evaluator.source is not None
        evaluator.get_filler_batch = FillerBatch(evaluator.source, t.device)
        evaluator.explain_errors = explain_weights_outside_model
    t.collect_own_parts = partial(collect_own_shards, shards=shards)
    if is_folder_shared(run.snapshots_folder, t.group, shards):
        t.collect_state = partial(collect_shards, shards=shards)
        writer = t.writer if isinstance(t.writer, SnapshotWriter) else None
        t.writer = DistributedSnapshotWriter(run.snapshots_folder, t.group, shards, writer)
    else:
        t.collect_state = gather_full_state
        if world.rank == 0:
            _print_message(
                f"note: not all ranks that would save see {run.snapshots_folder}, so rank 0 saves "
                "for all"
            )


def _format_opening_line(t: Training, stages: Sequence[StageDescription]) -> str:
    """Return what is about to run, in one line."""
    size, kind = t.group.world.size, t.device.type
    where = f"{size} processes ({kind})" if size > 1 else f"one process ({t.device})"
    if stages:
        kind = "stages" if kind == "cpu" else "devices"
        count = f"{size} processes" if size > 1 else "one process"
        where = f"{count} × {len(t.group.world.devices)} {kind} ({format_stages(stages)})"
    shards = t.config.replica.count_shards(size)
    if 1 < shards < size:
        where += f", {size // shards} replicas of {shards} shards each"
    elif shards > 1:
        where += ", which share the model"
    samples = describe_samples(t.source) or format_count(t.dataset_size, "sample")
    what = f"{samples} in batches of "
    is_own = t.experiment.batch_sampler is not None
    what += "the batch_sampler" if is_own else f"{t.config.trainer.batch_size:,}"
    return f"run {t.run.name}: {format_count(t.total_steps, 'step')} over {what} on {where}"


def _find_notes(t: Training) -> Iterator[str]:
    """Yields notes about settings that do not have the effect one may expect."""
    trainer = t.config.trainer
    yield from find_stream_notes(t.source, trainer)
    if t.experiment.batch_sampler is None and trainer.batch_size > t.dataset_size:
        yield (
            f"note: trainer.batch_size={trainer.batch_size}, but there "
            f"{'is' if t.dataset_size == 1 else 'are'} {format_count(t.dataset_size, 'sample')}: "
            "every step takes all of them"
        )
    world = t.group.world
    shards = t.config.replica.count_shards(world.size)
    if world.nodes > 1 and 1 < shards <= world.local_size and world.local_size % shards:
        yield (
            f"note: {t.config.replica.sharding} does not divide the {world.local_size} processes "
            "of a machine, so some replicas are on two, and gather weights over the network"
        )
    if trainer.steps is None:
        yield from find_epoch_schedule_notes(
            t.experiment.schedule, trainer.epochs or 0, t.steps_per_epoch
        )
    if trainer.precision == "tf32" and t.device.type == "cpu":
        yield "note: trainer.precision=tf32 is for GPUs; on this CPU it is float32"
    if trainer.verify_steps is not None and trainer.capture == "auto" and t.device.type == "cuda":
        yield "note: steps that are verified are not captured as a CUDA graph"
    if trainer.compile and t.step < t.total_steps:
        yield "note: the first steps compile the model, which takes a while"


def _print_message(text: str) -> None:
    """Prints to standard error, where all messages of a run go."""
    print(text, file=sys.stderr)

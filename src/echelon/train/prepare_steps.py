"""Builds what an experiment with a step of its own needs on this rank: a session's engine, its
evaluations, and the loop over both."""

from __future__ import annotations

from torch import nn

from echelon.config.schema import Config
from echelon.experiment.definition import Experiment
from echelon.experiment.precision import Precision
from echelon.parallel.model_parallel import get_process_devices
from echelon.parallel.process_group import RankGroup
from echelon.runs.heartbeat import Heartbeat
from echelon.runs.run_folder import Run
from echelon.train.memory_copies import KeptLoop
from echelon.train.output_tee import OutputTee
from echelon.train.prepare_evaluation import (
    make_bad_sample_list,
    make_evaluations,
    make_evaluator,
    resolve_best,
)
from echelon.train.prepare_session import SESSION_SETTINGS, UsedSettings, prepare_session
from echelon.train.step_loop import StepLoop
from echelon.train.stop_signals import StopSignals

_NO_SHARDS = (
    "leave it out, or give a loss in the place of step: a step of your own may use its models in "
    "any order, and shards are gathered in one"
)
_STEP_SETTINGS = UsedSettings(
    "an experiment with a step of its own",
    (
        *SESSION_SETTINGS.names,
        *("evaluate.", "best", "best_is", "early_stop.", "sanity_steps"),
        *("ema", "capture", "compile"),
    ),
    {
        "trainer.clip": "give it in the step: session.step(optimizer, clip=…)",
        "trainer.accumulate": "call session.backward for each piece of a batch in the step",
        "trainer.schedule": "give the experiment a schedule",
        "trainer.warmup_steps": "give the experiment a schedule",
        "trainer.precision": "compute under torch.autocast in the step",
        "replica.kind": _NO_SHARDS,
        "replica.shards": _NO_SHARDS,
    },
)


def prepare_steps(
    config: Config,
    run: Run,
    group: RankGroup,
    stop: StopSignals,
    heartbeat: Heartbeat,
    output: OutputTee,
    experiment: Experiment,
    kept: KeptLoop | None = None,
) -> StepLoop:
    """Return the loop of an experiment with a step of its own. It evaluates by itself, as the
    settings say. `kept` is there where the ranks come from another round."""
    devices = get_process_devices(group.world)
    precision = Precision("float32", devices[0])
    bad_samples = make_bad_sample_list(config, run)
    evaluator = make_evaluator(
        experiment, config, group, devices, heartbeat, precision, bad_samples
    )
    config = resolve_best(config, evaluator)
    evaluations = make_evaluations(experiment, config, evaluator)
    parts = (config, run, group, stop, heartbeat, output)
    engine, info = prepare_session(*parts, _STEP_SETTINGS, evaluations, kept)
    if config.trainer.compile:
        _compile_models(experiment.model, heartbeat)
    return StepLoop(experiment, engine, info)


def _compile_models(model: nn.Module, heartbeat: Heartbeat) -> None:
    """Compile the forward pass of the model, or of each where there are several by name: what the
    step computes around them only the step knows."""
    from echelon.experiment.compilation import CompiledFunction

    for part in model.values() if isinstance(model, nn.ModuleDict) else (model,):
        part.forward = CompiledFunction(part.forward, heartbeat)

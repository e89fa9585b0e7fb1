"""The whole evaluation path on a few batches, before the first step.

A metric that fails, an eval_data of another shape or an evaluation that needs too much memory then
costs seconds and not an epoch. The check leaves no trace: training is bit for bit what it is
without.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import nn

from echelon.parallel.model_parallel import get_process_devices
from echelon.train.evaluate import preserve_state
from echelon.train.step_boundary import StepBoundary
from echelon.utils.deferred_dynamo import is_dynamo_imported
from echelon.world import World


def check_evaluation(t: StepBoundary) -> bool:
    """Evaluate the first `trainer.sanity_steps` batches of every rank, and forget the results;
    return whether that was done.

    All ranks take part. Nothing is done where an evaluation of the run has passed already: a run
    that resumes after a time limit shall not pay for it again.
    """
    evaluations, steps = t.evaluations, t.config.trainer.sanity_steps
    evaluator = evaluations.evaluator
    if evaluator is None or not steps or evaluations.has_passed or t.step >= t.total_steps:
        return False
    t.heartbeat.suspend()
    evaluations.is_running = t.is_sanity_check = True
    with leave_no_trace(evaluator.experiment.model, t.group.world, evaluator.device):
        results = evaluator.evaluate_first_batches(steps)
    evaluations.is_running = t.is_sanity_check = False
    evaluations.require_metrics(results)
    t.heartbeat.beat()
    return True


@contextlib.contextmanager
def leave_no_trace(
    model: nn.Module, world: World, device: torch.device | None = None
) -> Iterator[None]:
    """Bring back random states and buffers, and let nothing be compiled for these batches.

    `device`: the one to give memory back to, where batches had another size than those of steps.
    """
    devices = get_process_devices(world)
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserve_state(model, devices))
        if is_dynamo_imported():
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        # A metric may warn about so few samples; the evaluation proper repeats what matters.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", UserWarning)
        yield
    if device is not None and device.type == "cuda":
        torch.cuda.empty_cache()  # batches of another size would leave the memory in other pieces

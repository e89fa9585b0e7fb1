"""The whole evaluation path on a few batches, before the first step.

A metric that fails, an eval_data of another shape or an evaluation that needs too much memory then
costs seconds and not an epoch. The check leaves no trace: training is bit for bit what it is
without.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator

import torch

from echelon.parallel.model_parallel import get_process_devices
from echelon.train.best_metric import make_unknown_best_error
from echelon.train.evaluate import preserve_state
from echelon.train.loop import Training


def check_evaluation(t: Training) -> None:
    """Evaluates the first `trainer.sanity_steps` batches of every rank, and forgets the results.

    All ranks take part. Nothing is done where an evaluation of the run has passed already: a run
    that resumes after a time limit shall not pay for it again.
    """
    steps = t.config.trainer.sanity_steps
    if t.evaluator is None or not steps or t.has_evaluated or t.step >= t.total_steps:
        return
    t.heartbeat.suspend()
    t.is_evaluating = t.is_sanity_check = True
    with leave_no_trace(t):
        results = t.evaluator.evaluate_first_batches(steps)
    t.is_evaluating = t.is_sanity_check = False
    # A metric with several results has names that only a result shows.
    if t.config.trainer.best not in results:
        raise make_unknown_best_error(t.config.trainer.best, results)
    if t.early_stop is not None:
        t.early_stop.require_metric(results)
    t.heartbeat.beat()
    t.speed.restart_interval(t.step, t.samples)


@contextlib.contextmanager
def leave_no_trace(t: Training) -> Iterator[None]:
    """Brings back random states and buffers, and lets nothing be compiled for these batches."""
    devices = get_process_devices(t.group.world)
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserve_state(t.experiment.model, devices))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        # A metric may warn about so few samples; the evaluation proper repeats what matters.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", UserWarning)
        yield
    if t.device.type == "cuda":
        torch.cuda.empty_cache()  # batches of another size would leave the memory in other pieces

"""Compares the loss of the first batch with the losses of its halves, before the first step.

Processes and `trainer.accumulate` compute parts of a batch and put their losses together. Where
the parts do not make up the whole, numbers would depend on how a batch is shared.
"""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from echelon.data.batches import Batch, BlockSlice
from echelon.errors import EchelonError
from echelon.experiment.definition import default_predict
from echelon.experiment.loss_check import compute_loss, split_prediction
from echelon.experiment.loss_counts import Count, read_count
from echelon.experiment.module_modes import use_eval_mode
from echelon.experiment.precision import Precision
from echelon.parallel.model_parallel import get_process_devices
from echelon.parallel.replica import split_microbatches
from echelon.parallel.user_collectives import ShapeComparison, ShapeMismatchError
from echelon.snapshot.state import pack_rng_state
from echelon.train.sanity_check import leave_no_trace

if TYPE_CHECKING:
    from echelon.train.loop import Training

_TOLERANCE = 1e-3
_HALF_PRECISION_TOLERANCE = 3e-2


class PartLoss(NamedTuple):
    """The loss of a part of a batch."""

    loss: float
    counted: float
    """The number of samples, or what the loss counts."""


def check_loss_of_parts(t: Training, batch: Batch | BlockSlice, total: int) -> None:
    """Prints a warning where the loss of this rank's first share is not what its halves make up.

    All ranks take part. The model is in eval mode, so that dropout and batch norms do not matter,
    and a loss that draws random numbers all the same cannot be compared.
    """
    if total // t.group.world.size < 2:
        return
    t.heartbeat.suspend()
    size = t.group.world.size
    is_shared_evenly = total % size == 0 or t.config.replica.count_shards(size) > 1
    watch = nullcontext() if is_shared_evenly else ShapeComparison(total)
    no_trace = leave_no_trace(t.experiment.model, t.group.world, t.device)
    with no_trace, torch.no_grad(), use_eval_mode(t.experiment.model), watch:
        found = t.group.gather_json(_compare_halves(t, batch))
    t.heartbeat.beat()
    if t.group.world.rank == 0 and (warnings := [text for text in found if text]):
        print(warnings[0], file=sys.stderr)


def _compare_halves(t: Training, batch: Batch | BlockSlice) -> str | None:
    """Return the warning about a share and its halves, or None where there is nothing to say."""
    data, count = batch.data, batch.sample_count
    try:
        pieces = split_microbatches(data, count, 2, t.experiment.collate_fn is None)
    except EchelonError:  # such as a batch of graphs, which trainer.accumulate refuses
        return None
    devices = get_process_devices(t.group.world)
    rng_row = pack_rng_state(*devices)
    whole = _compute_part(t, data, count)
    halves = [_compute_part(t, *piece) for piece in pieces]
    if whole is None or not torch.equal(pack_rng_state(*devices), rng_row):
        return None
    known = [half for half in halves if half is not None]
    is_exact = t.config.trainer.precision in ("float32", "tf32")
    tolerance = _TOLERANCE if is_exact else _HALF_PRECISION_TOLERANCE
    return describe_difference(whole, known, t.experiment.count, tolerance) if known[1:] else None


def _compute_part(t: Training, data: Any, sample_count: int) -> PartLoss | None:
    """Return the loss of a part, or None where it cannot be computed in eval mode: then the first
    step says why, if it cannot either."""
    experiment = t.experiment
    predict = experiment.predict or default_predict
    try:
        with Precision(t.config.trainer.precision, t.device).autocast():
            output, target = split_prediction(predict(experiment.model, data))
            loss = float(compute_loss(experiment.loss, output, target))
    except ShapeMismatchError:
        raise
    except Exception:
        return None
    if callable(experiment.count):
        return PartLoss(loss, float(read_count(experiment.count, output, target)))
    return PartLoss(loss, float(sample_count))


def describe_difference(
    whole: PartLoss, halves: list[PartLoss], count: Count | None, tolerance: float
) -> str | None:
    """Return a warning where the losses of the halves do not make up that of the whole."""
    total = sum(half.loss for half in halves)
    known = [half for half in halves if half.counted > 0]
    mean = sum(half.loss * half.counted for half in known) / (sum(h.counted for h in known) or 1.0)
    expected = total if count == "sum" else mean
    if not (math.isfinite(whole.loss) and math.isfinite(expected)):
        return None
    if math.isclose(whole.loss, expected, rel_tol=tolerance, abs_tol=1e-6):
        return None
    if count is None and math.isclose(whole.loss, total, rel_tol=tolerance):
        rule = "the sum of the losses of its halves, and not their mean"
        remedy = 'divide it by the number of samples, or give echelon.Experiment(…, count="sum")'
    else:
        by = "samples" if count is None else "count"
        how = "sum" if count == "sum" else f"mean, weighted by {by},"
        rule = f"{whole.loss:.6g}, but the {how} of the losses of its halves is {expected:.6g}"
        remedy = (
            "give what the mean is over, such as tokens: echelon.Experiment(…, count=…); a loss "
            "that compares samples of a batch with each other has no such count"
        )
    return (
        f"warning: the loss of the first batch is {rule}: the numbers will depend on the number of "
        f"processes and on trainer.accumulate; {remedy}"
    )

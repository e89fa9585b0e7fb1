"""A loss or a state is not finite: looks for the sample, layer or gradient before it blames the
rate.

By the time it is noticed, the step has spoiled the weights. So its batch is drawn again, which the
order of samples makes exact, and computed with the last good weights. Every rank looks at its own
share. The training is over then, so the search may leave the model in any state.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from echelon.data.stream_source import StreamSource
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.experiment.definition import default_predict
from echelon.experiment.loss_check import compute_loss
from echelon.experiment.loss_counts import read_count
from echelon.experiment.optimizer_step import list_trained_parameters
from echelon.experiment.precision import Precision
from echelon.parallel.process_group import broadcast_buffers
from echelon.parallel.replica import split_microbatches
from echelon.parallel.store import PeerFailedError
from echelon.snapshot.finite_check import are_all_finite, format_tensor_names
from echelon.snapshot.reader import verify_snapshot
from echelon.snapshot.state import load_model
from echelon.tracking.summary import format_run_argument, shorten_path
from echelon.utils.text import format_count

if TYPE_CHECKING:
    from echelon.train.loop import Training

_FAILURE_TIMEOUT_S = 30.0
_MAX_FIRST_WEIGHT_BYTES = 64 << 20
"""The first weights of a larger model are not kept."""
_RISE = 10.0
"""A loss that rose by this factor in the last steps was diverging."""


class NonfiniteCause(NamedTuple):
    """What was found in the share of a rank. Travels to rank 0 as JSON."""

    what: str
    """The sample, layer or gradient, as the end of a sentence."""
    do: str
    """What to change, as the beginning of one."""
    is_of_weights: bool = False
    """Whether the same samples were computed without a fault with the first weights."""


def copy_first_weights(model: nn.Module) -> dict[str, Tensor] | None:
    """Return a copy of a small model's weights, to compare with in a search; None for a large
    model."""
    state = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    if sum(tensor.nbytes for tensor in state.values()) > _MAX_FIRST_WEIGHT_BYTES:
        return None
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def make_nonfinite_error(
    t: Training, what: str, step: int, bad_names: Sequence[str] = ()
) -> Exception:
    """Return the error for a loss, or for tensors of the state, that are not finite after `step`.

    All ranks call it after the same step. Rank 0 knows what was saved, so it reports for all.
    """
    t.heartbeat.suspend()  # a save under way may take long
    t.report_saves(t.writer.wait() if t.writer else [])
    cause = _find_cause(t, step)
    if t.group.world.rank != 0 and (failure := t.group.wait_for_failure(_FAILURE_TIMEOUT_S)):
        return PeerFailedError(failure)
    found = f": {cause.what}" if cause else ""
    if isinstance(t.source, StreamSource):
        found = " (which sample is the cause was not looked for: a stream is read once)"
    saved = (
        f"the last snapshot is {t.last_snapshot}" if t.last_snapshot else "no snapshot was saved"
    )
    remedy = _suggest_remedy(t, cause, bad_names)
    return EchelonError(Fault(f"{what}{found}; {saved}", remedy), exit=ExitCode.FAILED)


# --- what to do ---


def _suggest_remedy(t: Training, cause: NonfiniteCause | None, bad_names: Sequence[str]) -> str:
    """Return what to change, and the command that goes on with the change.

    The same settings would lead to the same numbers again, so no command is printed without one.
    """
    go_on = f"echelon resume {format_run_argument(t.run)}"
    buffers = {name for name, _ in t.experiment.model.named_buffers()}
    if cause is None and bad_names and buffers.issuperset(bad_names):
        what = f"look at what the experiment writes into {format_tensor_names(list(bad_names))}"
        return f"{what}, fix it, then go on: {go_on}"
    if cause is not None and not cause.is_of_weights:
        return f"{cause.do}, then go on: {go_on}"
    advice, restart = _describe_trend(t), ""
    if cause is not None:  # the weights of the last snapshot are finite, but lead there again
        advice, restart = "the first weights do not lead there, so start over: ", "never"
    elif t.last_snapshot:
        restart = shorten_path(Path(t.last_snapshot))
    advice += f"lower the learning rate, which is {t.schedule.current_rate:g}"
    if t.config.trainer.clip is None:
        advice += ", or clip gradients with trainer.clip=1.0"
    if (change := next(_suggest_settings(t), None)) is None:
        return advice
    return f"{advice}: {go_on}{f' trainer.resume={restart}' if restart else ''} {change}"


def _suggest_settings(t: Training) -> Iterator[str]:
    """Yields settings that keep the weights smaller."""
    if t.config.trainer.clip is None:
        yield "trainer.clip=1.0"
    for key in ("lr", "learning_rate"):
        rate = t.config.experiment_settings.get(key)
        if isinstance(rate, float) and math.isfinite(rate) and rate > 0:
            yield f"{key}={rate / 10:g}"


def _describe_trend(t: Training) -> str:
    """Return how the loss went before, as the beginning of a sentence."""
    losses = [abs(loss) for loss in t.recent_losses]
    least = min(losses, default=0.0)
    if losses and losses[-1] > _RISE * least and losses[-1] == max(losses):
        passed = len(losses) - 1 - losses.index(least)
        steps = format_count(passed, "step")
        return f"the loss rose from {least:.4g} to {losses[-1]:.4g} in the {steps} before: "
    return "no other cause was found: "


# --- the search, on all ranks ---


def _find_cause(t: Training, step: int) -> NonfiniteCause | None:
    """Return what the first rank that found something found, on rank 0. All ranks take part."""
    try:
        weights = _restore_good_weights(t)
        cause = None
        with contextlib.suppress(Exception):  # the other ranks wait for this one's answer
            cause = _search_share(t, step, weights)
        found = t.group.gather_json(cause)
    except Exception:  # a rank may be gone: the search must not hide what it searches for
        return None
    causes = [NonfiniteCause(*fields) for fields in found if fields]
    return min(causes, key=lambda cause: cause.is_of_weights, default=None)


def _restore_good_weights(t: Training) -> str | None:
    """Loads weights that are finite into the model of every rank; returns which, or None where
    there are none, or where ranks cannot compute alone. A collective."""
    model, group = t.experiment.model, t.group
    if t.config.replica.count_shards(group.world.size) > 1 or _synchronizes_ranks(t):
        return None
    which = None
    if group.world.rank == 0:
        with contextlib.suppress(Exception):  # the other ranks wait for the answer
            which = _load_good_weights(t)
    which = group.broadcast_json(which)
    if which is not None:
        tensors = [v for v in model.state_dict().values() if isinstance(v, Tensor)]
        broadcast_buffers(tensors)
    return which if isinstance(which, str) else None


def _synchronizes_ranks(t: Training) -> bool:
    """Return whether a pass of the model waits for other ranks, which make passes of their own."""
    modules = t.experiment.model.modules()
    return t.group.world.size > 1 and any(isinstance(m, nn.SyncBatchNorm) for m in modules)


def _load_good_weights(t: Training) -> str | None:
    """Loads the weights of the last snapshot, or those of the beginning; returns which."""
    if t.last_snapshot is not None:
        snapshot = verify_snapshot(Path(t.last_snapshot))
        load_model(t.experiment, snapshot.load_part("model"))
        return f"the weights of step {snapshot.step}"
    if t.first_weights is not None:
        load_model(t.experiment, t.first_weights)
        return "the first weights"
    return None


def _search_share(t: Training, step: int, weights: str | None) -> NonfiniteCause | None:
    """Return what is found in this rank's share of a step, or else of the step before: weights
    that its gradient spoiled show in the loss of the next."""
    for number in (step, step - 1):
        if number <= t.resumed_step:
            return None
        share = _read_share(t, number)
        if share is None:
            continue
        at = "" if number == step else f" of step {number}"
        if cause := _search_samples(t, share, weights, at):
            return cause
    return None


# --- one share ---


class StepShare(NamedTuple):
    """What one rank computed in a step."""

    data: Any
    samples: list[int]
    """Their indices in train_data."""
    origin: str = "train_data"
    """Where the numbers come from."""


def _read_share(t: Training, step: int) -> StepShare | None:
    """Return this rank's share of a step that was made in this process; None if it had none."""
    if isinstance(t.source, StreamSource):
        return None  # its samples have passed
    epoch, first = t.plan.locate(t.step, t.samples)
    for _ in range(t.step - step + 1):
        if first == 0:
            epoch -= 1
            first = t.plan.count_batches(epoch)
        first -= 1
    order = t.make_order(epoch)
    indices, counts = next(iter(order.iter_blocks(first)))
    batch = t.source.fetch_batch(order, first, t.device)
    if not counts[0]:
        return None
    share = StepShare(batch.data, indices[: counts[0]].tolist())
    if t.transform is None or _find_bad_value(share):
        return share
    data = t.transform.transform(batch, step - 1).data
    return share._replace(data=data, origin="train_data, after batch_transform,")


def _search_samples(
    t: Training, share: StepShare, weights: str | None, at: str
) -> NonfiniteCause | None:
    """Return the sample, layer or gradient that is not finite in a share."""
    fix_sample = "fix that sample or leave it out"
    if weights is None:
        found = _find_bad_value(share)
        return NonfiniteCause(f"{found}{at}", fix_sample) if found else None
    find_fault = _StepProbe(t).find_fault
    start = 0
    for data, count in split_microbatches(
        share.data, len(share.samples), t.config.trainer.accumulate
    ):
        if count and find_fault(data, count):
            piece = share._replace(data=data, samples=share.samples[start : start + count])
            piece, fault = _narrow_down(piece, find_fault)
            if found := _find_bad_value(piece):
                return NonfiniteCause(f"{found}{at}", fix_sample)
            which = (
                f"sample {piece.samples[0]}"
                if len(piece.samples) == 1
                else f"{len(piece.samples)} samples together"
            )
            what = f"{fault} for {which} of train_data{at}, computed with {weights}"
            do = "fix it in the experiment, or leave that sample out"
            return NonfiniteCause(what, do, _is_sound_with_first_weights(t, piece, find_fault))
        start += count
    return None


def _is_sound_with_first_weights(
    t: Training, share: StepShare, find_fault: Callable[[Any, int], str | None]
) -> bool:
    """Return whether a faulty share is computed without a fault with the weights of the
    beginning."""
    if t.first_weights is None:
        return False
    load_model(t.experiment, t.first_weights)
    return find_fault(share.data, len(share.samples)) is None


def _narrow_down(
    share: StepShare, find_fault: Callable[[Any, int], str | None]
) -> tuple[StepShare, str]:
    """Return the smallest part of a faulty share that is faulty by itself, found by halving, and
    its fault."""
    fault = find_fault(share.data, len(share.samples)) or ""
    while len(share.samples) > 1:
        half = -(-len(share.samples) // 2)
        try:
            pieces = split_microbatches(share.data, len(share.samples), 2)
        except EchelonError:  # such as a batch of graphs
            break
        samples = (share.samples[:half], share.samples[half:])
        for (data, count), own in zip(pieces, samples, strict=True):
            if found := find_fault(data, count):
                share, fault = share._replace(data=data, samples=own), found
                break
        else:
            break
    return share, fault


def _find_bad_value(share: StepShare) -> str | None:
    """Return the first sample with a number that is not finite, and where it is."""
    leaves, _ = tree_flatten_with_path(share.data)
    for path, leaf in leaves:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            continue
        if not leaf.ndim or len(leaf) != len(share.samples) or bool(leaf.isfinite().all()):
            continue
        values = leaf.reshape(len(leaf), -1)
        row = int((~values.isfinite()).any(1).nonzero()[0])
        first = int((~values[row].isfinite()).nonzero()[0])
        value = values[row][first].item()
        position = [int(i) for i in torch.unravel_index(torch.tensor(first), leaf.shape[1:])]
        place = keystr(path).strip("[]") if len(path) == 1 else keystr(path)
        at = f" at {position}" if position else ""
        return f"sample {share.samples[row]} of {share.origin} has {value} in element {place}{at}"
    return None


class _StepProbe:
    """Computes parts of a batch with the model as it is, and finds what is not finite first."""

    def __init__(self, t: Training) -> None:
        self._experiment = t.experiment
        self._beat = t.heartbeat.beat
        self._precision = Precision(t.config.trainer.precision, t.device)
        trained = {id(p) for p in list_trained_parameters(t.experiment.optimizer)}
        named = t.experiment.model.named_parameters()
        self._parameters = {name: p for name, p in named if id(p) in trained}

    def find_fault(self, data: Any, count: int) -> str | None:
        """Return the first layer whose output is not finite, or the loss, or the gradients; None
        where all are finite, or where so few samples cannot be computed."""
        if not count:
            return None
        faults: list[str] = []
        modules = self._experiment.model.named_modules()
        layers = [(name, module) for name, module in modules if not any(module.children())]
        hooks = [
            module.register_forward_hook(self._make_hook(name, module, faults))
            for name, module in layers
        ]
        try:
            with torch.enable_grad():
                fault = self._compute(data, faults)
        except Exception:  # such as a batch norm that is given one sample
            return None
        finally:
            for hook in hooks:
                hook.remove()
        self._beat()
        return fault

    def _compute(self, data: Any, faults: list[str]) -> str | None:
        predict = self._experiment.predict or default_predict
        with self._precision.autocast():
            output, target = predict(self._experiment.model, data)
            loss = compute_loss(self._experiment.loss, output, target)
        count = self._experiment.count
        if callable(count) and not read_count(count, output, target):
            return None  # a mean over nothing, which a whole batch may contain
        if not math.isfinite(number := float(loss.detach())):
            return faults[0] if faults else f"the loss function gives {number}"
        if self._experiment.scaler is not None:  # it skips steps whose gradients overflow
            return None
        gradients = torch.autograd.grad(loss, list(self._parameters.values()), allow_unused=True)
        bad = [
            name
            for name, gradient in zip(self._parameters, gradients, strict=True)
            if gradient is not None and not are_all_finite([gradient])
        ]
        return f"the gradient of {format_tensor_names(bad)} is not finite" if bad else None

    def _make_hook(self, name: str, module: nn.Module, faults: list[str]) -> Callable[..., None]:
        """Return a hook that notes a layer which makes something not finite of finite inputs."""

        def check(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            tensors = [value for value in inputs if isinstance(value, Tensor)]
            outputs = [output] if isinstance(output, Tensor) else []
            if not faults and not are_all_finite(outputs) and are_all_finite(tensors):
                title = f"layer {name!r}" if name else "the model"
                faults.append(f"{title} ({type(module).__name__}) gives what is not finite")

        return check

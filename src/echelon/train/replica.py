"""One copy of the model and its step: forward, backward, all-reduce, clip, optimizer.

With several processes, torch's DDP averages the gradients, except those of tables with sparse ones,
which go by rows (`tables.py`). Two things ride along with them for
free, as the gradient of a parameter nobody trains: what a rank wishes (stop, save) and its loss.
So all ranks know the same wishes and the same global loss after the same step, without a
collective of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_flatten, tree_unflatten

from echelon.config.schema import Trainer
from echelon.data.batches import Batch, Cut
from echelon.errors import EchelonError, Exit, Fault
from echelon.optim import Merger
from echelon.pulse import Pulse
from echelon.train.capture import Capture
from echelon.train.compiled import Compiled
from echelon.train.experiment import Experiment, Predict, predict_default
from echelon.train.graph import RING
from echelon.train.number import judged
from echelon.train.precision import Precision
from echelon.train.speed import Moments
from echelon.train.tables import RowExchange, sparse_grad, tables_of
from echelon.train.update import stepped_by, update
from echelon.world import World

READ_EVERY = {"cpu": 1, "cuda": 16}
"""Steps. Reading a number back makes the host wait for the device; ranks must read together."""
_UNREDUCED = "Expected to have finished reduction in the prior iteration"
"""How torch's DDP begins to say it."""


_NAMED = 5
"""Parameters in a sentence."""


class Wishes(NamedTuple):
    """What a rank would like to happen after this step, by its own signals and clock."""

    stop: bool = False
    save: bool = False
    evaluate: bool = False
    look: bool = False
    """To read what is told after every step."""


_NONE = Wishes()


class Told(NamedTuple):
    """What all ranks know about one step."""

    wishes: Wishes
    loss: float
    """Mean over the global batch."""


class Replica:
    def __init__(
        self,
        experiment: Experiment,
        world: World,
        device: torch.device,
        trainer: Trainer,
        precision: Precision,
        pulse: Pulse,
    ) -> None:
        self.experiment = experiment
        self.device = device
        self.pulse = pulse
        most = trainer.clip
        self._clip = None if most is None else partial(self._clip_to, most)
        self.accumulate = trainer.accumulate
        self.world_size = world.size
        self.parameters = [p for p in experiment.model.parameters() if p.requires_grad]
        self._stepped = stepped_by(experiment.optimizer)
        self._optimize = _Unlabelled(experiment.optimizer)
        self._pending: list[Tensor] = []
        self.sampled: Moments | None = None
        self._wishes = Wishes()
        tables = tables_of(experiment.model)
        self._objective = _Objective(experiment, device, list(tables.values()), precision)
        if trainer.compile:
            compiled = Compiled(self._objective.loss_of, pulse)
            self._objective.loss_of = compiled  # type: ignore[method-assign]
        self._graded = [self._objective.control, *self.parameters]
        self._merge = Merger()
        self._ddp: nn.Module = self._objective
        self._exchange: RowExchange | None = None
        if world.size > 1:
            if tables:
                self._exchange = RowExchange(tables, world.size)
            self._ddp = _wrap(self._objective, trainer.unused_parameters, list(tables))
        self.capture: Capture | None = None
        """Set where the step can be a CUDA graph."""

    @property
    def read_every(self) -> int:
        captured = self.capture is not None and self.capture.graph is not None
        return RING if captured and self.world_size == 1 else READ_EVERY[self.device.type]

    @property
    def numbers_told(self) -> int:
        """Of a step: the loss, and with several ranks what they wish."""
        return 1 if self.world_size == 1 else self._objective.control.numel()

    def step(self, batch: Batch | Cut, total: int, wishes: Wishes) -> None:
        """One optimizer step over this rank's share of a global batch of `total` samples."""
        self._keep(wishes)
        if self.capture is None or not self.capture.replayed(batch, total):
            self._collect()
            self._pending.append(self._backward(batch.data, batch.mine, total))
            if self.sampled is not None:
                self.sampled.put("reduced")
            self._update()
        if self.sampled is not None:
            self.sampled.put("stepped")

    def whole_step(self, data: Any, mine: int, total: int) -> Tensor:
        """The step as a graph holds it: on this device alone, but for one all-reduce."""
        if self.world_size == 1:
            told = self._backward(data, mine, total)
        else:
            self._in_pieces(data, mine, total, self._objective)
            _average(self._graded, self.world_size)
            told = self._agreed()
        self._update()
        return told

    def _update(self) -> None:
        update(self.experiment, self._clip, self._optimize)
        self.forget()

    def forget(self) -> None:
        for p in self._graded:
            p.grad = None

    def abandon(self) -> None:
        """After a step that failed halfway: nothing of it is in the next one."""
        self.forget()
        if self.experiment.scaler is not None:  # it knows whose gradients are unscaled already
            self.experiment.scaler._per_optimizer_states.clear()

    def _clip_to(self, most: float) -> None:
        grads = [p.grad for p in self._stepped if p.grad is not None]
        if not any(grad.is_sparse for grad in grads):
            nn.utils.clip_grad_norm_(self._stepped, most)
            return
        # The norm is of a row's whole gradient, not of its share in every sample.
        for p in self._stepped:
            if p.grad is not None and p.grad.is_sparse:
                p.grad = sparse_grad(*self._merge(p.grad), p)
        scaled = [p.grad for p in self._stepped if p.grad is not None]
        scaled = [grad._values() if grad.is_sparse else grad for grad in scaled]
        norms = [norm.to(self.device) for norm in torch._foreach_norm(scaled)]
        factor = (most / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
        for device in {grad.device for grad in scaled}:
            there = [grad for grad in scaled if grad.device == device]
            torch._foreach_mul_(there, factor.to(device))

    def told(self) -> list[Told]:
        """What was agreed in the steps since the last call."""
        self._collect()
        rows = read_all(self._pending)
        self._pending.clear()
        if self.world_size == 1:
            told = [Told(self._wishes, loss) for loss in rows]
            self._wishes = _NONE
            return told
        return [Told(Wishes(*(n > 0 for n in wishes)), loss) for *wishes, loss in rows]

    def _collect(self) -> None:
        """What the graph's steps left, in the order of the steps."""
        if self.capture is not None and self.capture.graph is not None and self.capture.graph.count:
            rows = self.capture.graph.told()
            self._pending += rows.squeeze(1) if self.world_size == 1 else rows

    def _keep(self, wishes: Wishes) -> None:
        """Until they are read: a clock's wish is made once, and a GPU is read every few steps."""
        if wishes != self._wishes:
            self._wishes = Wishes(*(a or b for a, b in zip(self._wishes, wishes, strict=True)))
        if self.world_size > 1:
            self._objective.wish(wishes)

    def _backward(self, data: Any, mine: int, total: int) -> Tensor:
        """What is told of the step: the loss, and with several ranks what they wish."""
        if self.world_size == 1 and self.accumulate == 1:
            loss = self._objective.loss_of(data)
            self._objective.scaled(loss).backward()  # type: ignore[no-untyped-call]
            return loss.detach()
        self._in_pieces(data, mine, total, self._ddp)
        if self._exchange is not None:
            self._exchange()
        return self._agreed()

    def _in_pieces(self, data: Any, mine: int, total: int, module: nn.Module) -> None:
        pieces = in_pieces(data, mine, self.accumulate)
        for i, (piece, count) in enumerate(pieces):
            # DDP divides the sum by the number of ranks; the weight makes it the mean over samples.
            weight = count * self.world_size / total
            last = i + 1 == len(pieces)
            with nullcontext() if last else _no_sync(module):
                loss: Tensor = module(piece, weight)
                self.pulse.beat()  # who hangs before this is behind the ranks that wait for it
                if self.sampled is not None and self.world_size > 1:
                    self.sampled.watch(loss)
                loss.backward()  # type: ignore[no-untyped-call]
        if isinstance(module, DistributedDataParallel):
            _require_reduced(module)

    def _agreed(self) -> Tensor:
        """The wishes and the loss of all ranks, which came with the gradients."""
        told = self._objective.control.grad
        assert told is not None
        return told[-1].clone() if self.world_size == 1 else told.clone()


class _Unlabelled:
    """An optimizer's step without the label that torch puts around it for its profiler, which takes
    a tenth of a small step. Where somebody profiles, or has hooked into the step, it is torch's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        step = type(optimizer).step
        ours = getattr(step, "hooked", False) and "step" not in vars(optimizer)
        self._bare: Callable[[Optimizer], Any] | None = (
            getattr(step, "__wrapped__", None) if ours else None
        )

    def __call__(self) -> None:
        if self._bare is None or self._is_watched():
            self._optimizer.step()
        else:
            self._bare(self._optimizer)

    def _is_watched(self) -> bool:
        own = self._optimizer
        hooks = own._optimizer_step_pre_hooks or own._optimizer_step_post_hooks
        for_all = optimizers._global_optimizer_pre_hooks or optimizers._global_optimizer_post_hooks
        return bool(hooks or for_all or torch.autograd._profiler_enabled())


class _Objective(nn.Module):
    """The weighted loss of one share, as a module, so that DDP sees one scalar and every rank has
    a backward pass, also one with no sample."""

    def __init__(
        self,
        experiment: Experiment,
        device: torch.device,
        tables: list[nn.Parameter],
        precision: Precision,
    ) -> None:
        super().__init__()
        self._precision = precision
        # First, so that its gradient lands in the last bucket, with the model's first layers.
        self.control = nn.Parameter(torch.zeros(len(Wishes()) + 1, device=device))
        self._signal = torch.zeros(len(Wishes()) + 1, device=device)
        self._loss_place = self._signal[-1]
        self._wished = Wishes()
        self.model = experiment.model
        self.predict: Predict = experiment.predict or predict_default
        self.loss = experiment.loss
        self.scaler = experiment.scaler
        apart = {id(p) for p in tables}
        trained = [p for p in experiment.model.parameters() if p.requires_grad]
        self._dense = [p for p in trained if id(p) not in apart]

    def wish(self, wishes: Wishes) -> None:
        if wishes != self._wished:  # seldom, so writing to the device costs nothing
            self._signal[:-1] = torch.tensor([float(w) for w in wishes])
            self._wished = wishes

    def loss_of(self, data: Any) -> Tensor:
        if self._precision.half is None:  # even an empty context takes a percent of a small step
            return judged(self.loss, *self.predict(self.model, data))
        with self._precision.context():
            return judged(self.loss, *self.predict(self.model, data))

    def forward(self, data: Any, weight: float) -> Tensor:
        weighted = self._nothing() if data is None else self.loss_of(data)
        if weight != 1.0:  # most often it is, and a product takes a percent of a small step
            weighted = weighted * weight
        self._loss_place.copy_(weighted.detach())
        return self.scaled(weighted) + self.control.dot(self._signal)

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _nothing(self) -> Tensor:
        """Zero gradients for every parameter, from no sample; none for a table, where they would
        be as large as the table."""
        zeros = [(p.flatten()[:1].sum() * 0.0).to(self._signal.device) for p in self._dense]
        return torch.stack(zeros).sum() if zeros else torch.zeros_like(self._signal[0])


def _wrap(objective: _Objective, unused_parameters: bool, tables: list[str]) -> nn.Module:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
        objective, [f"model.{name}" for name in tables]
    )
    ddp = DistributedDataParallel(
        objective, gradient_as_bucket_view=True, find_unused_parameters=unused_parameters
    )
    # DDP orders its buckets by the first backward pass it sees, and the order decides how sums
    # round. This pass over nothing makes it the same for a fresh run and a resumed one.
    ddp(None, 0.0).backward()
    for p in objective.parameters():
        p.grad = None
    return ddp


def _no_sync(module: nn.Module) -> AbstractContextManager[None]:
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


def _require_reduced(ddp: DistributedDataParallel) -> None:
    """DDP itself complains in the next forward pass, when this step is taken and perhaps saved."""
    try:
        ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if not str(error).startswith(_UNREDUCED):
            raise
        raise EchelonError(
            Fault(
                f"{_without_gradient(ddp)} had no part in the loss of this step, so the other "
                "processes wait for gradients that never come",
                "set trainer.unused_parameters=true, or freeze them: p.requires_grad_(False)",
            ),
            exit=Exit.FAILED,
        ) from error


def _without_gradient(ddp: DistributedDataParallel) -> str:
    """Where a batch is taken in pieces, an earlier one may have left them a gradient."""
    objective = ddp.module
    assert isinstance(objective, _Objective)
    waited_for = {id(p) for p in objective._dense}
    named = objective.model.named_parameters()
    names = [name for name, p in named if p.grad is None and id(p) in waited_for]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"the parameters {', '.join(names[:_NAMED])}{more}" if names else "some parameters"


def _average(parameters: list[nn.Parameter], world_size: int) -> None:
    """The mean gradients of all ranks by one all-reduce, which a graph can hold; DDP's cannot."""
    grads = [p.grad for p in parameters if p.grad is not None]
    for kind in dict.fromkeys(grad.dtype for grad in grads):
        of_kind = [grad for grad in grads if grad.dtype == kind]
        flat = torch.cat([grad.reshape(-1) for grad in of_kind]).div_(world_size)
        dist.all_reduce(flat)
        pieces = torch.split(flat, [grad.numel() for grad in of_kind])
        views = [piece.view_as(grad) for piece, grad in zip(pieces, of_kind, strict=True)]
        torch._foreach_copy_(of_kind, views)


def in_pieces(data: Any, mine: int, count: int) -> list[tuple[Any, int]]:
    """The share in `count` pieces, some of nothing, as ranks must agree on the number."""
    if count == 1 or data is None:
        return [(data, mine)] + [(None, 0)] * (count - 1)
    leaves, structure = tree_flatten(data, is_leaf=_is_column)
    pieces: list[tuple[Any, int]] = []
    start = 0
    for i in range(count):
        size = mine // count + (i < mine % count)
        cut = [leaf[start : start + size] for leaf in leaves]
        pieces.append((tree_unflatten(cut, structure) if size else None, size))
        start += size
    return pieces


def _is_column(node: Any) -> bool:
    """Something plain of every sample, such as texts, as torch's loaders put them together."""
    return isinstance(node, list | tuple) and not any(
        isinstance(item, Tensor | list | tuple | dict) for item in node
    )


def read_all(pending: list[Tensor]) -> list[Any]:
    """One transfer for all of them."""
    if len(pending) == 1:
        return [pending[0].tolist()]
    return torch.stack(pending).tolist() if pending else []

"""Optimizers for models with large embedding tables.

`nn.Embedding(..., sparse=True)` gives gradients for the rows that a batch looked up. Dense Adam
would update the whole table and both of its averages for them, which is nearly all of a step with
the tables of a real recommender. torch's SparseAdam accepts only sparse gradients, so a model with
dense layers needs two optimizers; and its step takes about twice as long as RowAdam's, because it
sorts every batch.

    optimizer = echelon.optim.RowAdam(model.parameters(), lr=1e-3)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from echelon.kernels import can_use_kernels
from echelon.kernels.parallel_streams import run_in_parallel_streams

_BLOCK_BYTES = 256 << 10
"""Rows that are updated at a time: with its averages, a block stays in the second-level cache.
Without blocks, a batch of 16,384 takes a third longer with the tables of MovieLens 25M."""

_COPY_DTYPES = (torch.complex128, torch.int64)
"""Rows are copied as the widest dtype that fits, because torch's copy has a cost per element."""


class RowGradient(NamedTuple):
    """A gradient of some rows of a table, each row once."""

    row_indices: Tensor
    values: Tensor


class RowMerger:
    """Adds up the gradients of rows that a batch looked up several times.

    Nothing is sorted: every occurrence writes its number into the row's slot of a table, the last
    one stays and represents all. That is linear in the batch; torch's `coalesce` sorts, and takes
    four times as long for 16,384 rows. Sums are taken in the order of the batch, whichever
    occurrence stays, so a run repeats bit for bit. One table of slots, of 4 bytes per row, serves
    all parameters, because it is written before it is read.
    """

    def __init__(self) -> None:
        self._row_slots = torch.empty(0, dtype=torch.int32)
        self._sequence = torch.empty(0, dtype=torch.int32)

    def __call__(self, grad: Tensor) -> RowGradient:
        if grad.sparse_dim() != 1:
            raise RuntimeError(f"a gradient with {grad.sparse_dim()} sparse dimensions has no rows")
        if grad.is_coalesced() or not grad.is_cpu:
            grad = grad.coalesce()  # unsorted sums on a GPU would differ from run to run
            return RowGradient(grad._indices()[0], grad._values())
        return self._merge(grad._indices()[0], grad._values(), grad.shape[0])

    def _merge(self, index: Tensor, values: Tensor, size: int) -> RowGradient:
        """Return the rows that occur in `index`, each with the sum of its values."""
        count = len(index)
        if len(self._row_slots) < size:
            self._row_slots = torch.empty(size, dtype=torch.int32)
        if len(self._sequence) < count:
            self._sequence = torch.arange(count, dtype=torch.int32)
        places, numbers = self._row_slots, self._sequence[:count]
        stands = places.scatter_(0, index, numbers).index_select(0, index) == numbers
        standing = np.flatnonzero(stands.numpy())  # takes a tenth of the time of torch's nonzero
        if len(standing) == count:
            return RowGradient(index, values)
        rows = index.index_select(0, torch.from_numpy(standing))
        places.scatter_(0, rows, numbers[: len(rows)])
        inverse = places.index_select(0, index).long()  # index_add_ is twice as fast with int64
        sums = values.new_zeros(len(rows), *values.shape[1:])
        _flatten_single_column(sums).index_add_(0, inverse, _flatten_single_column(values))
        return RowGradient(rows, sums)


class RowAdam(Optimizer):
    """AdamW for dense gradients; for sparse gradients, Adam with a separate state for each row.

        embedding = torch.nn.Embedding(1_000_000, 64, sparse=True)
        optimizer = echelon.optim.RowAdam(embedding.parameters(), lr=1e-3)

    A row that no sample looked up is not touched: its averages do not decay, it does not move on
    old momentum, and it gets no weight decay. Steps are counted per row, so the bias correction of
    a rare row's first gradients is right, however late they come. (With one count for the whole
    table, as in SparseAdam, the first update of a late row is three times too long.) Where every
    batch touches every row, the result is that of torch.optim.AdamW, up to rounding.

    The state of a table is allocated once, at its first gradient: two averages of the table's size,
    and a count per row. The averages are stored with their bias correction, which saves two passes
    per step. So the state of a table cannot be exchanged with AdamW or SparseAdam.

    Parameters:

    params        The parameters, or groups of them, as for any optimizer of torch.
    lr            The learning rate.
    betas         The decay of the averages of gradients and of their squares.
    eps           A small number that is added to the denominator.
    weight_decay  The decoupled weight decay, as in AdamW.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if min(lr, eps, weight_decay) < 0.0 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(
                f"RowAdam(lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}): "
                "give betas from 0 up to 1, and nothing below 0"
            )
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._create_scratch()

    def _create_scratch(self) -> None:
        """Creates what is needed beside the state, and not saved with it."""
        self._merge_rows = RowMerger()
        self._scratch: dict[Tensor, Any] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._create_scratch()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict, and moves step counts to their parameters' devices, which torch does
        not."""
        super().load_state_dict(state_dict)
        for p, state in self.state.items():  # torch leaves them on the CPU
            state["step"] = state["step"].to(p.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates all parameters that have a gradient; returns the closure's loss, if one is
        given."""
        loss = _run_closure(closure)
        tasks: dict[torch.device, list[Callable[[], None]]] = {}
        for group in self.param_groups:
            dense: dict[Any, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    tasks.setdefault(p.device, []).append(partial(self._step_table, p, group))
                else:
                    dense.setdefault((p.device, p.dtype), []).append(p)
            for (device, _), params in dense.items():
                tasks.setdefault(device, []).append(partial(self._step_dense, params, group))
        for device, of_device in tasks.items():
            run_in_parallel_streams(of_device, device)
        return loss

    def _step_table(self, p: Tensor, group: dict[str, Any]) -> None:
        """Updates a table: with Triton's kernels where they can be used, otherwise with torch's
        operators."""
        assert p.grad is not None
        if can_use_kernels(p) and p.grad.sparse_dim() == 1 and p.is_contiguous():
            self._step_rows_on_gpu(p, p.grad, group)
        else:
            self._step_rows(p, self._merge_rows(p.grad), group)

    def _step_dense(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Calls the kernel in which torch.optim.AdamW(fused=True) ends.

        Calling it through AdamW takes longer than the step of a small dense network.
        """
        states = [self._get_state(p, "exp_avg", "exp_avg_sq", ()) for p in params]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1.0)
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            params,
            [p.grad for p in params],  # type: ignore[misc]
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )

    def _step_rows(self, p: Tensor, rows: RowGradient, group: dict[str, Any]) -> None:
        """Updates rows on a CPU, in blocks that stay in its cache."""
        state = self._get_state(p, "mean", "square", (len(p),))
        numbers, values = rows.row_indices, _flatten_single_column(rows.values)
        step = state["step"].index_select(0, numbers).add_(1.0)
        state["step"].index_copy_(0, numbers, step)
        weights = _compute_average_weights(step, group["betas"], values)
        tables = [_flatten_single_column(t) for t in (p, state["mean"], state["square"])]
        wide = [t.view(_choose_row_view_dtype(t)) for t in tables]
        for at, grad, weight in _split_into_blocks(numbers, values, weights):
            taken = [t.index_select(0, at) for t in wide]
            _apply_adam([t.view(p.dtype) for t in taken], grad, weight, group)
            for table, row in zip(wide, taken, strict=True):
                table.index_copy_(0, at, row)

    def _step_rows_on_gpu(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Updates rows on a GPU with Triton's kernels."""
        from echelon.kernels.row_adam import RowScratch, step_adam_rows

        state = self._get_state(p, "mean", "square", (len(p),))
        if p not in self._scratch:
            self._scratch[p] = RowScratch(p)
        step_adam_rows(
            (p, state["mean"], state["square"]),
            state["step"],
            grad._indices()[0],
            grad._values(),
            self._scratch[p],
            (
                _get_rate_tensor(group["lr"], p.device),
                _concat_beta_constants(group["betas"], p.device),
            ),
            group["weight_decay"],
            group["eps"],
        )

    def _get_state(
        self, p: Tensor, first: str, second: str, steps: tuple[int, ...]
    ) -> dict[str, Tensor]:
        """Return a parameter's state; it is created at the first gradient."""
        state: dict[str, Tensor] = self.state[p]
        if not state:
            state["step"] = torch.zeros(steps, device=p.device)
            state[first] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state[second] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return state


class RowSGD(Optimizer):
    """Plain SGD: torch.optim.SGD without momentum, up to rounding, in 0.7 to 0.9 of its time.

        optimizer = echelon.optim.RowSGD(model.parameters(), lr=0.1)

    torch adds a sparse gradient row by row, also where a row is a single number such as a bias.
    Here these are added as one column, and dense gradients all at once.

    Parameters:

    params  The parameters, or groups of them, as for any optimizer of torch.
    lr      The learning rate.
    """

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        if lr < 0.0:
            raise ValueError(f"RowSGD(lr={lr}): give a rate of at least 0")
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates all parameters that have a gradient; returns the closure's loss, if one is
        given."""
        loss = _run_closure(closure)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if p.grad.is_sparse:
                    _apply_row_sgd(p, p.grad, group["lr"])
            dense = [p for p in params if not p.grad.is_sparse]
            if dense:
                _apply_dense_sgd(dense, [p.grad for p in dense], group["lr"])
        return loss


def _run_closure(closure: Callable[[], float] | None) -> float | None:
    """Return the loss of an optimizer's closure, if there is one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _apply_dense_sgd(params: list[Tensor], grads: list[Tensor], rate: Any) -> None:
    """Subtracts `rate` times the gradients, all at once."""
    if isinstance(rate, Tensor):  # on a GPU, where a CUDA graph reads it
        torch._foreach_sub_(params, torch._foreach_mul(grads, rate))
    else:
        torch._foreach_add_(params, grads, alpha=-rate)


def _apply_row_sgd(p: Tensor, grad: Tensor, rate: Any) -> None:
    """Subtracts `rate` times a sparse gradient."""
    if isinstance(rate, Tensor):
        p.index_add_(0, grad._indices()[0], grad._values() * -rate)
        return
    column, factor = _flatten_single_column(p), -rate
    if column.dim() > 1 or p.device.type != "cpu":  # torch's own sum repeats bit for bit there
        p.add_(grad, alpha=factor)
    else:
        column.index_add_(0, grad._indices()[0], grad._values().reshape(-1), alpha=factor)


def _apply_adam(
    rows: Sequence[Tensor], grad: Tensor, weights: Tensor, group: dict[str, Any]
) -> None:
    """Updates rows in place. Their averages are stored with bias correction."""
    p, mean, square = rows
    lr = float(group["lr"])
    weight1, weight2 = weights.unbind(-1)
    mean.lerp_(grad, weight1)
    square.lerp_(grad * grad, weight2)
    if group["weight_decay"]:
        p.mul_(1.0 - lr * group["weight_decay"])
    p.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-lr)


def _compute_average_weights(step: Tensor, betas: tuple[float, float], like: Tensor) -> Tensor:
    """Return the weight of a row's new gradient in its two averages.

    It is Adam's `1 - beta`, divided by the bias correction `1 - beta**step`, computed with expm1 so
    that no digits are lost where the power is nearly 1.
    """
    kind = torch.promote_types(like.dtype, torch.float32)
    logs, rests = _compute_beta_constants(betas, kind, like.device)
    weights: Tensor = rests / torch.expm1(step.to(kind).unsqueeze(1) * logs)
    return weights.to(like.dtype).view(len(step), *[1] * (like.dim() - 1), 2)


def _get_rate_tensor(rate: Any, device: torch.device) -> Tensor:
    """Return the learning rate as a tensor on the device."""
    return rate if isinstance(rate, Tensor) else _create_rate_tensor(float(rate), device)


@lru_cache
def _create_rate_tensor(rate: float, device: torch.device) -> Tensor:
    return torch.tensor(rate, device=device)


@lru_cache
def _concat_beta_constants(betas: tuple[float, float], device: torch.device) -> Tensor:
    return torch.cat(_compute_beta_constants(betas, torch.float32, device))


@lru_cache
def _compute_beta_constants(
    betas: tuple[float, float], kind: torch.dtype, device: torch.device
) -> Any:
    logs = [math.log(beta) if beta else -math.inf for beta in betas]
    return torch.tensor([logs, [beta - 1.0 for beta in betas]], dtype=kind, device=device).unbind()


def _split_into_blocks(*columns: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Splits the columns into blocks of rows that fit the cache; the second column decides how
    many."""
    _, values, _ = columns
    size = max(1, _BLOCK_BYTES * len(values) // max(1, values.nbytes))
    if len(values) <= size:
        return [columns]
    return zip(*(torch.split(column, size) for column in columns), strict=True)


def _flatten_single_column(table: Tensor) -> Tensor:
    """Drops the second dimension of a one-column table: torch indexes one dimension ten times as
    fast."""
    return table.squeeze(1) if table.dim() == 2 and table.shape[1] == 1 else table


def _choose_row_view_dtype(table: Tensor) -> torch.dtype:
    """Return the widest dtype as which the table's rows can be copied."""
    if table.dim() != 2 or not table.is_contiguous():
        return table.dtype
    start, row = (n * table.itemsize for n in (table.storage_offset(), table.shape[1]))
    for word in _COPY_DTYPES:
        if row % word.itemsize == 0 and start % word.itemsize == 0:
            return word
    return table.dtype

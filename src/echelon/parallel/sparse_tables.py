"""Exchanges the sparse gradients of embedding tables between ranks, by rows.

DDP reduces a sparse gradient through gloo in several rounds of messages per table and sorts it on
every rank; through NCCL it does not reduce it at all. Here every rank sends the rows that it looked
up, of all tables in one message of a fixed size, and joins all ranks' rows in the order of the
ranks. That is the order of the global batch, so an optimizer adds up what one process would. For
the four tables of a dot product and two ranks, a step takes an eighth of the time, and the size of
a message depends on the batch alone, not on the tables.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.errors import EchelonError, ExitCode, Fault

_ALIGN_BYTES = 16

# The name from torch 2.13 on, where the old name warns.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def require_no_max_norm(model: nn.Module) -> None:
    """Raises for trained embeddings with `max_norm`.

    Such a layer shortens the rows that a process looks up, in that process's copy alone, so the
    copies would drift apart. Of a table that is not trained the rows come out the same on every
    rank.
    """
    faults = [
        Fault(
            (f"the layer {name!r}" if name else "the model")
            + f" is an {type(module).__name__} with max_norm={module.max_norm:g}, which shortens "
            "the rows that a process looks up in its own copy alone, so with several processes the "
            "copies would drift apart",
            "leave max_norm out, or normalize the rows in the model's forward",
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and module.max_norm is not None
        and module.weight.requires_grad
    ]
    if faults:
        raise EchelonError(*faults)


def make_sparse_gradient(row_indices: Tensor, values: Tensor, table: Tensor) -> Tensor:
    """Return a sparse gradient for a table. It is not marked as coalesced, as its indices are not
    sorted."""
    return torch.sparse_coo_tensor(row_indices[None], values, table.shape, check_invariants=False)


class RowExchange:
    """Gives every rank the rows of all ranks, as the gradient of each table."""

    def __init__(self, tables: dict[str, nn.Parameter], world_size: int) -> None:
        self._world_size = world_size
        self._names = list({id(p): name for name, p in tables.items()}.values())
        self._tables = [tables[name] for name in self._names]
        self._layout = _MessageLayout([0] * len(self._tables), self._tables)
        self._send_buffer = self._receive_buffer = torch.empty(0, dtype=torch.uint8)
        for p in self._tables:  # DDP broadcasts the other parameters, and ignores these
            dist.broadcast(p.detach(), 0)

    def __call__(self) -> None:
        own_rows = [
            self._get_rows(p, name) for p, name in zip(self._tables, self._names, strict=True)
        ]
        counts = self._exchange(own_rows)
        largest = [max(column) for column in zip(*counts, strict=True)]
        if any(
            n > capacity for n, capacity in zip(largest, self._layout.row_capacities, strict=True)
        ):
            # Seldom, and all ranks come to the same decision, as all have all counts. An eighth
            # more than needed, because the next batch may have a few rows more.
            capacities = zip(largest, self._layout.row_capacities, strict=True)
            self._layout = _MessageLayout(
                [max(n + n // 8, capacity) for n, capacity in capacities], self._tables
            )
            counts = self._exchange(own_rows)
        messages = list(zip(self._split_messages(), counts, strict=True))
        for number, p in enumerate(self._tables):
            parts = [
                self._layout.view_rows(message, number, count[number])
                for message, count in messages
            ]
            columns = zip(*parts, strict=True)
            numbers, values = (torch.cat(column).to(p.device) for column in columns)
            p.grad = make_sparse_gradient(numbers, values, p) if len(numbers) else None

    def _get_rows(self, table: nn.Parameter, name: str) -> tuple[Tensor, Tensor] | None:
        """Return the indices and values of this rank's gradient, or None where it has none."""
        grad = table.grad
        if grad is None:
            return None
        if not grad.is_sparse:
            raise EchelonError(
                Fault(
                    f"{name} belongs to an embedding with sparse=True, but its gradient is dense: "
                    "the model uses the whole table besides looking up rows",
                    "give the embedding sparse=False, or use its rows only",
                ),
                exit=ExitCode.FAILED,
            )
        return grad._indices()[0], grad._values()

    def _exchange(self, own_rows: list[tuple[Tensor, Tensor] | None]) -> list[list[int]]:
        """Sends this rank's rows and returns how many rows of each table each rank has.

        Rows of a table that do not fit the message are not sent; the caller makes room and calls
        again.
        """
        device = self._tables[0].device
        if len(self._send_buffer) != self._layout.size_bytes:
            self._send_buffer = torch.zeros(
                self._layout.size_bytes, dtype=torch.uint8, device=device
            )
            self._receive_buffer = self._send_buffer.new_empty(
                self._world_size * self._layout.size_bytes
            )
        counts = [0 if rows is None else len(rows[0]) for rows in own_rows]
        self._layout.view_counts(self._send_buffer).copy_(torch.tensor(counts))
        for number, rows in enumerate(own_rows):
            if rows is None or counts[number] > self._layout.row_capacities[number]:
                continue
            numbers, values = self._layout.view_rows(self._send_buffer, number, counts[number])
            numbers.copy_(rows[0])
            torch.div(rows[1].to(device), self._world_size, out=values)  # as DDP does
        _all_gather(self._receive_buffer, self._send_buffer)
        return [self._layout.view_counts(message).tolist() for message in self._split_messages()]

    def _split_messages(self) -> tuple[Tensor, ...]:
        """Return the message of every rank."""
        return torch.split(self._receive_buffer, self._layout.size_bytes)


class _MessageLayout:
    """Positions within a message: the row counts of all tables, then indices and values of each
    table."""

    def __init__(self, row_capacities: list[int], tables: list[nn.Parameter]) -> None:
        self.row_capacities = row_capacities
        """How many rows of each table fit the message."""
        self._tables = tables
        sizes = [8 * len(tables)]
        for capacity, p in zip(row_capacities, tables, strict=True):
            sizes += [8 * capacity, p[:1].nbytes * capacity]
        ends = accumulate(-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in sizes)
        self._starts = [0, *ends]

    @property
    def size_bytes(self) -> int:
        """The length of a message."""
        return self._starts[-1]

    def view_counts(self, message: Tensor) -> Tensor:
        """Return the part of a message that holds the row counts."""
        return message[: 8 * len(self._tables)].view(torch.int64)

    def view_rows(self, message: Tensor, number: int, count: int) -> tuple[Tensor, Tensor]:
        """Return indices and values of the first `count` rows of a table, as views of the
        message."""
        table = self._tables[number]
        first, second = self._starts[1 + 2 * number : 3 + 2 * number]
        numbers = message[first : first + 8 * count].view(torch.int64)
        values = message[second : second + table[:1].nbytes * count].view(table.dtype)
        return numbers, values.view(count, *table.shape[1:])

"""Sums gradients over all ranks for a loop of the user's own, where DDP cannot wrap the model.

A loop of one's own calls backward and the optimizers in any order: twice before a step, for two
models in turn, for one half of the parameters. So the model stays as it is, and each backward pass
sums what it has computed: its gradients are those of the whole batch when it is over, whatever the
loop does with them afterwards. Gradients of passes before are set aside meanwhile, and added.

As in DDP, a bucket leaves while the backward pass still runs, once the gradients in it are there.
Which ones will come is known from the same pass of the iteration before, and all ranks know it
alike. The last bucket leaves after the pass, and tells whether some rank computed other gradients
than expected; then the ranks exchange what each of them has, and send what is missing.

Which numbers are summed in which message depends on nothing but which parameters are trained, not
on what was expected: another place in a message could be another order of summation, and a resumed
run would not be the same to the bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.parallel.user_collectives import count_collectives

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
"""As in DDP: the first bucket is small, so that the first message leaves early."""
_MAX_PLANS = 8
_ALIGNMENT = 16


class GradientReducer:
    """Sums the gradients of each backward pass over all ranks.

    A few numbers of each rank, the `control` values, are summed with them, at no cost. All ranks
    have equally many backward passes, and train the same parameters; which of them a pass computes
    gradients of may differ between ranks. A pass is `begin`, `loss.backward()`, and `finish`, or
    `abort` where it failed.
    """

    def __init__(
        self,
        control_size: int,
        refuse_gradient: Callable[[Tensor], None],
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """`refuse_gradient` is called for every gradient that is computed outside of a pass."""
        self._tail_size = 1 + control_size
        self._refuse_gradient = refuse_gradient
        self._bucket_bytes = first_bucket_bytes, bucket_bytes
        self._modules: list[list[nn.Parameter]] = []
        self._params: list[nn.Parameter] = []
        self._plans: dict[tuple[bool, ...], _Plan] = {}
        self._plan: _Plan | None = None
        self._rows: dict[_Kind, Tensor] = {}
        """The memory of all messages; the plans share it, as one of them is in use at a time."""
        self.reduced_ids: set[int] = set()
        """The ids of parameters whose gradients are sums over all ranks."""

        # Of one backward pass:
        self._is_open = False
        self._expected: _ExpectedPass | None = None
        self._earlier: list[tuple[nn.Parameter, Tensor]] = []
        """The gradients of passes before."""
        self._pending: list[set[int]] = []
        """For each bucket that may leave early, the ids of parameters that it waits for."""
        self._sent_count = 0
        """How many of the expected buckets are under way."""
        self._late: set[int] = set()
        """The numbers of buckets that left before the last of their gradients was there."""
        self._collective_count = 0
        self._lock = threading.Lock()
        """Autograd has a thread for each device."""

    def add_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add the parameters of one module, trained or frozen."""
        known = {id(p) for p in self._params}
        added = [p for p in parameters if id(p) not in known]
        self._modules.append(added)
        self._params += added
        self._plan = None
        self._plans.clear()
        for p in added:
            if p.is_floating_point() or p.is_complex():
                is_trained = p.requires_grad
                p.requires_grad_(True)  # a frozen one takes no hook, and may be thawed later
                p.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]
                p.requires_grad_(is_trained)

    # --- a backward pass ---

    def begin(self, number: int, may_send_early: bool) -> None:
        """Prepare for the backward pass with this number in its iteration, from 0.

        `may_send_early` is false where the pass may call collectives of the user: those would come
        between the messages of this rank in another order than on other ranks.
        """
        flags = [p.requires_grad for p in self._params]
        if self._plan is None or flags != self._plan.flags:
            self._plan = self._find_plan(flags)
        plan = self._plan
        self._earlier = [(p, p.grad) for p in plan.params if p.grad is not None]
        for p, _ in self._earlier:
            p.grad = None
        self._expected = expected = plan.expected.get(number)
        self._number = number
        self._sent_count = 0
        self._late.clear()
        self._pending = []
        if may_send_early and expected is not None and expected.sends_early:
            self._pending = expected.list_pending()
        self._collective_count = count_collectives()
        self._is_open = True

    def abort(self) -> None:
        """Give up a pass that failed. What has left is still under way, in memory of its own."""
        self._is_open = False
        self._pending = []
        self._plan = None
        self._plans.clear()
        self._rows.clear()
        for p, grad in self._earlier:
            p.grad = grad

    def finish(self, control: Sequence[float]) -> list[float]:
        """Replace every gradient that the pass has computed by its sum over all ranks, add it to
        that of passes before, and return the sums of `control`.

        A parameter without a gradient on any rank stays without one. Nothing is read from a GPU:
        that would make this process wait for it.
        """
        self._is_open = False
        self._pending = []
        plan, expected = self._plan, self._expected
        assert plan is not None
        own = [p.grad is not None for p in plan.params]
        has_collectives = count_collectives() > self._collective_count + self._sent_count
        has_order = not (has_collectives or self._late)
        if expected is not None:
            is_as_expected = own == expected.has_gradient and (
                has_order or not expected.sends_early
            )
            surprises, *control = self._send_expected(
                expected, [float(not is_as_expected), *control]
            )
            for bucket in expected.buckets:
                bucket.wait()
        if expected is None or surprises:
            expected, control = self._exchange(plan, expected, own, has_order, list(control))
        if expected is not None:
            for bucket in expected.buckets:
                bucket.give_sums(expected.has_gradient)
            self.reduced_ids |= expected.reduced_ids
        for p, earlier in self._earlier:
            p.grad = earlier if p.grad is None else earlier.add_(p.grad)
        self._earlier = []
        return list(control)

    def _note_gradient(self, parameter: Tensor) -> None:
        """Send the buckets that are complete; called by autograd for every gradient."""
        if not self._is_open:
            self._refuse_gradient(parameter)
        if not self._pending:
            return
        expected = self._expected
        assert expected is not None
        with self._lock:
            place = expected.places.get(id(parameter))
            if place is None:  # of a bucket that is not expected
                return
            if place < self._sent_count:
                self._late.add(expected.buckets[place].number)
            elif place < len(self._pending):
                self._pending[place].discard(id(parameter))
                while self._sent_count < len(self._pending) and not self._pending[self._sent_count]:
                    expected.buckets[self._sent_count].send()
                    self._sent_count += 1

    def _send_expected(self, expected: _ExpectedPass, tail: list[float]) -> list[float]:
        """Send the buckets that have not left, the last one with the tail; return its sums."""
        for bucket in expected.buckets[self._sent_count : -1]:
            bucket.send()
        last = expected.buckets[-1]
        if last.can_carry_tail:
            last.tail.copy_(torch.tensor(tail))
            last.send()
            last.wait()
            sums: list[float] = last.tail.tolist()
            return sums
        last.send()
        return _sum_numbers(tail)

    def _exchange(
        self,
        plan: _Plan,
        expected: _ExpectedPass | None,
        own: list[bool],
        has_order: bool,
        control: list[float],
    ) -> tuple[_ExpectedPass | None, list[float]]:
        """Tell all ranks which gradients this one has, send the buckets that have not left or left
        too early, and return what is to be expected of the next pass of this number. The control
        values cross here where nothing was expected, so that nothing has carried them."""
        is_late = [bucket.number in self._late for bucket in plan.buckets]
        sums = _sum_numbers([*own, *is_late, not has_order, *control])
        has_gradient = [n > 0 for n in sums[: len(own)]]
        late_sums = sums[len(own) : len(own) + len(is_late)]
        is_disordered = sums[len(own) + len(is_late)] > 0
        sent = () if expected is None else expected.buckets
        computed = [b for b in plan.buckets if any(has_gradient[b.start : b.stop])]
        missing = [b for b in computed if b not in sent or late_sums[b.number]]
        for bucket in missing:
            bucket.send()
        for bucket in missing:
            bucket.wait()
        if expected is None:
            control = sums[len(sums) - len(control) :]
        else:
            is_disordered |= not expected.sends_early
        if not computed:  # nothing would tell the other ranks that one has computed something
            plan.expected.pop(self._number, None)
            return None, control
        found = _ExpectedPass.make(plan, has_gradient, computed, not is_disordered)
        plan.expected[self._number] = found
        return found, control

    def _find_plan(self, flags: list[bool]) -> _Plan:
        """Return the plan for the parameters that are trained now: a loop may freeze and thaw."""
        if (known := self._plans.get(tuple(flags))) is not None:
            return known
        trained = {id(p) for p, flag in zip(self._params, flags, strict=True) if flag}
        modules = [[p for p in params if id(p) in trained] for params in self._modules]
        groups = _group_parameters(modules, *self._bucket_bytes)
        sizes = [_count_numbers(group, self._tail_size) for group in groups]
        needed: dict[_Kind, int] = {}
        for group, size in zip(groups, sizes, strict=True):
            kind = _Kind(group[0].dtype, group[0].device)
            needed[kind] = needed.get(kind, 0) + size
        is_too_small = any(
            kind not in self._rows or len(self._rows[kind]) < size for kind, size in needed.items()
        )
        if is_too_small or len(self._plans) == _MAX_PLANS:
            self._plans.clear()  # else they would keep their memory
            self._rows = {
                kind: torch.zeros(size, dtype=kind.dtype, device=kind.device)
                for kind, size in needed.items()
            }
        plan = self._plans[tuple(flags)] = _Plan(flags, groups, self._rows, self._tail_size)
        return plan


class _Kind(NamedTuple):
    """What the gradients of one message have in common."""

    dtype: torch.dtype
    device: torch.device


class _Bucket:
    """Gradients of one dtype and device as one row: their numbers, and a tail of further ones."""

    def __init__(
        self, number: int, start: int, params: list[nn.Parameter], row: Tensor, tail_size: int
    ) -> None:
        self.number = number
        """Its place among the buckets of the plan."""
        self.start, self.stop = start, start + len(params)
        """The places of its parameters among those of the plan."""
        self.params = params
        sizes = [p.numel() for p in params]
        pieces = torch.split(row[: sum(sizes)], sizes)
        self._views = [piece.view(p.shape) for piece, p in zip(pieces, params, strict=True)]
        self._row = torch.view_as_real(row) if row.is_complex() else row
        self._group = dist.distributed_c10d._get_default_group()
        self._options = dist.AllreduceOptions()
        self.tail = row[sum(sizes) : sum(sizes) + tail_size]
        self.can_carry_tail = row.device.type == "cpu" and not row.is_complex()
        """Whether the tail can be read without making this process wait for a GPU."""
        self._work: Any = None

    def send(self) -> None:
        """Copy the gradients and begin to sum them; the gradients themselves are left alone."""
        grads = [p.grad for p in self.params]
        own = [grad for grad in grads if grad is not None]
        if len(own) == len(grads):
            torch._foreach_copy_(self._views, own)
        else:
            for view, grad in zip(self._views, grads, strict=True):
                view.zero_() if grad is None else view.copy_(grad)
        # As dist.all_reduce does, without its checks: they take as long as the copy of a small row.
        self._work = self._group.allreduce([self._row], self._options)

    def wait(self) -> None:
        """Wait for the sums; on a GPU, let what is computed there from now on wait for them."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def give_sums(self, has_gradient: list[bool]) -> None:
        """Give every parameter of which any rank has a gradient the sum of all ranks. Copied, as
        the loop may keep a gradient for longer than until the next message."""
        grads = [p.grad for p in self.params]
        own = [grad for grad in grads if grad is not None]
        if len(own) == len(grads):
            torch._foreach_copy_(own, self._views)
            return
        flags = has_gradient[self.start : self.stop]
        for p, grad, view, flag in zip(self.params, grads, self._views, flags, strict=True):
            if grad is not None:
                grad.copy_(view)
            elif flag:
                p.grad = torch.empty_like(p).copy_(view)


class _ExpectedPass(NamedTuple):
    """What a backward pass computes, as all ranks know it from the same pass before."""

    has_gradient: list[bool]
    """For every parameter of the plan, whether any rank computes its gradient."""
    buckets: list[_Bucket]
    """Those with such a parameter, in the order in which they leave."""
    sends_early: bool
    """Whether they may leave while the pass runs: it calls no collectives itself, and computes each
    gradient once."""
    ids: list[set[int]]
    """For each bucket, the ids of the parameters that it waits for."""
    places: dict[int, int]
    """By id of a parameter, the place of its bucket among these."""
    reduced_ids: set[int]

    def list_pending(self) -> list[set[int]]:
        """Return what each bucket waits for, without the last one, which waits for the whole pass.
        None of them leaves early where hooks of the user change gradients after ours."""
        *first, _ = self.ids
        if first and any(_has_user_hooks(p) for bucket in self.buckets for p in bucket.params):
            return []
        return list(map(set, first))

    @classmethod
    def make(
        cls, plan: _Plan, has_gradient: list[bool], buckets: list[_Bucket], sends_early: bool
    ) -> _ExpectedPass:
        ids = [
            {
                id(p)
                for p, flag in zip(b.params, has_gradient[b.start : b.stop], strict=True)
                if flag
            }
            for b in buckets
        ]
        places = {id(p): place for place, bucket in enumerate(buckets) for p in bucket.params}
        return cls(has_gradient, buckets, sends_early, ids, places, set().union(*ids))


class _Plan:
    """The buckets of the parameters that are trained."""

    def __init__(
        self,
        flags: list[bool],
        groups: list[list[nn.Parameter]],
        rows: dict[_Kind, Tensor],
        tail_size: int,
    ) -> None:
        self.flags = flags
        self.params = [p for group in groups for p in group]
        self.expected: dict[int, _ExpectedPass] = {}
        """By the number of a backward pass in its iteration."""
        self.buckets: list[_Bucket] = []
        used = dict.fromkeys(rows, 0)
        place = 0
        for number, group in enumerate(groups):
            kind = _Kind(group[0].dtype, group[0].device)
            begin, size = used[kind], _count_numbers(group, tail_size)
            used[kind] += size
            row = rows[kind][begin : begin + size]
            self.buckets.append(_Bucket(number, place, group, row, tail_size))
            place += len(group)


def _has_user_hooks(parameter: nn.Parameter) -> bool:
    hooks: Any = parameter._post_accumulate_grad_hooks
    return len(hooks) > 1


def _sum_numbers(numbers: Sequence[float]) -> list[float]:
    """Return the sums of each number over all ranks, by a message that no GPU takes part in."""
    row = torch.tensor(numbers, dtype=torch.float32)
    dist.all_reduce(row)
    sums: list[float] = row.tolist()
    return sums


def _count_numbers(group: list[nn.Parameter], tail_size: int) -> int:
    """Return the length of a bucket's row; rounded, so that all begin at aligned addresses."""
    numbers = sum(p.numel() for p in group) + tail_size
    return -(-numbers // _ALIGNMENT) * _ALIGNMENT


def _group_parameters(
    modules: list[list[nn.Parameter]], first_bucket_bytes: int, bucket_bytes: int
) -> list[list[nn.Parameter]]:
    """Return the parameters of each bucket in the order in which a backward pass computes: last
    parameters first.

    Small modules share a bucket, as a message costs more than its bytes. Others do not, so that the
    pass of one sends nothing of the other.
    """
    groups: list[list[nn.Parameter]] = []
    kind, size, limit = None, 0, first_bucket_bytes
    for params in reversed(modules):
        is_first_of_module = True
        for p in reversed(params):
            is_full = size >= limit or (is_first_of_module and size >= first_bucket_bytes)
            if (p.dtype, p.device) != kind or is_full:
                limit = bucket_bytes if groups else first_bucket_bytes
                groups.append([])
                kind, size = (p.dtype, p.device), 0
            is_first_of_module = False
            groups[-1].append(p)
            size += p.numel() * p.element_size()
    return groups

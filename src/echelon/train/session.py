"""`Session`, the public class by which a training loop of the user's own runs at any scale."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MethodType
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from echelon.data.sample_order import cut_share
from echelon.errors import EchelonError, Fault
from echelon.experiment.checks import find_closure_faults
from echelon.experiment.memory_format import apply_memory_format
from echelon.experiment.optimizer_flags import move_state_to_parameters
from echelon.experiment.optimizer_step import UnprofiledStep
from echelon.parallel.gradient_reducer import GradientReducer
from echelon.parallel.row_gather import gather_rows
from echelon.parallel.user_collectives import count_collectives
from echelon.runs.metric_direction import guess_best_is
from echelon.train.loop_arguments import require_clip
from echelon.train.media import Histogram, Image
from echelon.train.session_agreement import CONTROL_SIZE
from echelon.train.session_engine import SessionEngine

Rows = TypeVar("Rows")
Method = TypeVar("Method", bound=Callable[..., Any])


def _leaving_lost_rounds(method: Method) -> Method:
    """Let a method of a session end the user's loop where it fails because a rank was lost."""

    @functools.wraps(method)
    def call(self: Session, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self._open_engine.leave_lost_round(error)
            raise

    return call  # type: ignore[return-value]


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state can be saved: torch's `state_dict` and `load_state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data and tensors."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Set the state."""


class Session:
    """One process's part in a training whose loop you write yourself.

    A function that takes a parameter named `session` receives it from `echelon.main`:

        def train(cfg, session):
            model = Net(cfg.width)
            optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
            session.prepare(model, optimizer)
            for x, y in session.batches(data):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                session.backward(loss)
                session.step(optimizer)
                session.log(loss=loss)

        if __name__ == "__main__":
            echelon.main(train)

    It runs as `python file.py launch=local launch.procs=4`, and everywhere else that an Experiment
    runs. Every process executes the same loop over its own share of each batch. The gradients are
    those of the whole batch at any number of processes, snapshots are saved and resumed between two
    iterations, and a stop by signal ends the loop there.

    rank, world_size    which process this is, of how many
    device              where its tensors belong
    is_main_process     whether it is rank 0, which alone writes files
    folder              the folder of the run, the same for all processes
    completed_steps     iterations of the loop that are over, those before a resume included
    epoch               the pass over the data that the current batch belongs to, from 1
    total_steps         iterations of the whole loop, once it has begun
    """

    def __init__(self, engine: SessionEngine) -> None:
        self._open_engine = engine
        self._optimizers: dict[int, _PreparedOptimizer] = {}
        """By the id of each."""
        self._grad_norm: Tensor | None = None
        self._gathers_gradients = False
        """Whether a backward pass exchanges tensors of the user, so that no rank may leave one
        out."""
        world = engine.group.world
        self.rank, self.world_size = world.rank, world.size
        self._reducer: GradientReducer | None = None
        """None where the process is alone."""
        if world.size > 1:
            self._reducer = GradientReducer(CONTROL_SIZE, self._refuse_gradient)
        self.device = engine.device
        self.is_main_process = world.rank == 0
        self.folder: Path = engine.run.folder

    @property
    def _engine(self) -> SessionEngine:
        if self._open_engine.interruption is not None:
            raise self._open_engine.interruption
        if self._open_engine.is_over:
            raise EchelonError(
                Fault(
                    "the session is used after its block has ended",
                    "move the call into the block: with echelon.session() as session:",
                )
            )
        return self._open_engine

    @property
    def completed_steps(self) -> int:
        """Iterations of the loop that are over."""
        self._engine.host_calls.add("session.completed_steps")
        return self._engine.step

    @property
    def epoch(self) -> int:
        """The pass over the data that the current batch belongs to, from 1."""
        self._engine.host_calls.add("session.epoch")
        return self._engine.epoch

    @property
    def total_steps(self) -> int:
        """Iterations of the whole loop, once it has begun."""
        if not self._engine.parts.is_complete:
            raise EchelonError(
                Fault(
                    "session.total_steps is read, but no loop of the session has begun",
                    "take a parameter training: echelon.TrainingInfo beside the session, and call "
                    "training.count_total_steps(len(data)), or count the batches",
                )
            )
        return self._engine.total_steps

    @property
    def grad_norm(self) -> Tensor:
        """The norm of the gradients of the last step that was given `clip`, before it clipped."""
        if self._grad_norm is None:
            raise EchelonError(
                Fault(
                    "session.grad_norm is read, but no step has measured it",
                    "give the step a limit: session.step(optimizer, clip=1.0), or clip=math.inf "
                    "to measure alone",
                )
            )
        return self._grad_norm

    # --- what is trained ---

    @_leaving_lost_rounds
    def prepare(self, *parts: Any) -> Any:
        """Bring models to this process's device and restore all parts from the snapshot, if the run
        has one. Returns the same objects: one, or a tuple of them.

        Parts are modules, optimizers and learning-rate schedulers, in the same order on every rank
        and in every start. Modules come before the optimizers of their parameters. The modules are
        not wrapped: call them as before.
        """
        if not parts:
            raise EchelonError(Fault("session.prepare is given nothing", "give it the model"))
        for part in parts:
            if not isinstance(part, Stateful):
                raise EchelonError(
                    Fault(
                        f"session.prepare is given {type(part).__name__}, which has no state_dict",
                        "give it modules, optimizers and schedulers; data goes to session.batches",
                    )
                )
        for part in parts:
            if isinstance(part, nn.Module):
                part.to(self.device)
                trainer, world = self._engine.config.trainer, self._engine.group.world
                apply_memory_format(part, trainer, self.device, world.rank == 0)
                self._engine.parts.add_module(part)
                if self._reducer is not None:
                    self._reducer.add_parameters(part.parameters())
            elif isinstance(part, torch.optim.Optimizer):
                self._add_optimizer(part)
            else:
                self._engine.parts.add_part("schedule", part)
        return parts[0] if len(parts) == 1 else parts

    @_leaving_lost_rounds
    def register(self, **parts: Stateful) -> None:
        """Save these with every snapshot, and restore them now if the run has one: weight averages,
        replay buffers, counters; anything with `state_dict` and `load_state_dict`.

        The state of rank 0 is saved, and all ranks receive it; a warning says where that of another
        rank differs. It consists of tensors, numbers, texts, lists, tuples and dicts, as a snapshot
        cannot hold objects.
        """
        faults = [
            Fault(
                f"session.register is given {name} of type {type(part).__name__}, which has no "
                "state_dict and load_state_dict",
                "give it both methods, or keep the numbers in a module's buffers",
            )
            for name, part in parts.items()
            if not isinstance(part, Stateful)
        ]
        if faults:
            raise EchelonError(*faults)
        for name, part in parts.items():
            self._engine.parts.add_part(name, part, is_numbered=False)

    def _add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if faults := list(find_closure_faults(optimizer, "the optimizer")):
            raise EchelonError(*faults)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        known = self._engine.parts.parameter_ids
        foreign = sum(id(p) not in known for p in parameters)
        if foreign:
            raise EchelonError(
                Fault(
                    f"{type(optimizer).__name__} trains {foreign} parameters of a module that the "
                    "session does not have",
                    "prepare the module first: session.prepare(model, optimizer)",
                )
            )
        move_state_to_parameters(optimizer)
        self._engine.parts.add_part("optimizer", optimizer)
        self._optimizers[id(optimizer)] = _PreparedOptimizer(optimizer, self._engine)

    # --- the loop ---

    @_leaving_lost_rounds
    def batches(
        self,
        data: Any,
        batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        **loader: Any,
    ) -> Iterator[Any]:
        """Yield this process's share of every batch, on its device, in an order that is the same at
        any number of processes and after any resume.

        data         a tuple of tensors or arrays with a row per sample, a Dataset with a length, or
                     with steps a stream: an IterableDataset, or echelon.data.stream(make_shard)
        batch_size   samples of all processes together; default: trainer.batch_size
        epochs       passes over the data; default: trainer.epochs
        steps        batches in all, in place of epochs; default: trainer.steps
        loader       arguments as of torch's DataLoader: num_workers (default:
                     trainer.loader_workers), collate_fn, sampler and batch_sampler, which give the
                     order of all processes together, prefetch_factor, pin_memory, timeout, …

        The end of an iteration is where state is saved, and where a stop takes effect. There is one
        loop in a run; `every` says when an epoch ends.
        """
        return self._engine.open_batches(data, batch_size, epochs, steps, **loader)

    @_leaving_lost_rounds
    def steps(self, count: int | None = None) -> Iterator[int]:
        """Yield the numbers of `count` iterations that need no data, from 1; default:
        trainer.steps. For the rest it is as `batches`."""
        return self._engine.open_steps(count)

    def eval_batches(
        self,
        data: Any,
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Any]:
        """Yield this process's share of every batch of evaluation data, in order; default size:
        trainer.eval_batch_size. `collate_fn` makes a batch of a list of samples, as in `batches`.

        All processes have equally many batches. Collect results with `gather`, which knows how many
        samples of a share count: a share must not be empty, so where the samples do not suffice it
        has one that does not count.
        """
        self._engine.host_calls.add("session.eval_batches")
        return self._engine.iter_eval_batches(data, batch_size, collate_fn)

    @_leaving_lost_rounds
    def backward(self, loss: Tensor, count: float | Tensor | None = None) -> None:
        """Compute gradients of a loss that is a mean over this process's share of the batch.

        Afterwards every process has the gradients of the mean over the whole batch; they are summed
        while the backward pass still runs. `count` is the number of things the mean is over, where
        these are not the samples: tokens, or the sum of class weights. Calls add their gradients,
        as in torch.

        A share may count 0, and its loss be 0 / 0. A count on a GPU is not read, so let the loss be
        finite there: total / count.clamp(min=1).
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = (
                f"a tensor of shape {tuple(loss.shape)}"
                + ("" if loss.requires_grad else " without a gradient")
                if isinstance(loss, Tensor)
                else f"{type(loss).__name__}"
            )
            raise EchelonError(
                Fault(
                    f"session.backward is given {what} in step {self.completed_steps + 1}",
                    "give it the loss: a tensor with one number that depends on the parameters",
                )
            )
        self._require_loop("backward")
        engine, reducer = self._engine, self._reducer
        # What has exchanged tensors forward may do so backward.
        has_collectives = reducer is not None and count_collectives() != engine.collective_count
        weight = engine.compute_weight(count)
        engine.heartbeat.beat()
        # The gradient of weight * loss, without a product that autograd would have to go through.
        gradient: Tensor | None = None
        if isinstance(weight, Tensor) and weight.is_cpu:
            weight = float(weight)  # a copy to a GPU would wait for it
        if isinstance(weight, Tensor):
            gradient = weight.to(loss).view_as(loss)
        elif weight != 1.0:
            gradient = torch.full_like(loss, weight)
        if reducer is None:
            loss.backward(gradient)  # type: ignore[no-untyped-call]
            engine.agreement.note_requests()
            return
        # The mean over nothing is 0 / 0, and its gradients would be too, though they count nothing.
        counts_nothing = isinstance(weight, float) and weight == 0.0
        is_left_out = counts_nothing and not (self._gathers_gradients or loss.isfinite())
        reducer.begin(engine.backward_count, may_send_early=not has_collectives)
        try:
            if not is_left_out:
                loss.backward(gradient)  # type: ignore[no-untyped-call]
        except BaseException:
            reducer.abort()
            raise
        engine.agreement.agree_in_backward(reducer.finish)
        engine.backward_count += 1
        engine.collective_count = count_collectives()

    def _require_loop(self, call: str) -> None:
        if not self._engine.parts.is_complete:
            raise EchelonError(
                Fault(
                    f"session.{call} is called, but no loop of the session has begun",
                    "iterate over session.batches(data), which takes the place of a DataLoader, or "
                    "over session.steps(count)",
                )
            )
        if self._engine.is_loop_over:
            raise EchelonError(
                Fault(
                    f"session.{call} is called after the loop, whose last snapshot is saved",
                    "train in the loop; give it more steps or epochs",
                )
            )

    def _refuse_gradient(self, parameter: Tensor) -> None:
        """Raise where a gradient for an optimizer is computed without `backward`: it would be that
        of a process's share."""
        is_used = any(prepared.has_parameter(parameter) for prepared in self._optimizers.values())
        if is_used and not self._open_engine.is_over:
            raise EchelonError(
                Fault(
                    f"loss.backward() is called in step {self.completed_steps + 1}, so the "
                    f"gradients of {self.world_size} processes would not add up to those of the "
                    "batch",
                    "call session.backward(loss) in its place",
                )
            )

    def step(self, optimizer: torch.optim.Optimizer, clip: float | None = None) -> None:
        """Clip the gradients of the optimizer to a total norm, step it, and clear them."""
        prepared = self._optimizers.get(id(optimizer))
        if prepared is None:
            raise EchelonError(
                Fault(
                    f"session.step is given {type(optimizer).__name__}, which is no optimizer that "
                    "the session has",
                    "prepare it: session.prepare(model, optimizer)",
                )
            )
        self._require_loop("step")
        parameters = prepared.list_parameters()
        with_gradient = [p for p in parameters if p.grad is not None]
        if not with_gradient:
            raise EchelonError(
                Fault(
                    f"no parameter of {type(optimizer).__name__} has a gradient in step "
                    f"{self.completed_steps + 1}",
                    "call session.backward(loss) before session.step, and clear nothing between",
                )
            )
        if self._reducer is not None:
            self._require_reduced(optimizer, with_gradient, self._reducer)
        if clip is not None:
            require_clip(clip, self._engine.step + 1)
            self._grad_norm = nn.utils.clip_grad_norm_(with_gradient, clip)
        prepared.step()
        self._engine.agreement.has_step = self._engine.has_stepped = True
        for p in with_gradient:
            p.grad = None

    def _require_reduced(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: list[nn.Parameter],
        reducer: GradientReducer,
    ) -> None:
        """Raise where a gradient is not one of `backward`, which sums over all processes."""
        ids = set(map(id, parameters))
        if foreign := len(ids - reducer.reduced_ids):
            raise EchelonError(
                Fault(
                    f"{foreign} parameters of {type(optimizer).__name__} have a gradient in step "
                    f"{self.completed_steps + 1} that session.backward has not computed, so "
                    f"{self.world_size} processes would train apart",
                    "make all parameters before session.prepare, and give session.backward a loss "
                    "that has this gradient, such as (parameter * gradient.detach()).sum()",
                )
            )
        reducer.reduced_ids -= ids

    # --- between ---

    def every(
        self, steps: int | None = None, epochs: int | None = None, minutes: float | None = None
    ) -> bool:
        """Return whether something is due in this iteration: every so many steps, in the last batch
        of every so many epochs, or every so many minutes by the clock of rank 0, from the start of
        the loop. The last iteration of the loop is always due, and all processes are told the same.
        """
        given = [number for number in (steps, epochs) if number is not None]
        is_interval = all(number >= 1 for number in given) and (minutes is None or minutes > 0)
        if not is_interval or not (given or minutes):
            of_minutes = "" if minutes is None else f", minutes={minutes}"
            raise EchelonError(
                Fault(
                    f"session.every is given steps={steps}, epochs={epochs}{of_minutes}, which is "
                    "no interval",
                    "write session.every(epochs=1)",
                )
            )
        self._engine.host_calls.add("session.every")
        return self._engine.is_iteration_due(steps, epochs, minutes)

    def log(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Log numbers for metrics.jsonl and the trackers, by name or as a dict: tensors with one
        number, ints, floats. Every process logs its own.

        A line is written every trainer.log_steps iterations, with the mean over these iterations
        and over all processes, weighted by their samples, or by the `count` of the last backward.

        Numbers that come after the loop belong to its last step. Texts, echelon.Image and
        echelon.Histogram are logged too, at once and for this iteration; those of rank 0 count.
        """
        if not (values is None or isinstance(values, Mapping)):
            raise EchelonError(
                Fault(
                    f"session.log is given {type(values).__name__} without a name (rank "
                    f"{self.rank}, step {self.completed_steps + 1})",
                    "name it: session.log(loss=loss)",
                )
            )
        self._engine.host_calls.add("session.log")
        values = {**(values or {}), **more}
        media = {n: v for n, v in values.items() if isinstance(v, (str, Image, Histogram))}
        numbers = {
            name: _read_number(name, value, self)
            for name, value in values.items()
            if name not in media
        }
        self._engine.add_metrics(numbers)
        if media:
            self._engine.log_media(media)

    @_leaving_lost_rounds
    def best(self, higher_is_better: bool | None = None, **value: float | Tensor) -> bool:
        """Log the result of an evaluation, and mark this iteration's snapshot where it is the best
        so far. Returns whether it is. Every process gives the same number; rank 0's counts.

            session.best(accuracy=evaluate(model))

        The direction is known of common names such as accuracy or loss.
        """
        if len(value) != 1:
            raise EchelonError(
                Fault(
                    f"session.best is given {len(value)} numbers",
                    "give the one that decides, and log the others: session.best(accuracy=0.9)",
                )
            )
        [(name, given)] = value.items()
        direction = guess_best_is(name)
        if higher_is_better is not None:
            direction = "max" if higher_is_better else "min"
        if direction is None:
            raise EchelonError(
                Fault(
                    f"session.best({name}=…): the name does not say whether more or less of it is "
                    "better",
                    f"say it: session.best({name}=…, higher_is_better=True)",
                )
            )
        self._engine.host_calls.add("session.best")
        number = _read_number(name, given, self)
        return self._engine.record_best(name, float(number), direction)

    def stop(self) -> None:
        """End the loop on all processes, as a run that is finished: after this iteration where it
        is called before the first `backward`, and otherwise after the next one."""
        self._engine.host_calls.add("session.stop")
        self._engine.agreement.request_finish()

    @_leaving_lost_rounds
    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all processes' shares as one tensor; gradients flow back through it.

        Rows that do not count, of a process without a sample, are left out.
        """
        if not isinstance(rows, Tensor) or not rows.ndim:
            raise EchelonError(
                Fault(
                    f"session.gather is given {type(rows).__name__} without rows in step "
                    f"{self.completed_steps + 1}",
                    "give it a tensor with a row per sample of this process's share",
                )
            )
        count = self._engine.share_count
        self._gathers_gradients |= rows.requires_grad
        self._engine.begin_message("session.gather")
        return gather_rows(rows[:0] if count == 0 else rows, self.world_size)

    def split(self, rows: Rows) -> Rows:
        """Return this process's share of rows that every process has: of a tensor, a list, a range.

            for seed in session.split(range(64)): ...

        `gather` puts tensors of the shares together again, in the same order. A share may be empty.
        The shares may differ by one row, so give `backward` their length as `count`.
        """
        sliced: Any = rows
        try:
            share = cut_share(len(sliced), self.rank, self.world_size)
        except TypeError:
            raise EchelonError(
                Fault(
                    f"session.split is given {type(rows).__name__} without rows in step "
                    f"{self.completed_steps + 1}",
                    "give it a tensor, a list or a range, the same one on every process",
                )
            ) from None
        own: Rows = sliced[share.start : share.stop]
        return own

    def print(self, *values: Any) -> None:
        """Print on rank 0 alone."""
        self._engine.host_calls.add("session.print")
        if self.is_main_process:
            print(*values, file=sys.stderr)


class _PreparedOptimizer:
    """An optimizer of the session. Its own `step` is refused until the session is over: the session
    would not know that the iteration has trained something."""

    def __init__(self, optimizer: torch.optim.Optimizer, engine: SessionEngine) -> None:
        self._optimizer = optimizer
        self._unprofiled_step = UnprofiledStep(optimizer)
        self._is_stepping = False
        self._refuse_own_step(optimizer, engine)

    def step(self) -> None:
        """Step the optimizer."""
        self._is_stepping = True
        try:
            self._unprofiled_step()
        finally:
            self._is_stepping = False

    def _refuse_own_step(self, optimizer: torch.optim.Optimizer, engine: SessionEngine) -> None:
        plain = optimizer.step

        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self._is_stepping or engine.is_over:
                return plain(*args, **kwargs)
            raise EchelonError(
                Fault(
                    f"optimizer.step() of {type(optimizer).__name__} is called in step "
                    f"{engine.step + 1}, which the session would not count",
                    "call session.step(optimizer) in its place, which clips and clears as well",
                )
            )

        if hasattr(plain, "_wrapped_by_lr_sched"):  # or torch warns that its wrapper is gone
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        # A bound method, as a learning-rate scheduler expects to find one.
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]

    def list_parameters(self) -> list[nn.Parameter]:
        """Return the optimizer's parameters. Listed anew, as the loop may have added a group."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def has_parameter(self, parameter: Tensor) -> bool:
        """Return whether the optimizer trains a parameter."""
        return any(p is parameter for p in self.list_parameters())


def _read_number(name: str, value: Any, session: Session) -> float | Tensor:
    """Return a number as it is; a tensor stays on its device, as reading it would make a GPU
    wait."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.item() if value.device.type == "cpu" else value.detach()
    if isinstance(value, (int, float)):
        return float(value)
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:  # of numpy
        number = value.item()
        if isinstance(number, (int, float)):
            return float(number)
    what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"
    raise EchelonError(
        Fault(
            f"{name} is no number: {type(value).__name__}, {what} (rank {session.rank}, step "
            f"{session.completed_steps + 1})",
            f"log one number, such as {name}={name}.mean()"
            if isinstance(value, Tensor)
            else "log a number, a text, an echelon.Image or an echelon.Histogram",
        )
    )

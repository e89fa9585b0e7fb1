"""The loop of an experiment with a step of its own, over a session."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.errors import EchelonError, Fault
from echelon.experiment.definition import Experiment, get_parts_by_name
from echelon.experiment.module_modes import enter_train_mode
from echelon.experiment.optimizer_flags import OptimizerFlags
from echelon.experiment.schedule_length import require_long_schedule, waits_for_metric
from echelon.snapshot.layout import EMA_NAME
from echelon.train.prepare import make_batch_transform
from echelon.train.same_data_check import require_same_data
from echelon.train.sanity_check import check_evaluation
from echelon.train.session import Session
from echelon.train.session_engine import SessionEngine
from echelon.train.weight_average import WeightAverage

if TYPE_CHECKING:
    from echelon.cudagraph.user_step_capture import UserStepCapture


class StepLoop:
    """Trains an experiment as a user's loop would: it calls the experiment's step with every batch,
    logs what that returns, and steps the schedules. Everything else the session does."""

    def __init__(
        self, experiment: Experiment, engine: SessionEngine, snapshot_info: Mapping[str, Any]
    ) -> None:
        self.engine = engine
        self._experiment, self._snapshot_info = experiment, snapshot_info
        self._session = Session(engine)
        schedules = get_parts_by_name("schedule", experiment.schedule).values()
        self._schedules = [s for s in schedules if not waits_for_metric(s)]
        self._parameters: list[nn.Parameter] = []
        """Of all optimizers."""
        self._optimizers: dict[str, Optimizer] = get_parts_by_name(
            "optimizer", experiment.optimizer
        )
        self._average: WeightAverage | None = None
        self._capture: UserStepCapture | None = None
        self._host_calls: set[str] = set()
        """What the step has asked the session so far, and a CUDA graph would not ask again."""
        self._has_trained = engine.step > 0
        self._transform = make_batch_transform(
            experiment, engine.config, engine.group.world, engine.device
        )

    def run(self) -> None:
        """Train to the last step, or until a stop is asked for."""
        engine = self.engine
        self._prepare_parts()
        is_own_snapshot = engine.config.trainer.resume in ("auto", "never")
        is_own_snapshot |= self._snapshot_info.get("is_in_memory", False)
        engine.evaluations.restore(self._snapshot_info, is_own_snapshot)
        batches = self._open_batches()
        for schedule in self._schedules:
            require_long_schedule(schedule, engine.total_steps)
        engine.evaluations.stop_early_if_due(engine)
        check_evaluation(engine)
        engine.finish_evaluation()
        enter_train_mode(self._experiment.model)
        self._prepare_capture()
        for batch in batches:
            self._run_step(batch)
        engine.finish("the training function returned")

    def _prepare_parts(self) -> None:
        """Give all parts to the session, which restores them. Those with names keep them."""
        experiment, optimizers = self._experiment, self._optimizers
        named = optimizers | get_parts_by_name("schedule", experiment.schedule)
        self.engine.parts.own_names = {id(part): name for name, part in named.items()}
        self.engine.parts.optimizer_flags = {id(o): OptimizerFlags(o) for o in optimizers.values()}
        self._session.prepare(experiment.model, *named.values())
        self._session.register(**(experiment.state or {}))
        self.engine.parts.equal_state = experiment.state or {}
        self._prepare_average()
        groups = [group for o in optimizers.values() for group in o.param_groups]
        self._parameters = [p for group in groups for p in group["params"]]

    def _prepare_capture(self) -> None:
        """Let the step be captured as a CUDA graph where that is possible; say why where not."""
        engine, capture = self.engine, self.engine.config.trainer.capture
        is_required, steps_left = capture == "always", engine.total_steps - engine.step
        if capture == "never" or not steps_left:
            return
        if not is_required and engine.device.type != "cuda":
            return
        from echelon.cudagraph.capture import find_step_shortage, report_obstacle
        from echelon.cudagraph.user_step_capture import UserStepCapture, find_user_step_obstacle

        experiment, world_size = self._experiment, engine.group.world.size
        followed = [getattr(schedule, "optimizer", None) for schedule in self._schedules]
        scheduled = [o for o in self._optimizers.values() if any(o is f for f in followed)]
        reason = find_step_shortage(steps_left, is_required) or find_user_step_obstacle(
            experiment, self._optimizers, scheduled, engine.device, world_size
        )
        if reason is not None:
            if is_required or engine.group.world.rank == 0:
                report_obstacle(reason, is_required)
            return
        self._capture = UserStepCapture(
            experiment,
            self._optimizers,
            self._call_step,
            engine.metrics.add_sums,
            self._clear_gradients,
            self._host_calls,
            is_required,
        )
        engine.flush_metrics = self._capture.flush_sums

    def _prepare_average(self) -> None:
        """Begin or restore the average of the weights, which is evaluated in their place."""
        if (decay := self.engine.config.trainer.ema) is None:
            return
        self._average = WeightAverage(self._experiment.model, decay)
        self._average.begin()
        self._session.register(**{EMA_NAME: self._average})
        if (evaluator := self.engine.evaluations.evaluator) is not None:
            evaluator.use_weights = self._average.use_averages

    def _open_batches(self) -> Iterator[Any]:
        """Return this rank's shares of the batches; without data, the numbers of the steps."""
        experiment, engine = self._experiment, self.engine
        if experiment.train_data is None:
            if engine.config.trainer.steps is None:
                raise EchelonError(
                    Fault(
                        "the experiment has no train_data, so epochs do not say how long it trains",
                        "set trainer.steps, or give it train_data",
                    )
                )
            return self._session.steps()
        batches = self._session.batches(
            experiment.train_data,
            collate_fn=experiment.collate_fn,
            sampler=experiment.sampler,
            batch_sampler=experiment.batch_sampler,
            **(experiment.loader or {}),
        )
        require_same_data(engine.group, None, eval_data=experiment.eval_data)
        return batches

    def _run_step(self, batch: Any) -> None:
        """Train with one batch: replay the captured step, or call the experiment's."""
        if self._transform is not None:
            count = max(1, self.engine.share_count)  # a rank without a sample has a spare one
            batch = self._transform.transform_data(batch, count, self.engine.step)
        if self._capture is not None and self._capture.try_replay(batch):
            self.engine.agreement.note_requests()  # which the graph does not repeat
            self.engine.agreement.has_step = True
        else:
            numbers, _ = self._call_step(batch)
            self._session.log(numbers)
        for schedule in self._schedules:
            schedule.step()

    def _call_step(self, batch: Any) -> tuple[dict[str, Any], float | Tensor]:
        """Call the experiment's step; return what it logs, and the number of things that this is a
        mean over.

        What it leaves in gradients does not come to the next one, as it would not come to a run
        that is resumed in between.
        """
        assert self._experiment.step is not None
        self.engine.host_calls.clear()
        returned = self._experiment.step(batch, self._session)
        self._host_calls |= self.engine.host_calls
        if not (returned is None or isinstance(returned, Mapping)):
            raise EchelonError(
                Fault(
                    f"the experiment's step returned {type(returned).__name__} in step "
                    f"{self._number}",
                    'let it return the numbers to log by name: {"loss": loss}',
                )
            )
        if self.engine.agreement.has_step:
            self._has_trained = True
            if self._average is not None:
                self._average.update()
        else:
            self._require_step(returned or {})
        self._clear_gradients()
        numbers = {str(name): value for name, value in (returned or {}).items()}
        return numbers, self.engine.log_weight

    def _clear_gradients(self) -> None:
        for p in self._parameters:
            p.grad = None

    @property
    def _number(self) -> int:
        """The number of the current step, from 1."""
        return self.engine.step + 1

    def _require_step(self, returned: Mapping[str, Any]) -> None:
        """Raise where a step has computed something to train with, but has stepped no optimizer.

        It may have nothing to train with, such as while a replay buffer fills, but not for ever.
        """
        if any(p.grad is not None for p in self._parameters):
            raise EchelonError(
                Fault(
                    f"the experiment's step has computed gradients in step {self._number}, but "
                    "stepped no optimizer, and gradients do not come to the next step",
                    "call session.step(optimizer) after session.backward(loss)",
                )
            )
        losses = [k for k, v in returned.items() if isinstance(v, Tensor) and v.requires_grad]
        is_over = self._number == self.engine.total_steps and not self._has_trained
        if losses or is_over:
            what = f"returned {losses[0]}, but trained nothing" if losses else "trained nothing"
            when = f"in step {self._number}" if losses else f"in {self._number} steps"
            raise EchelonError(
                Fault(
                    f"the experiment's step {what} {when}",
                    "call session.backward(loss) and session.step(optimizer) in it",
                )
            )

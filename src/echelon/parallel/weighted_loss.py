"""The weighted loss of a rank as a module that DDP wraps, and what travels with its gradients."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from echelon.experiment.definition import Experiment, Predict, default_predict
from echelon.experiment.loss_check import compute_loss, split_prediction
from echelon.experiment.loss_counts import compute_counted_loss
from echelon.experiment.precision import Precision
from echelon.experiment.trained_parameters import TrainedParameters
from echelon.parallel.replica import StepRequests
from echelon.parallel.user_collectives import ShapeComparison, count_collectives

# What the parameter that nobody trains carries: the requests of a rank, its loss, whether
# parameters were frozen or thawed on it, and what its loss counts.
LOSS_SLOT = len(StepRequests())
RESULT_WIDTH = LOSS_SLOT + 1
CHANGE_SLOT = RESULT_WIDTH
COUNT_SLOT = CHANGE_SLOT + 1
_CONTROL_WIDTH = COUNT_SLOT + 1


class WeightedLoss(nn.Module):
    """The weighted loss of one rank's share, as a module.

    DDP sees one scalar, and every rank has a backward pass, also a rank without a sample.
    """

    def __init__(
        self,
        experiment: Experiment,
        device: torch.device,
        parameters: TrainedParameters,
        precision: Precision,
    ) -> None:
        super().__init__()
        self._trained_parameters = parameters
        self._precision = precision
        # Declared first: its gradient then lands in DDP's last bucket, with the model's first
        # layers, and no bucket waits for it.
        self.control = nn.Parameter(torch.zeros(_CONTROL_WIDTH, device=device))
        self._control_values = torch.zeros(_CONTROL_WIDTH, device=device)
        self._loss_slot = self._control_values[LOSS_SLOT]
        self._count_slot = self._control_values[COUNT_SLOT]
        self._sent_requests = StepRequests()
        self._sent_factor: float | None = None
        self._has_sent_change = False
        self.model = experiment.model
        self.predict: Predict = experiment.predict or default_predict
        self.loss = experiment.loss
        self.count = experiment.count
        self.scaler = experiment.scaler
        self.communicates: bool | None = None
        """Whether code of the user calls collectives; None: it has not been called yet."""
        self.shape_comparison: ShapeComparison | None = None
        """For a step whose shares differ: compares shapes in collectives of the user."""
        self.dense: list[nn.Parameter] = []
        """The trained parameters whose gradients DDP averages."""

    def write_requests(self, requests: StepRequests) -> None:
        """Writes this rank's requests to the device, where the next backward pass sends them."""
        if requests != self._sent_requests:  # seldom, so the write to the device costs nothing
            self._control_values[:LOSS_SLOT] = torch.tensor([float(w) for w in requests])
            self._sent_requests = requests

    def compute_mean_loss(self, data: Any) -> Tensor:
        """Return the mean loss over `data`. This is the function that `trainer.compile`
        compiles."""
        if self._precision.half_dtype is None:  # even an empty context costs 1 % of a small step
            return compute_loss(self.loss, *split_prediction(self.predict(self.model, data)))
        with self._precision.autocast():
            return compute_loss(self.loss, *split_prediction(self.predict(self.model, data)))

    def compute_counted_loss(self, data: Any) -> tuple[Tensor, float | Tensor]:
        """Return the mean loss over `data` and the number it is over; compiled as well."""
        assert callable(self.count)
        if self._precision.half_dtype is None:
            prediction = split_prediction(self.predict(self.model, data))
            return compute_counted_loss(self.loss, self.count, *prediction)
        with self._precision.autocast():
            prediction = split_prediction(self.predict(self.model, data))
            return compute_counted_loss(self.loss, self.count, *prediction)

    def forward(self, data: Any, weight: float) -> Tensor:
        """Return the scaled loss plus a term whose gradient is the requests and the loss.

        The gradient of `control.dot(values)` with respect to `control` is `values`: so DDP's
        all-reduce of gradients also averages requests and loss.
        """
        count: float | Tensor = 1.0
        if data is None:
            weighted = self.make_zero_loss(self.dense)
        elif self.communicates is False:
            weighted, count = self.compute(data)
        else:
            weighted, count = self._compute_with_collectives(data)
        factor = weight * count if isinstance(count, float) else weight * count.to(weighted.device)
        # It usually is 1, and a product costs 1 % of a small step.
        if isinstance(factor, Tensor) or factor != 1.0:
            weighted = weighted * factor
        # The loss of a filler batch need not be finite.
        self._loss_slot.copy_(weighted.detach()) if weight else self._loss_slot.zero_()
        if callable(self.count) and (isinstance(factor, Tensor) or factor != self._sent_factor):
            self._count_slot.fill_(factor)
            self._sent_factor = None if isinstance(factor, Tensor) else factor
        if self._trained_parameters.have_changed():
            self._control_values[CHANGE_SLOT] = 1.0
            self._has_sent_change = True
        elif self._has_sent_change:
            self._control_values[CHANGE_SLOT] = 0.0
            self._has_sent_change = False
        return self.apply_grad_scaler(weighted) + self.control.dot(self._control_values)

    def compute(self, data: Any) -> tuple[Tensor, float | Tensor]:
        """Return the mean loss over `data` and the number it is over; 1 where that is known."""
        if callable(self.count):
            return self.compute_counted_loss(data)
        return self.compute_mean_loss(data), 1.0

    def _compute_with_collectives(self, data: Any) -> tuple[Tensor, float | Tensor]:
        """Computes the same, and finds out whether code of the user communicates with other
        ranks."""
        before = count_collectives()
        with self.shape_comparison or nullcontext():
            result = self.compute(data)
        self.communicates = bool(self.communicates) or count_collectives() != before
        return result

    def apply_grad_scaler(self, loss: Tensor) -> Tensor:
        """Return the loss as the backward pass needs it: scaled where there is a gradient
        scaler."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def make_zero_loss(self, parameters: list[nn.Parameter]) -> Tensor:
        """Return a loss of zero that gives these parameters a gradient of zeros, from no sample.

        Tables are never among them: their gradient would be as large as the table.
        """
        device = self._control_values.device
        zeros = [(p.flatten()[:1].sum() * 0.0).to(device) for p in parameters]
        return torch.stack(zeros).sum() if zeros else torch.zeros_like(self._control_values[0])

"""For Echelon: the same as an experiment, in a file of one's own."""

from __future__ import annotations

import torch
from step_marks import Marks
from toy import FEATURES, data

import echelon


def experiment() -> echelon.Experiment:
    model = torch.nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.register_step_post_hook(Marks().made_step)
    return echelon.Experiment(
        model=model,
        optimizer=optimizer,
        loss=torch.nn.functional.mse_loss,
        train_data=data(),
    )


if __name__ == "__main__":
    echelon.main(experiment)

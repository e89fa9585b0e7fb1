"""For Lightning and its own launcher: the same in its words, everything optional off."""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from step_marks import Marks
from torch import Tensor
from toy import BATCH, FEATURES, Ready, data


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Linear(FEATURES, 1)
        self.marks: Marks | None = None

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_start(self) -> None:
        self.marks = Marks()

    def on_train_batch_end(self, *_: Any) -> None:
        assert self.marks is not None
        self.marks.made_step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1)
    given = parser.parse_args()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=given.steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    x, y = data()
    mine = BATCH // 2
    batches = list(zip(x.split(mine), y.split(mine), strict=True))
    trainer.fit(Module(), Ready(batches[trainer.global_rank :: 2]))


if __name__ == "__main__":
    main()

"""examples/ports/cifar10_speedrun.py with Lightning: PYTHONPATH=examples/ports python FILE"""

import lightning
import torch
from cifar10_speedrun import (
    Muon,
    Settings,
    augment_pictures,
    draw_stripes,
    look_several_times,
    make_model,
)
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

# --- training


class Training(lightning.LightningModule):
    def __init__(self, cfg: Settings) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.cfg = cfg
        self.model = make_model(cfg.width)

    def configure_optimizers(self):
        filters = [p for p in self.model.parameters() if p.ndim == 4]
        biases = [p for p in self.model.parameters() if p.ndim == 1]
        groups = [
            {"params": biases, "lr": self.cfg.bias_lr},
            {"params": [self.model[-1].weight], "lr": self.cfg.head_lr},
        ]
        muon = Muon(filters, lr=self.cfg.muon_lr)
        sgd = torch.optim.SGD(groups, momentum=0.85, nesterov=True)
        steps = int(self.trainer.estimated_stepping_batches)
        schedules = [
            torch.optim.lr_scheduler.LinearLR(each, 1.0, 0.0, steps) for each in (muon, sgd)
        ]
        return [muon, sgd], schedules

    def training_step(self, batch, index):
        pictures, labels = augment_pictures(batch)
        loss = cross_entropy(self.model(pictures), labels, label_smoothing=0.2)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer, schedule in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            optimizer.step()
            schedule.step()
        self.log("loss", loss, sync_dist=True)

    def validation_step(self, batch, index):
        pictures, labels = batch
        is_right = look_several_times(self.model, pictures).argmax(1) == labels
        self.log("accuracy", is_right.float().mean(), prog_bar=True, sync_dist=True)


def main() -> None:
    cfg = Settings()
    lightning.seed_everything(0)
    data, eval_data = draw_stripes(cfg.samples, seed=0), draw_stripes(512, seed=1)
    trainer = lightning.Trainer(
        max_epochs=8,
        logger=CSVLogger("runs", "cifar10"),
        log_every_n_steps=10,
        callbacks=[ModelCheckpoint("runs/cifar10", monitor="accuracy", mode="max", save_last=True)],
    )
    trainer.fit(
        Training(cfg),
        DataLoader(TensorDataset(*data), 128, shuffle=True),
        DataLoader(TensorDataset(*eval_data), 256),
        ckpt_path="last",
    )


if __name__ == "__main__":
    main()

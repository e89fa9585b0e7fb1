"""examples/ports/image_classification.py with Lightning: PYTHONPATH=examples/ports python FILE"""

import lightning
import torch
from image_classification import Settings, draw_stripes, make_metrics, make_model, mix_pictures
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

# --- training


class Training(lightning.LightningModule):
    def __init__(self, cfg: Settings) -> None:
        super().__init__()
        self.cfg = cfg
        self.model = make_model(cfg.width)
        self.metrics = nn.ModuleDict(make_metrics())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(
            self.model.parameters(), lr=self.cfg.lr, momentum=0.9, weight_decay=1e-4, nesterov=True
        )
        steps = int(self.trainer.estimated_stepping_batches)
        rise, fall = LinearLR(optimizer, 0.01, 1.0, 30), CosineAnnealingLR(optimizer, steps - 30)
        schedule = SequentialLR(optimizer, [rise, fall], [30])
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def training_step(self, batch, index):
        images, targets = mix_pictures(batch, self.cfg.mixup)
        loss = cross_entropy(self.model(images), targets, label_smoothing=0.1)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        images, labels = batch
        scores = self.model(images)
        self.log("eval_loss", cross_entropy(scores, labels, label_smoothing=0.1), sync_dist=True)
        for name, metric in self.metrics.items():
            metric(scores, labels)
            self.log(name, metric, prog_bar=True)


def main() -> None:
    cfg = Settings()
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        max_epochs=10,
        logger=CSVLogger("runs", "images"),
        log_every_n_steps=10,
        callbacks=[
            EMAWeightAveraging(decay=0.98),
            ModelCheckpoint("runs/images", monitor="top1", mode="max", save_last=True),
        ],
    )
    trainer.fit(
        Training(cfg),
        DataLoader(TensorDataset(*draw_stripes(cfg.samples, seed=0)), 64, shuffle=True),
        DataLoader(TensorDataset(*draw_stripes(512, seed=1)), 64),
        ckpt_path="last",
    )


if __name__ == "__main__":
    main()

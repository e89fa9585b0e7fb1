"""examples/ports/text_classification.py with Lightning: PYTHONPATH=examples/ports python FILE"""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from text_classification import (
    IGNORED,
    Settings,
    make_metrics,
    make_model,
    pad_sentences,
    predict,
    write_sentences,
)
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

# --- training


class Training(lightning.LightningModule):
    def __init__(self, cfg: Settings) -> None:
        super().__init__()
        self.cfg = cfg
        self.model = make_model(cfg.width, cfg.library)
        self.metrics = nn.ModuleDict(make_metrics())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.cfg.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def training_step(self, batch, index):
        scores, labels = predict(self.model, batch)
        # DDP takes the mean over processes, but the loss is a mean over tokens.
        tokens = (labels != IGNORED).sum()
        everyone = self.all_gather(tokens).float().mean()
        loss = cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum") / everyone
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        scores, labels = predict(self.model, batch)
        tokens = int((labels != IGNORED).sum())
        loss = cross_entropy(scores, labels, ignore_index=IGNORED)
        self.log("eval_loss", loss, batch_size=tokens, sync_dist=True)
        for name, metric in self.metrics.items():
            metric(scores, labels)
            self.log(name, metric, prog_bar=True)


def main() -> None:
    cfg = Settings()
    lightning.seed_everything(0)
    train_data, eval_data = write_sentences(cfg.sentences, seed=0), write_sentences(256, seed=1)
    trainer = lightning.Trainer(
        max_epochs=5,
        logger=CSVLogger("runs", "text"),
        log_every_n_steps=10,
        callbacks=[ModelCheckpoint("runs/text", monitor="accuracy", mode="max", save_last=True)],
    )
    trainer.fit(
        Training(cfg),
        DataLoader(train_data, 32, shuffle=True, collate_fn=pad_sentences),
        DataLoader(eval_data, 32, collate_fn=pad_sentences),
        ckpt_path="last",
    )


if __name__ == "__main__":
    main()

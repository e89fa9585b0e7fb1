"""examples/ports/fine_tuning.py with Lightning: PYTHONPATH=examples/ports python FILE [METHOD]"""

import sys

import lightning
import torch
from fine_tuning import Settings, make_pretrained, make_student, make_task
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from torch.utils.data import DataLoader, TensorDataset

# --- training


class Training(lightning.LightningModule):
    def __init__(self, cfg: Settings) -> None:
        super().__init__()
        self.cfg = cfg
        self.is_distilled = cfg.method == "distillation"
        self.teacher = make_pretrained(cfg.width, turn=0.5 if self.is_distilled else 0.0)
        self.model = make_student(cfg, self.teacher)

    def configure_optimizers(self):
        return torch.optim.Adam(self.model.parameters(), lr=self.cfg.lr)

    def on_train_epoch_start(self):
        if self.cfg.method == "thawing":
            self.model.body.requires_grad_(self.current_epoch + 1 >= self.cfg.thaw_epoch)

    def training_step(self, batch, index):
        points, labels = batch
        output = self.model(points)
        loss = cross_entropy(output, labels)
        if self.is_distilled:
            answers = log_softmax(self.teacher(points) / self.cfg.temperature, 1)
            guesses = log_softmax(output / self.cfg.temperature, 1)
            loss = loss + kl_div(guesses, answers, reduction="batchmean", log_target=True)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        points, labels = batch
        right = self.model(points).argmax(1) == labels
        self.log("accuracy", right.float().mean(), sync_dist=True, prog_bar=True)


def main() -> None:
    cfg = Settings(method=sys.argv[1] if sys.argv[1:] else "lora")
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        max_epochs=10,
        strategy="ddp_find_unused_parameters_true",  # as the body is thawed later
        logger=CSVLogger("runs", "fine_tuning"),
        callbacks=[ModelCheckpoint("runs/tuned", monitor="accuracy", mode="max", save_last=True)],
        log_every_n_steps=10,
    )
    train_data = TensorDataset(*make_task(cfg.samples, seed=1, turn=0.5))
    eval_data = TensorDataset(*make_task(512, seed=2, turn=0.5))
    trainer.fit(
        Training(cfg),
        DataLoader(train_data, 32 // trainer.world_size, shuffle=True),
        DataLoader(eval_data, 32),
        ckpt_path="last",
    )


if __name__ == "__main__":
    main()

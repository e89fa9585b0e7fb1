"""examples/ports/nanogpt.py with Lightning: PYTHONPATH=examples/ports python FILE"""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from nanogpt import GPT, Settings, make_windows, write_text
from torch.utils.data import DataLoader, TensorDataset

# --- training


class Training(lightning.LightningModule):
    def __init__(self, cfg: Settings, letters: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.model = GPT(letters, cfg.width, cfg.layers, cfg.heads, cfg.context)

    def configure_optimizers(self):
        optimizer = self.model.make_optimizer(self.cfg.lr, self.cfg.weight_decay)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.cfg.lr, 300, pct_start=0.1)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def training_step(self, batch, index):
        loss = self.model(*batch).mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, index, dataloader_idx=0):
        name = ("train_loss", "eval_loss")[dataloader_idx]
        loss = self.model(*batch).mean()
        self.log(name, loss, sync_dist=True, add_dataloader_idx=False)


def main() -> None:
    cfg = Settings()
    lightning.seed_everything(0)
    letters, data, others = make_windows(write_text(cfg.letters), cfg.context)
    known = [column[: len(others[0])] for column in data]
    trainer = lightning.Trainer(
        max_steps=300,
        gradient_clip_val=1.0,
        val_check_interval=cfg.eval_steps,
        check_val_every_n_epoch=None,
        logger=CSVLogger("runs", "nanogpt"),
        log_every_n_steps=10,
        callbacks=[ModelCheckpoint("runs/nanogpt", monitor="eval_loss", save_last=True)],
    )
    trainer.fit(
        Training(cfg, letters),
        DataLoader(TensorDataset(*data), 32, shuffle=True),
        [DataLoader(TensorDataset(*each), 256) for each in (known, others)],
        ckpt_path="last",
    )


if __name__ == "__main__":
    main()

"""examples/ports/vae.py with Lightning: PYTHONPATH=examples/ports python vae_lightning.py"""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset
from vae import Settings, VariationalAutoencoder, draw_discs

# --- training


class Training(lightning.LightningModule):
    def __init__(self, cfg: Settings) -> None:
        super().__init__()
        self.cfg = cfg
        self.model = VariationalAutoencoder(cfg.width, cfg.latent)

    def configure_optimizers(self):
        return torch.optim.Adam(self.model.parameters(), lr=self.cfg.lr)

    def training_step(self, batch, index):
        reconstruction, divergence = (term.mean() for term in self.model(*batch))
        loss = reconstruction + divergence
        terms = {"loss": loss, "reconstruction": reconstruction, "divergence": divergence}
        self.log_dict(terms, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        loss = sum(self.model(*batch)).mean()
        self.log("eval_loss", loss, prog_bar=True, sync_dist=True)


def main() -> None:
    cfg = Settings()
    lightning.seed_everything(0)
    train_data = TensorDataset(draw_discs(cfg.samples, seed=0))
    eval_data = TensorDataset(draw_discs(256, seed=1))
    trainer = lightning.Trainer(
        max_epochs=8,
        logger=CSVLogger("runs", "vae"),
        log_every_n_steps=10,
        callbacks=[ModelCheckpoint("runs/vae", monitor="eval_loss", save_last=True)],
    )
    trainer.fit(
        Training(cfg),
        DataLoader(train_data, 64, shuffle=True),
        DataLoader(eval_data, 64),
        ckpt_path="last",
    )


if __name__ == "__main__":
    main()

"""examples/ports/dcgan.py with Lightning: PYTHONPATH=examples/ports python dcgan_lightning.py"""

import lightning
import torch
from dcgan import (
    NOISE,
    Settings,
    compare_pictures,
    draw_discs,
    judge,
    make_discriminator,
    make_generator,
)
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

# --- training


class Adversaries(lightning.LightningModule):
    def __init__(self, cfg: Settings, pictures: Tensor) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.cfg, self.pictures = cfg, pictures
        self.generator = make_generator(cfg.width)
        self.discriminator = make_discriminator(cfg.width)
        self.register_buffer("fixed_noise", torch.randn(256, NOISE))

    def configure_optimizers(self):
        return [
            torch.optim.Adam(model.parameters(), lr=self.cfg.lr, betas=(0.5, 0.999))
            for model in (self.generator, self.discriminator)
        ]

    def training_step(self, batch, index):
        (real,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        fake = self.generator(torch.randn(len(real), NOISE, device=self.device))

        loss_d = judge(self.discriminator, real, 1.0)
        loss_d = loss_d + judge(self.discriminator, fake.detach(), 0.0)
        optimizer_d.zero_grad()
        self.manual_backward(loss_d)
        optimizer_d.step()

        loss_g = judge(self.discriminator, fake, 1.0)
        optimizer_g.zero_grad()
        self.manual_backward(loss_g)
        optimizer_g.step()

        self.log_dict({"loss": loss_g, "loss_d": loss_d}, sync_dist=True)

    @torch.no_grad()
    def on_train_epoch_end(self):
        made = self.generator(self.fixed_noise).cpu()
        self.log("distance", compare_pictures(self.pictures, made), prog_bar=True)


def main() -> None:
    cfg = Settings()
    lightning.seed_everything(0)
    pictures = draw_discs(cfg.samples)
    loader = DataLoader(TensorDataset(pictures), 64, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=8,
        logger=CSVLogger("runs", "dcgan"),
        log_every_n_steps=10,
        callbacks=[ModelCheckpoint("runs/dcgan", monitor="distance", save_last=True)],
    )
    trainer.fit(Adversaries(cfg, pictures), loader, ckpt_path="last")


if __name__ == "__main__":
    main()

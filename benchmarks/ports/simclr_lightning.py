"""examples/ports/simclr.py with Lightning: PYTHONPATH=examples/ports python FILE"""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from simclr import Encoder, Settings, Shapes, compute_similarities, make_pictures
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

# --- training


class SimCLR(lightning.LightningModule):
    def __init__(self, cfg: Settings) -> None:
        super().__init__()
        self.cfg = cfg
        self.model = Encoder(cfg.width)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=self.cfg.lr)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        first, second = batch
        pairs = torch.stack([self.model(first), self.model(second)], 1)
        if self.trainer.world_size > 1:
            pairs = self.all_gather(pairs, sync_grads=True).flatten(0, 1)
        similarities, partner = compute_similarities(pairs, self.cfg.temperature)
        loss = cross_entropy(similarities, partner)
        found = similarities.argmax(1) == partner
        self.log("loss", loss)
        self.log("partner_accuracy", found.float().mean())
        return loss

    def on_validation_epoch_start(self) -> None:
        pictures, labels = make_pictures(32, seed=1)
        self.known = normalize(self.model.body(pictures.to(self.device)))
        self.labels = labels.to(self.device)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        x, y = batch
        guessed = self.labels[(normalize(self.model.body(x)) @ self.known.T).argmax(1)]
        self.log("accuracy", (guessed == y).float().mean(), sync_dist=True, prog_bar=True)


def main() -> None:
    cfg = Settings()
    lightning.seed_everything(0)
    checkpoint = ModelCheckpoint("runs/simclr", monitor="accuracy", mode="max", save_last=True)
    trainer = lightning.Trainer(
        max_epochs=10,
        logger=CSVLogger("runs/simclr"),
        callbacks=[checkpoint],
        log_every_n_steps=1,
    )
    # Lightning's batches are of one process.
    batch_size = 64 // trainer.world_size
    train_data = DataLoader(Shapes(cfg.samples), batch_size, shuffle=True, drop_last=True)
    eval_data = DataLoader(TensorDataset(*make_pictures(128, seed=2)), batch_size)
    trainer.fit(SimCLR(cfg), train_data, eval_data, ckpt_path="last")


if __name__ == "__main__":
    main()

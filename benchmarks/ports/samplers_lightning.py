"""examples/ports/samplers.py with Lightning: PYTHONPATH=examples/ports python FILE [ORDER]"""

import random
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from samplers import CLASSES, Reader, Sentences, Settings, make_sampler, pad
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torchmetrics.classification import MulticlassAccuracy

# --- training


class Training(lightning.LightningModule):
    def __init__(self, cfg: Settings) -> None:
        super().__init__()
        self.cfg = cfg
        self.model = Reader(cfg.width)
        self.accuracy = MulticlassAccuracy(CLASSES, average="macro")

    def configure_optimizers(self):
        return torch.optim.Adam(self.model.parameters(), lr=self.cfg.lr)

    def training_step(self, batch, index):
        sentences, labels = batch
        loss = cross_entropy(self.model(sentences), labels)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        sentences, labels = batch
        output = self.model(sentences)
        self.accuracy(output, labels)
        self.log("eval_loss", cross_entropy(output, labels), sync_dist=True)
        self.log("eval_accuracy", self.accuracy, prog_bar=True)

    def train_dataloader(self):
        # Lightning shares samplers between processes, but not batch samplers, and an epoch of the
        # curriculum has its own length: the batches of every epoch are made and shared here.
        data = Sentences(self.cfg.samples, seed=0)
        options = make_sampler(self.cfg.order, data, batch_size=32)
        sampler = options.get("sampler", RandomSampler(data))
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.current_epoch)
        random.seed(self.current_epoch)  # the same order in every process
        torch.manual_seed(self.current_epoch)
        batches = options.get("batch_sampler", BatchSampler(sampler, 32, drop_last=False))
        own = [batch[self.global_rank :: self.trainer.world_size] for batch in batches]
        return DataLoader(data, batch_sampler=own, collate_fn=pad)

    def val_dataloader(self):
        return DataLoader(Sentences(self.cfg.samples, seed=1), 32, collate_fn=pad)


def main() -> None:
    cfg = Settings(order=sys.argv[1] if sys.argv[1:] else "weighted")
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        max_epochs=8,
        logger=CSVLogger("runs", "samplers"),
        callbacks=[ModelCheckpoint("runs/samplers", monitor="eval_loss", save_last=True)],
        log_every_n_steps=10,
        use_distributed_sampler=False,
        reload_dataloaders_every_n_epochs=1,
    )
    trainer.fit(Training(cfg), ckpt_path="last")


if __name__ == "__main__":
    main()

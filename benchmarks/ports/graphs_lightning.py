"""examples/ports/graphs.py with Lightning: PYTHONPATH=examples/ports python FILE"""

import lightning
import torch
from graphs import CLASSES, GIN, Graphs, Settings, join_graphs, make_graphs
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

# --- training


class Training(lightning.LightningModule):
    def __init__(self, cfg: Settings) -> None:
        super().__init__()
        self.cfg = cfg
        self.model = GIN(cfg.width)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def configure_optimizers(self):
        return torch.optim.Adam(self.model.parameters(), lr=self.cfg.lr)

    def training_step(self, graphs: Graphs, index):
        loss = cross_entropy(self.model(graphs), graphs.y)
        self.log("loss", loss, sync_dist=True, batch_size=len(graphs.y))
        return loss

    def validation_step(self, graphs: Graphs, index):
        output = self.model(graphs)
        self.accuracy(output, graphs.y)
        loss = cross_entropy(output, graphs.y)
        self.log("eval_loss", loss, sync_dist=True, batch_size=len(graphs.y))
        self.log("eval_accuracy", self.accuracy, prog_bar=True, batch_size=len(graphs.y))


def main() -> None:
    cfg = Settings()
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        max_epochs=8,
        logger=CSVLogger("runs", "graphs"),
        callbacks=[ModelCheckpoint("runs/graphs", monitor="eval_loss", save_last=True)],
        log_every_n_steps=10,
    )
    trainer.fit(
        Training(cfg),
        DataLoader(make_graphs(cfg.samples, seed=0), 32, shuffle=True, collate_fn=join_graphs),
        DataLoader(make_graphs(cfg.eval_samples, seed=1), 32, collate_fn=join_graphs),
        ckpt_path="last",
    )


if __name__ == "__main__":
    main()

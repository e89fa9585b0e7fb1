"""examples/ports/detection.py with Lightning: PYTHONPATH=examples/ports python FILE"""

import lightning
import torch
from detection import (
    Detector,
    Scenes,
    Settings,
    compute_losses,
    compute_mean_average_precision,
    draw_boxes,
    find_objects,
    join_scenes,
)
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader

# --- training


class Training(lightning.LightningModule):
    def __init__(self, cfg: Settings) -> None:
        super().__init__()
        self.cfg = cfg
        self.model = Detector(cfg.width)
        self.eval_data = Scenes(cfg.eval_samples, seed=1)
        self.found = []

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=self.cfg.lr)

    def training_step(self, batch, index):
        losses = compute_losses(self.model, batch)
        loss = sum(losses.values())
        self.log_dict({"loss": loss, **losses}, sync_dist=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch, index):
        # The sampler of several processes deals pictures out in turn.
        found = self.all_gather(find_objects(self.model, batch[0]))
        is_shared = self.trainer.world_size > 1
        self.found.append(found.transpose(0, 1).flatten(0, 1) if is_shared else found)

    def on_validation_epoch_end(self):
        found = torch.cat(self.found)[: len(self.eval_data)].cpu()
        self.found.clear()
        if not self.trainer.sanity_checking:
            pictures = draw_boxes(self.eval_data, found)
            self.logger.experiment.add_images("found", pictures, self.global_step)
            precision = compute_mean_average_precision(found, self.eval_data)
            self.log("map", precision, prog_bar=True, rank_zero_only=False)


def main() -> None:
    cfg = Settings()
    lightning.seed_everything(0)
    training = Training(cfg)
    trainer = lightning.Trainer(
        max_epochs=12,
        logger=TensorBoardLogger("runs", "detection"),
        callbacks=[ModelCheckpoint("runs/detection", monitor="map", mode="max", save_last=True)],
        log_every_n_steps=10,
        gradient_clip_val=10.0,
    )
    batch_size = 32 // trainer.world_size
    data = Scenes(cfg.samples, seed=0)
    trainer.fit(
        training,
        DataLoader(data, batch_size, shuffle=True, collate_fn=join_scenes),
        DataLoader(training.eval_data, batch_size, collate_fn=join_scenes),
        ckpt_path="last",
    )


if __name__ == "__main__":
    main()

"""examples/ports/reinforce.py with Lightning: PYTHONPATH=examples/ports python FILE"""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from reinforce import Settings, compute_loss, make_network, play
from torch import Tensor
from torch.utils.data import DataLoader

# --- training


class Reinforce(lightning.LightningModule):
    def __init__(self, cfg: Settings) -> None:
        super().__init__()
        self.cfg = cfg
        self.policy = make_network(cfg.width)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.policy.parameters(), lr=self.cfg.lr)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        step, world_size = self.global_step + 1, self.trainer.world_size
        episodes = range(self.global_rank, self.cfg.episodes, world_size)
        seeds = [step * self.cfg.episodes + episode for episode in episodes]
        played = play(self.policy, seeds, self.cfg.length, self.device)
        loss = compute_loss(self.policy, played, self.cfg.gamma)
        reward = self.all_gather(played.is_played.sum(1)).mean()
        self.log("loss", loss, sync_dist=True)
        self.log("reward", reward, prog_bar=True)
        if reward > 0.95 * self.cfg.length:
            self.trainer.should_stop = True
        return loss


def main() -> None:
    cfg = Settings()
    lightning.seed_everything(0)
    checkpoint = ModelCheckpoint("runs/reinforce", save_last=True, every_n_train_steps=10)
    trainer = lightning.Trainer(
        max_steps=60,
        min_epochs=0,  # so that it may stop within the first
        logger=CSVLogger("runs/reinforce"),
        callbacks=[checkpoint],
        log_every_n_steps=1,
        use_distributed_sampler=False,
    )
    updates = DataLoader(range(60))
    trainer.fit(Reinforce(cfg), updates, ckpt_path="last")


if __name__ == "__main__":
    main()

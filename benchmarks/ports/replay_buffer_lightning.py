"""examples/ports/replay_buffer.py with Lightning: PYTHONPATH=examples/ports python FILE"""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from reinforce import make_network
from replay_buffer import Games, ReplayBuffer, Settings, compute_loss, make_moves
from torch.utils.data import DataLoader

# --- training


class Training(lightning.LightningModule):
    def __init__(self, cfg: Settings) -> None:
        super().__init__()
        self.cfg = cfg
        self.network, self.target = make_network(cfg.width), make_network(cfg.width)
        self.target.load_state_dict(self.network.state_dict())
        self.target.requires_grad_(False)
        self.saved = {}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.network.parameters(), lr=self.cfg.lr)

    def on_fit_start(self):
        self.games = Games(self.cfg.games, self.device)
        self.buffer = ReplayBuffer(self.cfg.capacity, self.device)
        if self.saved:
            self.games.load_state_dict(self.saved["games"])
            self.buffer.load_state_dict(self.saved["buffer"])

    def on_save_checkpoint(self, checkpoint):
        checkpoint["games"] = self.games.state_dict()
        checkpoint["buffer"] = self.buffer.state_dict()

    def on_load_checkpoint(self, checkpoint):
        self.saved = {name: checkpoint[name] for name in ("games", "buffer")}

    def take_share(self, rows):
        return rows.tensor_split(self.trainer.world_size)[self.global_rank]

    def training_step(self, batch, index):
        cfg, step = self.cfg, self.global_step + 1
        generator = torch.Generator().manual_seed(step)
        draws = torch.rand(cfg.games, 2, generator=generator).to(self.device)
        epsilon = max(0.05, 1.0 - step / cfg.exploration_steps)
        states, own_draws = self.take_share(self.games.states), self.take_share(draws)
        moves = make_moves(self.network, states, own_draws, epsilon)
        if self.trainer.world_size > 1:
            moves = self.all_gather(moves).flatten(0, 1)
        lengths = self.games.go_on(moves, generator)
        self.buffer.add(moves)
        rows = self.take_share(self.buffer.draw(cfg.batch_size, generator))
        loss = compute_loss(self.network, self.target, rows, cfg.gamma)
        self.log("loss", loss, sync_dist=True)
        self.log("game_length", lengths.mean(), prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs, batch, index):
        for slow, fast in zip(self.target.parameters(), self.network.parameters(), strict=True):
            slow.data.lerp_(fast.data, self.cfg.target_rate)


def main() -> None:
    cfg = Settings()
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        max_steps=800,
        logger=CSVLogger("runs", "replay_buffer"),
        callbacks=[ModelCheckpoint("runs/replay_buffer", save_last=True, every_n_train_steps=100)],
        log_every_n_steps=10,
        gradient_clip_val=10.0,
        use_distributed_sampler=False,
    )
    trainer.fit(Training(cfg), DataLoader(range(800)), ckpt_path="last")


if __name__ == "__main__":
    main()

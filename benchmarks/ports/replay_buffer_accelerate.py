"""examples/ports/replay_buffer.py with Accelerate: PYTHONPATH=examples/ports python FILE"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from reinforce import make_network
from replay_buffer import Games, ReplayBuffer, Settings, compute_loss, make_moves

# --- training


def main() -> None:
    cfg, folder = Settings(), Path("runs/replay_buffer")
    set_seed(0)
    accelerator = Accelerator(log_with="tensorboard", project_dir=folder)
    accelerator.init_trackers("logs")
    network, target = make_network(cfg.width), make_network(cfg.width)
    target.load_state_dict(network.state_dict())
    optimizer = torch.optim.AdamW(network.parameters(), lr=cfg.lr)
    network, optimizer = accelerator.prepare(network, optimizer)
    target.to(accelerator.device)
    games = Games(cfg.games, accelerator.device)
    buffer = ReplayBuffer(cfg.capacity, accelerator.device)
    accelerator.register_for_checkpointing(target, games, buffer)
    saved = sorted(folder.glob("step-*"))
    done = int(saved[-1].name.split("-")[1]) if saved else 0
    if saved:
        accelerator.load_state(saved[-1])

    def take_share(rows):
        return rows.tensor_split(accelerator.num_processes)[accelerator.process_index]

    for step in range(done + 1, 800 + 1):
        generator = torch.Generator().manual_seed(step)
        draws = torch.rand(cfg.games, 2, generator=generator).to(accelerator.device)
        epsilon = max(0.05, 1.0 - step / cfg.exploration_steps)
        moves = make_moves(network, take_share(games.states), take_share(draws), epsilon)
        moves = accelerator.gather(moves)
        lengths = games.go_on(moves, generator)
        buffer.add(moves)

        batch = take_share(buffer.draw(cfg.batch_size, generator))
        loss = compute_loss(network, target, batch, cfg.gamma)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(network.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        for slow, fast in zip(target.parameters(), network.parameters(), strict=True):
            slow.data.lerp_(fast.data, cfg.target_rate)
        if step % 10 == 0:
            mean_loss = accelerator.gather(loss.detach()).mean()
            numbers = {"loss": mean_loss.item(), "game_length": lengths.mean().item()}
            accelerator.log(numbers, step)
        if step % 100 == 0 or step == 800:
            accelerator.save_state(folder / f"step-{step:06d}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""examples/ports/reinforce.py with Accelerate: PYTHONPATH=examples/ports python FILE"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from reinforce import Settings, compute_loss, make_network, play

# --- training

FOLDER = Path("runs/reinforce")


def main() -> None:
    cfg = Settings()
    set_seed(0)
    accelerator = Accelerator(log_with="tensorboard", project_dir=FOLDER)
    accelerator.init_trackers("reinforce")
    policy = make_network(cfg.width)
    optimizer = torch.optim.Adam(policy.parameters(), lr=cfg.lr)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    saved = sorted(FOLDER.glob("step-*"))
    done = int(saved[-1].name.split("-")[1]) if saved else 0
    if saved:
        accelerator.load_state(saved[-1])
    for step in range(done + 1, 60 + 1):
        episodes = range(accelerator.process_index, cfg.episodes, accelerator.num_processes)
        seeds = [step * cfg.episodes + episode for episode in episodes]
        played = play(policy, seeds, cfg.length, accelerator.device)
        loss = compute_loss(policy, played, cfg.gamma)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        reward = accelerator.gather(played.is_played.sum(1)).mean()
        mean_loss = accelerator.gather(loss.detach()).mean()
        accelerator.log({"loss": mean_loss.item(), "reward": reward.item()}, step=step)
        if step % 10 == 0:
            accelerator.save_state(FOLDER / f"step-{step:06d}")
        if reward > 0.95 * cfg.length:
            accelerator.print(f"solved after {step} steps")
            break
    accelerator.save_state(FOLDER / f"step-{step:06d}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

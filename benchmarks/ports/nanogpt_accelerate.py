"""examples/ports/nanogpt.py with Accelerate: PYTHONPATH=examples/ports python FILE"""

from pathlib import Path

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import set_seed
from nanogpt import GPT, Settings, make_windows, write_text
from torch.utils.data import DataLoader, TensorDataset

# --- training


def main() -> None:
    cfg, folder = Settings(), Path("runs/nanogpt")
    accelerator = Accelerator(
        log_with="tensorboard", project_dir=folder, step_scheduler_with_optimizer=False
    )
    accelerator.init_trackers("logs")
    set_seed(0)
    letters, data, others = make_windows(write_text(cfg.letters), cfg.context)
    known = [column[: len(others[0])] for column in data]
    model = GPT(letters, cfg.width, cfg.layers, cfg.heads, cfg.context)
    optimizer = model.make_optimizer(cfg.lr, cfg.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, cfg.lr, 300, pct_start=0.1)
    model, optimizer, schedule, loader, known_loader, other_loader = accelerator.prepare(
        model,
        optimizer,
        schedule,
        DataLoader(TensorDataset(*data), 32, shuffle=True),
        DataLoader(TensorDataset(*known), 256),
        DataLoader(TensorDataset(*others), 256),
    )
    saved = sorted(folder.glob("step-*"))
    if saved:
        accelerator.load_state(saved[-1])
    best, step = float("inf"), len(saved) * cfg.eval_steps

    while step < 300:
        epoch, skipped = divmod(step, len(loader))
        loader.set_epoch(epoch)
        for tokens, targets in skip_first_batches(loader, skipped):
            loss = model(tokens, targets).mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                accelerator.log({"loss": loss.item()}, step)
            if step % cfg.eval_steps == 0:
                train_loss = estimate_loss(model, known_loader, accelerator)
                eval_loss = estimate_loss(model, other_loader, accelerator)
                accelerator.log({"train_loss": train_loss, "eval_loss": eval_loss}, step)
                accelerator.print(f"step {step}: loss {eval_loss:.4f}")
                accelerator.save_state(folder / f"step-{step:06d}")
                if eval_loss < best:
                    best = eval_loss
                    accelerator.save_state(folder / "best")
            if step == 300:
                break
    accelerator.end_training()


@torch.no_grad()
def estimate_loss(model, loader, accelerator) -> float:
    model.eval()
    losses = [accelerator.gather_for_metrics(model(*batch)) for batch in loader]
    model.train()
    return torch.cat(losses).mean().item()


if __name__ == "__main__":
    main()

"""examples/ports/detection.py with Accelerate: PYTHONPATH=examples/ports python FILE"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
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
from torch.utils.data import DataLoader, TensorDataset

# --- training


def main() -> None:
    cfg, folder = Settings(), Path("runs/detection")
    set_seed(0)
    accelerator = Accelerator(log_with="tensorboard", project_dir=folder)
    accelerator.init_trackers("logs")
    model = Detector(cfg.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    data, eval_data = Scenes(cfg.samples, seed=0), Scenes(cfg.eval_samples, seed=1)
    pictures = TensorDataset(torch.stack([picture for picture, _, _ in eval_data.scenes]))
    batch_size = 32 // accelerator.num_processes
    model, optimizer, loader, eval_loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(data, batch_size, shuffle=True, collate_fn=join_scenes),
        DataLoader(pictures, batch_size),
    )
    saved = sorted(folder.glob("epoch-*"))
    if saved:
        accelerator.load_state(saved[-1])
    best, step = 0.0, len(saved) * len(loader)

    for epoch in range(len(saved), 12):
        for batch in loader:
            losses = compute_losses(model, batch)
            loss = sum(losses.values())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                means = accelerator.reduce({"loss": loss.detach(), **losses}, reduction="mean")
                accelerator.log({name: value.item() for name, value in means.items()}, step)
        found = find_all_objects(model, eval_loader, accelerator)
        precision = compute_mean_average_precision(found, eval_data)
        accelerator.log({"map": precision}, step)
        tracker = accelerator.get_tracker("tensorboard")
        tracker.log_images({"found": draw_boxes(eval_data, found)}, step)
        accelerator.print(f"epoch {epoch}: map {precision:.4f}")
        accelerator.save_state(folder / f"epoch-{epoch:03d}")
        if precision > best:
            best = precision
            accelerator.save_state(folder / "best")
    accelerator.end_training()


@torch.no_grad()
def find_all_objects(model, loader, accelerator) -> torch.Tensor:
    found = [accelerator.gather_for_metrics(find_objects(model, x)) for (x,) in loader]
    return torch.cat(found).cpu()


if __name__ == "__main__":
    main()

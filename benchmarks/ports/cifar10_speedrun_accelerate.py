"""examples/ports/cifar10_speedrun.py with Accelerate: PYTHONPATH=examples/ports python FILE"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from cifar10_speedrun import (
    Muon,
    Settings,
    augment_pictures,
    draw_stripes,
    look_several_times,
    make_model,
)
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

# --- training


def main() -> None:
    cfg, folder = Settings(), Path("runs/cifar10")
    accelerator = Accelerator(
        log_with="tensorboard", project_dir=folder, step_scheduler_with_optimizer=False
    )
    accelerator.init_trackers("logs")
    set_seed(0)
    model = make_model(cfg.width)
    filters = [p for p in model.parameters() if p.ndim == 4]
    biases = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": biases, "lr": cfg.bias_lr},
        {"params": [model[-1].weight], "lr": cfg.head_lr},
    ]
    muon = Muon(filters, lr=cfg.muon_lr)
    sgd = torch.optim.SGD(groups, momentum=0.85, nesterov=True)
    data, eval_data = draw_stripes(cfg.samples, seed=0), draw_stripes(512, seed=1)
    model, muon, sgd, loader, eval_loader = accelerator.prepare(
        model,
        muon,
        sgd,
        DataLoader(TensorDataset(*data), 128, shuffle=True),
        DataLoader(TensorDataset(*eval_data), 256),
    )
    schedules = [LinearLR(each, 1.0, 0.0, 8 * len(loader)) for each in (muon, sgd)]
    accelerator.register_for_checkpointing(*schedules)
    saved = sorted(folder.glob("epoch-*"))
    if saved:
        accelerator.load_state(saved[-1])
    best, step = 0.0, len(saved) * len(loader)

    for epoch in range(len(saved), 8):
        for batch in loader:
            pictures, labels = augment_pictures(batch)
            loss = cross_entropy(model(pictures), labels, label_smoothing=0.2)
            accelerator.backward(loss)
            for each in (muon, sgd, *schedules):
                each.step()
            muon.zero_grad()
            sgd.zero_grad()
            step += 1
            if step % 10 == 0:
                accelerator.log({"loss": loss.item()}, step)
        accuracy = evaluate(model, eval_loader, accelerator)
        accelerator.log({"accuracy": accuracy}, step)
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.4f}")
        accelerator.save_state(folder / f"epoch-{epoch:03d}")
        if accuracy > best:
            best = accuracy
            accelerator.save_state(folder / "best")
    accelerator.end_training()


@torch.no_grad()
def evaluate(model, loader, accelerator) -> float:
    model.eval()
    is_right = [
        accelerator.gather_for_metrics(look_several_times(model, pictures).argmax(1) == labels)
        for pictures, labels in loader
    ]
    model.train()
    return torch.cat(is_right).float().mean().item()


if __name__ == "__main__":
    main()

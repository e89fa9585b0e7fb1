"""examples/ports/image_classification.py with Accelerate: PYTHONPATH=examples/ports python FILE"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from image_classification import Settings, draw_stripes, make_metrics, make_model, mix_pictures
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

# --- training


def main() -> None:
    cfg, epochs, folder = Settings(), 10, Path("runs/images")
    accelerator = Accelerator(
        log_with="tensorboard", project_dir=folder, step_scheduler_with_optimizer=False
    )
    accelerator.init_trackers("logs")
    set_seed(0)
    model = make_model(cfg.width)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=cfg.lr, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    model, optimizer, loader, eval_loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(TensorDataset(*draw_stripes(cfg.samples, seed=0)), 64, shuffle=True),
        DataLoader(TensorDataset(*draw_stripes(512, seed=1)), 64),
    )
    fall = CosineAnnealingLR(optimizer, epochs * len(loader) - 30)
    schedule = SequentialLR(optimizer, [LinearLR(optimizer, 0.01, 1.0, 30), fall], [30])
    average = AveragedModel(
        accelerator.unwrap_model(model), multi_avg_fn=get_ema_multi_avg_fn(0.98)
    )
    accelerator.register_for_checkpointing(schedule, average)
    saved = sorted(folder.glob("epoch-*"))
    if saved:
        accelerator.load_state(saved[-1])
    best, step = 0.0, len(saved) * len(loader)

    for epoch in range(len(saved), epochs):
        for batch in loader:
            images, targets = mix_pictures(batch, cfg.mixup)
            loss = cross_entropy(model(images), targets, label_smoothing=0.1)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            average.update_parameters(accelerator.unwrap_model(model))
            step += 1
            if step % 10 == 0:
                accelerator.log({"loss": loss.item()}, step)
        results = evaluate(average, eval_loader, accelerator)
        accelerator.log(results, step)
        accelerator.print(f"epoch {epoch}: {results}")
        accelerator.save_state(folder / f"epoch-{epoch:03d}")
        if results["top1"] > best:
            best = results["top1"]
            accelerator.save_state(folder / "best")
    accelerator.end_training()


@torch.no_grad()
def evaluate(model, loader, accelerator) -> dict[str, float]:
    model.eval()
    metrics = {name: metric.to(accelerator.device) for name, metric in make_metrics().items()}
    losses = []
    for images, labels in loader:
        scores, labels = accelerator.gather_for_metrics((model(images), labels))
        losses.append(cross_entropy(scores, labels, label_smoothing=0.1, reduction="none"))
        for metric in metrics.values():
            metric.update(scores, labels)
    results = {name: metric.compute().item() for name, metric in metrics.items()}
    return results | {"eval_loss": torch.cat(losses).mean().item()}


if __name__ == "__main__":
    main()

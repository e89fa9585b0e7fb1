"""examples/ports/text_classification.py with Accelerate: PYTHONPATH=examples/ports python FILE"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from text_classification import (
    IGNORED,
    Settings,
    make_metrics,
    make_model,
    pad_sentences,
    predict,
    write_sentences,
)
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

# --- training


def main() -> None:
    cfg, epochs, folder = Settings(), 5, Path("runs/text")
    accelerator = Accelerator(
        log_with="tensorboard", project_dir=folder, step_scheduler_with_optimizer=False
    )
    accelerator.init_trackers("logs")
    set_seed(0)
    model = make_model(cfg.width, cfg.library)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    train_data, eval_data = write_sentences(cfg.sentences, seed=0), write_sentences(256, seed=1)
    model, optimizer, loader, eval_loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(train_data, 32, shuffle=True, collate_fn=pad_sentences),
        DataLoader(eval_data, 32, collate_fn=pad_sentences),
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, epochs * len(loader))
    accelerator.register_for_checkpointing(schedule)
    saved = sorted(folder.glob("epoch-*"))
    if saved:
        accelerator.load_state(saved[-1])
    best, step = 0.0, len(saved) * len(loader)

    for epoch in range(len(saved), epochs):
        for batch in loader:
            scores, labels = predict(model, batch)
            # DDP takes the mean over processes, but the loss is a mean over tokens.
            tokens = (labels != IGNORED).sum()
            everyone = accelerator.gather(tokens).float().mean()
            loss = cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum") / everyone
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                accelerator.log({"loss": loss.item()}, step)
        results = evaluate(model, eval_loader, accelerator)
        accelerator.log(results, step)
        accelerator.print(f"epoch {epoch}: {results}")
        accelerator.save_state(folder / f"epoch-{epoch:03d}")
        if results["accuracy"] > best:
            best = results["accuracy"]
            accelerator.save_state(folder / "best")
    accelerator.end_training()


@torch.no_grad()
def evaluate(model, loader, accelerator) -> dict[str, float]:
    model.eval()
    metrics = {name: metric.to(accelerator.device) for name, metric in make_metrics().items()}
    losses = torch.zeros(2, device=accelerator.device)
    for batch in loader:
        scores, labels = predict(model, batch)
        loss = cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum")
        losses += torch.stack([loss, (labels != IGNORED).sum()])
        for metric in metrics.values():
            metric.update(scores, labels)
    model.train()
    total, tokens = accelerator.reduce(losses)
    results = {name: metric.compute().item() for name, metric in metrics.items()}
    return results | {"eval_loss": (total / tokens).item()}


if __name__ == "__main__":
    main()

"""examples/ports/samplers.py with Accelerate: PYTHONPATH=examples/ports python FILE [ORDER]"""

import random
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from samplers import CLASSES, Reader, Sentences, Settings, make_sampler, pad
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torchmetrics.classification import MulticlassAccuracy

# --- training


def main() -> None:
    cfg = Settings(order=sys.argv[1] if sys.argv[1:] else "weighted")
    folder = Path("runs/samplers")
    set_seed(0)
    accelerator = Accelerator(log_with="tensorboard", project_dir=folder)
    accelerator.init_trackers("logs")
    model = Reader(cfg.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    data = Sentences(cfg.samples, seed=0)
    eval_loader = DataLoader(Sentences(cfg.samples, seed=1), 32, collate_fn=pad)
    model, optimizer, eval_loader = accelerator.prepare(model, optimizer, eval_loader)
    saved = sorted(folder.glob("epoch-*"))
    if saved:
        accelerator.load_state(saved[-1])
    best, step = float("inf"), 0

    for epoch in range(len(saved), 8):
        model.train()
        for sentences, labels in make_epoch(cfg, data, epoch, accelerator):
            loss = cross_entropy(model(sentences), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                accelerator.log({"loss": accelerator.gather(loss.detach()).mean().item()}, step)
        numbers = evaluate(model, eval_loader, accelerator)
        accelerator.log(numbers, step)
        accelerator.print(f"epoch {epoch}: {numbers}")
        accelerator.save_state(folder / f"epoch-{epoch:03d}")
        if numbers["eval_loss"] < best:
            best = numbers["eval_loss"]
            accelerator.save_state(folder / "best")
    accelerator.end_training()


def make_epoch(cfg: Settings, data: Sentences, epoch: int, accelerator: Accelerator):
    """Yield this process's share of every batch of an epoch."""
    options = make_sampler(cfg.order, data, batch_size=32)
    sampler = options.get("sampler", RandomSampler(data))
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    random.seed(epoch)  # the same order in every process
    torch.manual_seed(epoch)
    batches = options.get("batch_sampler", BatchSampler(sampler, 32, drop_last=False))
    own = [batch[accelerator.process_index :: accelerator.num_processes] for batch in batches]
    for batch in DataLoader(data, batch_sampler=own, collate_fn=pad):
        yield [column.to(accelerator.device) for column in batch]


@torch.no_grad()
def evaluate(model, loader, accelerator) -> dict:
    accuracy = MulticlassAccuracy(CLASSES, average="macro").to(accelerator.device)
    losses = []
    model.eval()
    for sentences, labels in loader:
        output, labels = accelerator.gather_for_metrics((model(sentences), labels))
        accuracy.update(output, labels)
        losses.append(cross_entropy(output, labels, reduction="none"))
    loss = torch.cat(losses).mean().item()
    return {"eval_loss": loss, "eval_accuracy": accuracy.compute().item()}


if __name__ == "__main__":
    main()

"""examples/ports/fine_tuning.py with Accelerate: PYTHONPATH=examples/ports python FILE [METHOD]"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from fine_tuning import Settings, make_pretrained, make_student, make_task
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from torch.utils.data import DataLoader, TensorDataset

# --- training


def main() -> None:
    cfg = Settings(method=sys.argv[1] if sys.argv[1:] else "lora")
    folder = Path("runs/fine_tuning")
    set_seed(0)
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(log_with="tensorboard", project_dir=folder, kwargs_handlers=[unused])
    accelerator.init_trackers("logs")
    is_distilled = cfg.method == "distillation"
    teacher = make_pretrained(cfg.width, turn=0.5 if is_distilled else 0.0)
    model = make_student(cfg, teacher)
    teacher.to(accelerator.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    if cfg.method == "thawing":
        model.body.requires_grad_(True)  # DDP must know all parameters that it will average
    train_data = TensorDataset(*make_task(cfg.samples, seed=1, turn=0.5))
    eval_data = TensorDataset(*make_task(512, seed=2, turn=0.5))
    model, optimizer, loader, eval_loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(train_data, 32 // accelerator.num_processes, shuffle=True),
        DataLoader(eval_data, 32),
    )
    saved = sorted(folder.glob("epoch-*"))
    if saved:
        accelerator.load_state(saved[-1])
    best, step = 0.0, len(saved) * len(loader)

    for epoch in range(len(saved), 10):
        if cfg.method == "thawing":
            is_thawed = epoch + 1 >= cfg.thaw_epoch
            accelerator.unwrap_model(model).body.requires_grad_(is_thawed)
        for points, labels in loader:
            output = model(points)
            loss = cross_entropy(output, labels)
            if is_distilled:
                answers = log_softmax(teacher(points) / cfg.temperature, 1)
                guesses = log_softmax(output / cfg.temperature, 1)
                loss = loss + kl_div(guesses, answers, reduction="batchmean", log_target=True)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                accelerator.log({"loss": accelerator.gather(loss.detach()).mean().item()}, step)
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
    right = [
        accelerator.gather_for_metrics(model(points).argmax(1) == labels)
        for points, labels in loader
    ]
    return torch.cat(right).float().mean().item()


if __name__ == "__main__":
    main()

"""examples/ports/graphs.py with Accelerate: PYTHONPATH=examples/ports python FILE"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from graphs import GIN, Graphs, Settings, join_graphs, make_graphs
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

# --- training


def main() -> None:
    cfg, folder = Settings(), Path("runs/graphs")
    set_seed(0)
    accelerator = Accelerator(log_with="tensorboard", project_dir=folder)
    accelerator.init_trackers("logs")
    model = GIN(cfg.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    train_data, eval_data = make_graphs(cfg.samples, seed=0), make_graphs(cfg.eval_samples, seed=1)
    model, optimizer, loader, eval_loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(train_data, 32, shuffle=True, collate_fn=join_graphs),
        DataLoader(eval_data, 32, collate_fn=join_graphs),
    )
    saved = sorted(folder.glob("epoch-*"))
    if saved:
        accelerator.load_state(saved[-1])
    best, step = float("inf"), len(saved) * len(loader)

    for epoch in range(len(saved), 8):
        model.train()
        for graphs in loader:
            graphs = move_graphs(graphs, accelerator.device)
            loss = cross_entropy(model(graphs), graphs.y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                accelerator.log({"loss": accelerator.gather(loss.detach()).mean().item()}, step)
        losses, right = evaluate(model, eval_loader, accelerator)
        accelerator.log({"eval_loss": losses, "eval_accuracy": right}, step)
        accelerator.print(f"epoch {epoch}: accuracy {right:.4f}")
        accelerator.save_state(folder / f"epoch-{epoch:03d}")
        if losses < best:
            best = losses
            accelerator.save_state(folder / "best")
    accelerator.end_training()


def move_graphs(graphs: Graphs, device: torch.device) -> Graphs:
    """Accelerate moves tensors, lists and dicts; other batches need a method `to`."""
    return Graphs(**{name: column.to(device) for name, column in vars(graphs).items()})


@torch.no_grad()
def evaluate(model, loader, accelerator) -> tuple[float, float]:
    model.eval()
    losses, right = [], []
    for graphs in loader:
        graphs = move_graphs(graphs, accelerator.device)
        output = model(graphs)
        loss = cross_entropy(output, graphs.y, reduction="none")
        losses.append(accelerator.gather_for_metrics(loss))
        right.append(accelerator.gather_for_metrics(output.argmax(1) == graphs.y))
    return torch.cat(losses).mean().item(), torch.cat(right).float().mean().item()


if __name__ == "__main__":
    main()

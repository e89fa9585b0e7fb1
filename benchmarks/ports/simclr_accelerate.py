"""examples/ports/simclr.py with Accelerate: PYTHONPATH=examples/ports python FILE"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from simclr import Encoder, Settings, Shapes, compute_similarities, make_pictures
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

# --- training

FOLDER = Path("runs/simclr")


def main() -> None:
    cfg = Settings()
    set_seed(0)
    accelerator = Accelerator(log_with="tensorboard", project_dir=FOLDER)
    accelerator.init_trackers("simclr")
    # Accelerate's batches are of one process.
    batch_size = 64 // accelerator.num_processes
    loader = DataLoader(Shapes(cfg.samples), batch_size, shuffle=True, drop_last=True)
    eval_loader = DataLoader(TensorDataset(*make_pictures(128, seed=2)), batch_size)
    model = Encoder(cfg.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    model, optimizer, loader, eval_loader = accelerator.prepare(
        model, optimizer, loader, eval_loader
    )
    done = len(list(FOLDER.glob("epoch-*")))
    if done:
        accelerator.load_state(FOLDER / f"epoch-{done - 1}")
    step, best = done * len(loader), 0.0
    for epoch in range(done, 10):
        for first, second in loader:
            pairs = torch.stack([model(first), model(second)], 1)
            if accelerator.num_processes > 1:
                pairs = torch.cat(all_gather(pairs))
            similarities, partner = compute_similarities(pairs, cfg.temperature)
            loss = cross_entropy(similarities, partner)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            found = (similarities.argmax(1) == partner).float().mean()
            accelerator.log({"loss": loss.item(), "partner_accuracy": found.item()}, step=step)
        accuracy = float(evaluate(accelerator.unwrap_model(model), eval_loader, accelerator))
        accelerator.log({"accuracy": accuracy}, step=step)
        accelerator.save_state(FOLDER / f"epoch-{epoch}")
        if accuracy > best:
            best = accuracy
            accelerator.save_model(model, FOLDER / "best")
    accelerator.end_training()


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, accelerator: Accelerator) -> Tensor:
    pictures, labels = (column.to(accelerator.device) for column in make_pictures(32, seed=1))
    known = normalize(model.body(pictures))
    right = []
    for x, y in loader:
        guessed = labels[(normalize(model.body(x)) @ known.T).argmax(1)]
        right.append(accelerator.gather_for_metrics(guessed == y))
    return torch.cat(right).float().mean()


if __name__ == "__main__":
    main()

"""examples/ports/vae.py with Accelerate: PYTHONPATH=examples/ports python vae_accelerate.py"""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from vae import Settings, VariationalAutoencoder, draw_discs

# --- training


def main() -> None:
    cfg, folder = Settings(), Path("runs/vae")
    accelerator = Accelerator(log_with="tensorboard", project_dir=folder)
    accelerator.init_trackers("logs")
    set_seed(0)
    model = VariationalAutoencoder(cfg.width, cfg.latent)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    train_data = TensorDataset(draw_discs(cfg.samples, seed=0))
    eval_data = TensorDataset(draw_discs(256, seed=1))
    model, optimizer, loader, eval_loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(train_data, 64, shuffle=True),
        DataLoader(eval_data, 64),
    )
    saved = sorted(folder.glob("epoch-*"))
    if saved:
        accelerator.load_state(saved[-1])
    best, step = float("inf"), len(saved) * len(loader)

    for epoch in range(len(saved), 8):
        for (pictures,) in loader:
            reconstruction, divergence = (term.mean() for term in model(pictures))
            loss = reconstruction + divergence
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                terms = {"loss": loss, "reconstruction": reconstruction, "divergence": divergence}
                accelerator.log({name: term.item() for name, term in terms.items()}, step)
        eval_loss = evaluate(model, eval_loader, accelerator)
        accelerator.log({"eval_loss": eval_loss}, step)
        accelerator.print(f"epoch {epoch}: loss {eval_loss:.4f}")
        accelerator.save_state(folder / f"epoch-{epoch:03d}")
        if eval_loss < best:
            best = eval_loss
            accelerator.save_state(folder / "best")
    accelerator.end_training()


@torch.no_grad()
def evaluate(model, loader, accelerator) -> float:
    model.eval()
    losses = [accelerator.gather_for_metrics(sum(model(*batch))) for batch in loader]
    model.train()
    return torch.cat(losses).mean().item()


if __name__ == "__main__":
    main()

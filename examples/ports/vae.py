"""A variational autoencoder, both terms of whose loss are logged at every step.

A port of pytorch/examples, vae/main.py. The pictures are made here: bright discs on a dark ground.
Yours are tensors or a Dataset in the place of `draw_discs`, with values from 0 to 1, such as MNIST.

python vae.py
python vae.py launch=local launch.procs=2 trainer.log_steps=1
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import echelon

# --- model and data

SIDE = 12


@dataclass
class Settings:
    lr: float = 0.002
    width: int = 128
    latent: int = 4
    samples: int = 2048


def draw_discs(count: int, seed: int) -> Tensor:
    """Return pictures of discs of random place and size, as rows of pixels."""
    generator = torch.Generator().manual_seed(seed)
    x, y, radius = torch.rand(3, count, 1, 1, generator=generator)
    pixels = torch.arange(SIDE) / SIDE
    distance = torch.hypot(pixels.view(1, 1, -1) - x, pixels.view(1, -1, 1) - y)
    return torch.sigmoid(16 * (0.2 + 0.2 * radius - distance)).flatten(1)


class VariationalAutoencoder(nn.Module):
    def __init__(self, width: int, latent: int) -> None:
        super().__init__()
        pixels = SIDE * SIDE
        self.encoder = nn.Sequential(
            nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, 2 * latent)
        )
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, pixels))

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two terms of the loss of every picture: reconstruction and divergence."""
        mean, log_variance = self.encoder(pictures).chunk(2, dim=1)
        latent = mean
        if self.training:
            latent = mean + torch.exp(log_variance / 2) * torch.randn_like(mean)
        scores = self.decoder(latent)
        reconstruction = binary_cross_entropy_with_logits(scores, pictures, reduction="none")
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance) / 2
        return reconstruction.sum(1), divergence.sum(1)


# --- training

DEFAULTS = ["trainer.epochs=8", "trainer.batch_size=64"]


def experiment(cfg: Settings) -> echelon.Experiment:
    model = VariationalAutoencoder(cfg.width, cfg.latent)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)

    def step(batch: list[Tensor], session: echelon.Session) -> dict[str, Tensor]:
        reconstruction, divergence = (term.mean() for term in model(*batch))
        loss = reconstruction + divergence
        session.backward(loss)
        session.step(optimizer)
        return {"loss": loss, "reconstruction": reconstruction, "divergence": divergence}

    return echelon.Experiment(
        model=model,
        optimizer=optimizer,
        step=step,
        train_data=draw_discs(cfg.samples, seed=0),
        eval_data=draw_discs(256, seed=1),
        evaluate=evaluate,
    )


def evaluate(model: nn.Module, batches: Iterator[list[Tensor]]) -> dict[str, tuple[float, int]]:
    """Return the sum of the losses of pictures that were not trained on, and their number."""
    total, count = 0.0, 0
    for (pictures,) in batches:
        total += sum(model(pictures)).sum().item()
        count += len(pictures)
    return {"loss": (total, count)}


if __name__ == "__main__":
    echelon.main(experiment, defaults=DEFAULTS)

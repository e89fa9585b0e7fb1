"""A training loop of one's own: a generator and a discriminator that learn against each other.

python own_loop.py
python own_loop.py launch=local launch.procs=2
"""

from dataclasses import dataclass

import torch
from classification import make_rings
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import echelon

NOISE = 4


@dataclass
class Settings:
    lr: float = 0.002
    width: int = 64
    samples: int = 2048


def make_network(inputs: int, width: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, outputs))


def judge(discriminator: nn.Module, points: Tensor, is_real: float) -> Tensor:
    scores = discriminator(points)
    return binary_cross_entropy_with_logits(scores, torch.full_like(scores, is_real))


def train(cfg: Settings, session: echelon.Session) -> None:
    generator = make_network(NOISE, cfg.width, 2)
    discriminator = make_network(2, cfg.width, 1)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=cfg.lr)
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=cfg.lr)
    session.prepare(generator, discriminator, optimizer_g, optimizer_d)
    points, _ = make_rings(cfg.samples, seed=0)

    for (real,) in session.batches((points,), batch_size=128):
        fake = generator(torch.randn(len(real), NOISE, device=session.device))

        discriminator.zero_grad()  # of what the generator's loss left there
        loss_d = judge(discriminator, real, 1.0) + judge(discriminator, fake.detach(), 0.0)
        session.backward(loss_d)
        session.step(optimizer_d)

        loss_g = judge(discriminator, fake, 1.0)
        session.backward(loss_g)
        session.step(optimizer_g)

        session.log(loss=loss_g, loss_d=loss_d)
        if session.every(epochs=1):
            session.print(f"epoch {session.epoch}: a made point is {fake[0].tolist()}")


if __name__ == "__main__":
    echelon.main(train)

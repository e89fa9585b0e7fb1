"""A DCGAN: two networks of convolutions, one draws pictures and the other judges them.

A port of pytorch/examples, dcgan/main.py. The pictures are made here: bright discs on a dark
ground. Yours are a Dataset of tensors in [-1, 1], given to session.batches in their place, such as
torchvision.datasets.ImageFolder with a transform.

python dcgan.py
python dcgan.py launch=local launch.procs=2
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import echelon

# --- model and data

NOISE = 16
SIDE = 16


@dataclass
class Settings:
    lr: float = 0.001
    width: int = 16
    samples: int = 1024


def draw_discs(count: int) -> Tensor:
    """Return pictures of discs of random place and size, as (count, 1, SIDE, SIDE)."""
    generator = torch.Generator().manual_seed(0)
    x, y, radius = torch.rand(3, count, 1, 1, generator=generator)
    pixels = torch.arange(SIDE) / SIDE
    distance = torch.hypot(pixels.view(1, 1, -1) - x, pixels.view(1, -1, 1) - y)
    return torch.tanh(8 * (0.2 + 0.2 * radius - distance)).unsqueeze(1)


def make_generator(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (NOISE, 1, 1)),
        nn.ConvTranspose2d(NOISE, 4 * width, 4, bias=False),
        nn.BatchNorm2d(4 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, 1, 4, 2, 1),
        nn.Tanh(),
    ).apply(set_first_weights)


def make_discriminator(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2 * width, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 4 * width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(4 * width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(4 * width, 1, 4),
        nn.Flatten(0),
    ).apply(set_first_weights)


def set_first_weights(module: nn.Module) -> None:
    """Draw the first weights as the paper does."""
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)


def judge(discriminator: nn.Module, pictures: Tensor, is_real: float) -> Tensor:
    """Return the loss of a discriminator that should say `is_real` of all pictures."""
    scores = discriminator(pictures)
    return binary_cross_entropy_with_logits(scores, torch.full_like(scores, is_real))


def compare_pictures(real: Tensor, made: Tensor) -> Tensor:
    """Return how far the means and deviations of all pixels are from each other."""
    means, deviations = real.mean(0) - made.mean(0), real.std(0) - made.std(0)
    return (means.square() + deviations.square()).mean()


# --- training

DEFAULTS = ["trainer.epochs=8", "trainer.batch_size=64"]


def train(cfg: Settings, session: echelon.Session) -> None:
    generator, discriminator = make_generator(cfg.width), make_discriminator(cfg.width)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=cfg.lr, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=cfg.lr, betas=(0.5, 0.999))
    session.prepare(generator, discriminator, optimizer_g, optimizer_d)
    pictures = draw_discs(cfg.samples)
    fixed_noise = torch.randn(256, NOISE, device=session.device)  # to look at the same ones

    for (real,) in session.batches(pictures):
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
            with torch.no_grad():
                made = generator(fixed_noise).cpu()
            session.log(made=echelon.Image((made[:64] + 1) / 2))
            session.best(distance=compare_pictures(pictures, made), higher_is_better=False)


if __name__ == "__main__":
    echelon.main(train, defaults=DEFAULTS)

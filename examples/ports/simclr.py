"""SimCLR: two views of a picture shall be near each other, and far from all other pictures.

A port of the training of sthalles/SimCLR (Chen et al., 2020).

python simclr.py
python simclr.py launch=local launch.procs=2

The pictures are drawn here. Real ones come from any Dataset in the place of `Shapes`, for example
torchvision's STL10; `__getitem__` returns two random views of a picture.

The loss compares the pictures of all processes: `session.gather` collects their embeddings, and
gradients flow back to the process of each. A view is drawn from the seed, the epoch and the
picture. So the losses are the same at any number of processes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import echelon

# --- model and data

SIZE = 16


@dataclass
class Settings:
    lr: float = 0.005
    width: int = 32
    samples: int = 512
    temperature: float = 0.2


def draw_shape(shape: int, radius: float, x: float, y: float) -> Tensor:
    """A ring, a cross, a square or a line on a dark ground."""
    down, right = torch.meshgrid(torch.arange(SIZE) - y, torch.arange(SIZE) - x, indexing="ij")
    far = torch.maximum(down.abs(), right.abs())
    inside = [
        (torch.hypot(down, right) - radius).abs() < 1,
        (torch.minimum(down.abs(), right.abs()) < 1) & (far <= radius),
        (far - radius).abs() < 1,
        (down.abs() < 1) & (right.abs() <= radius),
    ]
    return inside[shape].float().unsqueeze(0)


class Shapes(torch.utils.data.Dataset):
    """Two random views of each picture."""

    def __init__(self, samples: int) -> None:
        self.pictures, _ = make_pictures(samples, seed=0)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.draw_view(index), self.draw_view(index)

    def draw_view(self, index: int) -> Tensor:
        """Move and flip a picture, change its light, and add noise."""
        shift = torch.randint(-2, 3, (2,)).tolist()
        picture = self.pictures[index].roll(shift, (1, 2))
        picture = picture.flip(2) if torch.rand(()) < 0.5 else picture
        return change_light(picture, torch.rand(2)) + 0.1 * torch.randn(picture.shape)


def make_pictures(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Pictures, and which shape is on each: the labels are for the evaluation alone."""
    generator = torch.Generator().manual_seed(seed)
    shapes = torch.randint(0, 4, (samples,), generator=generator)
    places = torch.rand(samples, 3, generator=generator) * torch.tensor([3.0, 6.0, 6.0])
    places = (places + torch.tensor([3.0, 5.0, 5.0])).tolist()
    drawn = [draw_shape(s, *place) for s, place in zip(shapes.tolist(), places, strict=True)]
    lights = torch.rand(samples, 2, generator=generator)
    return torch.stack([change_light(*pair) for pair in zip(drawn, lights, strict=True)]), shapes


def change_light(picture: Tensor, light: Tensor) -> Tensor:
    """Return a picture with another contrast and brightness."""
    contrast, brightness = light
    return picture * (0.5 + contrast) + 0.2 * brightness


class Encoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1),
            nn.GroupNorm(4, width),  # a batch norm would see the pictures of one process alone
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, pictures: Tensor) -> Tensor:
        return normalize(self.head(self.body(pictures)))


def compute_similarities(pairs: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return how near each view is to all views, of (pictures, 2 views, width), and the number of
    its partner."""
    views = torch.cat([pairs[:, 0], pairs[:, 1]])
    similarities = views @ views.T / temperature
    similarities.fill_diagonal_(-torch.inf)  # a view is not compared with itself
    return similarities, torch.arange(len(views), device=views.device).roll(len(pairs))


# --- training

DEFAULTS = ["trainer.epochs=10", "trainer.batch_size=64"]


def train(cfg: Settings, session: echelon.Session) -> None:
    model = Encoder(cfg.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    session.prepare(model, optimizer)
    for first, second in session.batches(Shapes(cfg.samples)):
        pairs = session.gather(torch.stack([model(first), model(second)], 1))
        similarities, partner = compute_similarities(pairs, cfg.temperature)
        loss = cross_entropy(similarities, partner)
        session.backward(loss)
        session.step(optimizer)
        found = similarities.argmax(1) == partner
        session.log(loss=loss, partner_accuracy=found.float().mean())
        if session.every(epochs=1):
            session.best(accuracy=evaluate(model, session))


@torch.no_grad()
def evaluate(model: Encoder, session: echelon.Session) -> Tensor:
    """Return how often the nearest of other pictures has the same shape."""
    pictures, labels = (column.to(session.device) for column in make_pictures(32, seed=1))
    known = normalize(model.body(pictures))
    right = [
        session.gather(labels[(normalize(model.body(x)) @ known.T).argmax(1)] == y)
        for x, y in session.eval_batches(make_pictures(128, seed=2))
    ]
    return torch.cat(right).float().mean()


if __name__ == "__main__":
    echelon.main(train, defaults=DEFAULTS)

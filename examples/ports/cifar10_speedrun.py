"""A race to a good classifier of small pictures: Muon beside SGD, and nothing that waits.

A port in the way of KellerJordan/cifar10-airbench, airbench94_muon.py: rates per group of
parameters, crops and flips on the device, and an evaluation that looks at a picture several times.
The pictures are made here: stripes of five directions and two widths, under noise. CIFAR-10 goes in
the place of `draw_stripes`, as tensors of (50000, 3, 32, 32) and labels.

python cifar10_speedrun.py
python cifar10_speedrun.py launch=local launch.procs=2
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.optim.lr_scheduler import LinearLR

import echelon

# --- model and data

CLASSES = 10
SIDE = 16


@dataclass
class Settings:
    muon_lr: float = 0.24
    bias_lr: float = 0.05
    head_lr: float = 0.5
    width: int = 16
    samples: int = 2048


def draw_stripes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return pictures as (count, 3, SIDE, SIDE), and the class of each."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    angle = (torch.pi / 5 * (labels % 5)).view(-1, 1, 1)
    waves = (2 + 2 * (labels // 5)).view(-1, 1, 1)
    y, x = torch.meshgrid(torch.arange(SIDE) / SIDE, torch.arange(SIDE) / SIDE, indexing="ij")
    # Symmetrical, as a mirrored picture has to stay one of its class.
    phase = torch.rand(count, 1, 1, generator=generator)
    waves_x, waves_y = waves * (x - 0.5).abs() * angle.cos(), waves * y * angle.sin()
    stripes = torch.sin(2 * torch.pi * (waves_x + waves_y + phase))
    color = torch.rand(count, 3, 1, 1, generator=generator)
    noise = torch.randn(count, 3, SIDE, SIDE, generator=generator)
    return color * stripes.unsqueeze(1) + 0.5 * noise, labels


def augment_pictures(batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return each picture moved by up to two pixels, and mirrored or not, on its own device."""
    pictures, labels = batch
    count, device = len(pictures), pictures.device
    x, y = torch.randint(0, 5, (2, count, 1, 1), device=device)
    is_mirrored = torch.rand(count, 1, 1, device=device) < 0.5
    pixels = torch.arange(SIDE, device=device)
    columns = torch.where(is_mirrored, pixels.flip(0).view(1, 1, -1), pixels.view(1, 1, -1)) + x
    rows = pixels.view(1, -1, 1) + y
    padded = pad(pictures, (2, 2, 2, 2), "reflect").movedim(1, -1)
    each = torch.arange(count, device=device).view(-1, 1, 1)
    return padded[each, rows, columns].movedim(-1, 1), labels


def make_block(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(outputs),
        nn.GELU(),
    )


def make_model(width: int) -> nn.Module:
    return nn.Sequential(
        make_block(3, width),
        make_block(width, 2 * width),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, CLASSES, bias=False),
    )


class Muon(torch.optim.Optimizer):
    """Steps of momentum whose matrices are made orthogonal first, by five steps of Newton and
    Schulz. A filter of a convolution counts as a row."""

    def __init__(self, params, lr: float, momentum: float = 0.6) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p not in self.state:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                buffer = self.state[p]["momentum_buffer"]
                buffer.mul_(group["momentum"]).add_(p.grad)
                direction = p.grad + group["momentum"] * buffer
                p.mul_(len(p) ** 0.5 / p.norm())
                p.sub_(group["lr"] * make_orthogonal(direction.flatten(1)).view_as(p))


def make_orthogonal(matrix: Tensor) -> Tensor:
    x = matrix / (matrix.norm() + 1e-7)
    is_tall = len(x) > x.shape[1]
    x = x.T if is_tall else x
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if is_tall else x


def look_several_times(model: nn.Module, pictures: Tensor) -> Tensor:
    """Return the mean scores of a picture, its mirror image, and both moved by a pixel."""
    moved = pad(pictures, (1, 1, 1, 1), "reflect")[:, :, :SIDE, :SIDE]
    views = (pictures, pictures.flip(3), moved, moved.flip(3))
    return torch.stack([model(view) for view in views]).mean(0)


# --- training

DEFAULTS = ["trainer.epochs=8", "trainer.batch_size=128", "trainer.best=accuracy"]


def experiment(cfg: Settings, training: echelon.TrainingInfo) -> echelon.Experiment:
    model = make_model(cfg.width)
    filters = [p for p in model.parameters() if p.ndim == 4]
    biases = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": biases, "lr": cfg.bias_lr},
        {"params": [model[-1].weight], "lr": cfg.head_lr},
    ]
    muon = Muon(filters, lr=cfg.muon_lr)
    sgd = torch.optim.SGD(groups, momentum=0.85, nesterov=True)
    steps = training.count_total_steps(cfg.samples)

    def step(batch: list[Tensor], session: echelon.Session) -> dict[str, Tensor]:
        pictures, labels = batch
        loss = cross_entropy(model(pictures), labels, label_smoothing=0.2)
        session.backward(loss)
        session.step(muon)
        session.step(sgd)
        return {"loss": loss}

    return echelon.Experiment(
        model=model,
        optimizer={"muon": muon, "sgd": sgd},
        schedule={"muon": LinearLR(muon, 1.0, 0.0, steps), "sgd": LinearLR(sgd, 1.0, 0.0, steps)},
        step=step,
        train_data=draw_stripes(cfg.samples, seed=0),
        batch_transform=augment_pictures,
        eval_data=draw_stripes(512, seed=1),
        evaluate=evaluate,
    )


def evaluate(model: nn.Module, batches: Iterator[list[Tensor]]) -> dict[str, tuple[int, int]]:
    right = count = 0
    for pictures, labels in batches:
        right += int((look_several_times(model, pictures).argmax(1) == labels).sum())
        count += len(labels)
    return {"accuracy": (right, count)}


if __name__ == "__main__":
    echelon.main(experiment, defaults=DEFAULTS)

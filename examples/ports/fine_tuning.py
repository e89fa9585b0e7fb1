"""A pretrained network learns a new task: by LoRA, by thawing, or as a teacher.

python fine_tuning.py                        # LoRA: small matrices beside the frozen layers
python fine_tuning.py method=thawing         # the head alone, then all layers from an epoch on
python fine_tuning.py method=distillation    # a smaller network learns from the tuned one's answers
python fine_tuning.py launch=local launch.procs=2

Ports of microsoft/LoRA, of PyTorch's tutorials on transfer learning and on knowledge distillation
(pytorch/tutorials).

The pretrained network and its tasks are made here, in a moment. A real one is loaded from a file in
`make_pretrained`. Which parameters are trained may change at any step, and a resumed run goes on
with those of its snapshot.
"""

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

import echelon

# --- model and data

INPUTS = 16
CLASSES = 4


@dataclass
class Settings:
    method: Literal["lora", "thawing", "distillation"] = "lora"
    lr: float = 0.01
    width: int = 64
    samples: int = 256
    lora_rank: int = 2
    thaw_epoch: int = 2
    """Before this epoch the body is frozen."""
    temperature: float = 2.0


def make_task(samples: int, seed: int, turn: float) -> tuple[Tensor, Tensor]:
    """Points, and into which quarter of a plane they fall; another `turn` is another task."""
    points = torch.randn(samples, INPUTS, generator=torch.Generator().manual_seed(seed))
    first, second = points[:, :2].unbind(1)
    angle = torch.atan2(first + points[:, 2].sin(), second - points[:, 3].cos()) + turn
    return points, (angle / (2 * torch.pi) * CLASSES).floor().long() % CLASSES


class Network(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        return self.head(self.body(points))


def make_pretrained(width: int, turn: float) -> Network:
    """Return a network that knows a task."""
    model = Network(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    points, labels = make_task(512, seed=0, turn=turn)
    for _ in range(60):
        optimizer.zero_grad()
        cross_entropy(model(points), labels).backward()
        optimizer.step()
    return model.requires_grad_(False)


class LoRA(nn.Module):
    """A frozen linear layer, and the product of two small matrices that is added to it."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.down.T @ self.up.T


def make_student(cfg: Settings, pretrained: Network) -> Network:
    """Return the network that is trained."""
    if cfg.method == "distillation":
        return Network(cfg.width // 4)
    model = copy.deepcopy(pretrained)
    if cfg.method == "lora":
        model.body[0] = LoRA(model.body[0], cfg.lora_rank)
        model.body[2] = LoRA(model.body[2], cfg.lora_rank)
    model.head.requires_grad_(True)
    return model


# --- training

DEFAULTS = ["trainer.epochs=10"]


def train(cfg: Settings, session: echelon.Session) -> None:
    is_distilled = cfg.method == "distillation"
    teacher = make_pretrained(cfg.width, turn=0.5 if is_distilled else 0.0).to(session.device)
    model = make_student(cfg, teacher)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    session.prepare(model, optimizer)
    data = make_task(cfg.samples, seed=1, turn=0.5)
    for points, labels in session.batches(data):
        if cfg.method == "thawing":
            model.body.requires_grad_(session.epoch >= cfg.thaw_epoch)
        output = model(points)
        loss = cross_entropy(output, labels)
        if is_distilled:
            answers = log_softmax(teacher(points) / cfg.temperature, 1)
            guesses = log_softmax(output / cfg.temperature, 1)
            loss = loss + kl_div(guesses, answers, reduction="batchmean", log_target=True)
        session.backward(loss)
        session.step(optimizer)
        session.log(loss=loss)
        if session.every(epochs=1):
            session.best(accuracy=evaluate(model, session))


@torch.no_grad()
def evaluate(model: nn.Module, session: echelon.Session) -> Tensor:
    right = [
        session.gather(model(points).argmax(1) == labels)
        for points, labels in session.eval_batches(make_task(512, seed=2, turn=0.5))
    ]
    return torch.cat(right).float().mean()


if __name__ == "__main__":
    echelon.main(train, defaults=DEFAULTS)

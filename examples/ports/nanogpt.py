"""A GPT of characters, whose loss is estimated on the text it learns and on another one.

A port of karpathy/nanoGPT, train.py with config/train_shakespeare_char.py. The text is made here,
from a small grammar. Yours is read in the place of `write_text`: Path("input.txt").read_text().

python nanogpt.py
python nanogpt.py launch=local launch.procs=2 trainer.steps=500
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import echelon

# --- model and data


@dataclass
class Settings:
    lr: float = 0.003
    weight_decay: float = 0.1
    width: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 32
    letters: int = 100_000
    eval_steps: int = 50


def write_text(letters: int) -> str:
    """Return sentences in which the verb agrees with its subject."""
    draw = random.Random(0)
    animals = ("cat", "dog", "fox", "hen", "owl")
    verbs = ("see", "find", "like", "follow")
    text = ""
    while len(text) < letters:
        is_plural = draw.random() < 0.5
        subject, verb, other = draw.choice(animals), draw.choice(verbs), draw.choice(animals)
        text += f"the {subject}{'s' * is_plural} {verb}{'s' * (not is_plural)} a {other}.\n"
    return text[:letters]


def make_windows(text: str, context: int) -> tuple[int, list[Tensor], list[Tensor]]:
    """Return the number of different characters, and windows of the text as inputs and targets:
    those to train on, and those of its last tenth."""
    letters = sorted(set(text))
    tokens = torch.tensor([letters.index(letter) for letter in text])
    windows = tokens.unfold(0, context + 1, context // 2)
    inputs, targets = windows[:, :-1], windows[:, 1:]
    split = len(windows) * 9 // 10
    return len(letters), [inputs[:split], targets[:split]], [inputs[split:], targets[split:]]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.attend = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(self.norm_1(x)).unflatten(2, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attend(seen.transpose(1, 2).flatten(2))
        return x + self.think(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, letters: int, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)
        self.head.weight = self.letters.weight
        for embedding in (self.letters, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of every window."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.letters(tokens) + self.places(places))
        scores = self.head(self.norm(x))
        return cross_entropy(scores.transpose(1, 2), targets, reduction="none").mean(1)

    def make_optimizer(self, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        """Return an AdamW that decays matrices, but neither biases nor norms."""
        groups = [
            {"params": [p for p in self.parameters() if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in self.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99))


# --- training

DEFAULTS = ["trainer.steps=300", "trainer.batch_size=32"]


def train(cfg: Settings, session: echelon.Session, training: echelon.TrainingInfo) -> None:
    letters, data, others = make_windows(write_text(cfg.letters), cfg.context)
    model = GPT(letters, cfg.width, cfg.layers, cfg.heads, cfg.context)
    optimizer = model.make_optimizer(cfg.lr, cfg.weight_decay)
    steps = training.count_total_steps(len(data[0]))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, cfg.lr, steps, pct_start=0.1)
    session.prepare(model, optimizer, schedule)
    known = tuple(column[: len(others[0])] for column in data)

    for tokens, targets in session.batches(data):
        loss = model(tokens, targets).mean()
        session.backward(loss)
        session.step(optimizer, clip=1.0)
        schedule.step()
        session.log(loss=loss)
        if session.every(steps=cfg.eval_steps):
            session.log(train_loss=estimate_loss(model, known, session))
            session.best(loss=estimate_loss(model, others, session))


@torch.no_grad()
def estimate_loss(model: nn.Module, data: tuple[Tensor, ...], session: echelon.Session) -> Tensor:
    model.eval()
    losses = [session.gather(model(*batch)) for batch in session.eval_batches(data, 256)]
    model.train()
    return torch.cat(losses).mean()


if __name__ == "__main__":
    echelon.main(train, defaults=DEFAULTS)

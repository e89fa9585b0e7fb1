"""Which samples are trained on, and when: weighted sampling, buckets by length, a curriculum.

python samplers.py                      # rare classes are drawn as often as frequent ones
python samplers.py order=buckets        # sentences of about the same length, under a token budget
python samplers.py order=curriculum     # short sentences first, longer ones from epoch to epoch
python samplers.py order=shuffle launch=local launch.procs=2

Ports of torch's WeightedRandomSampler on classes of unequal size, of torchtext's BucketIterator,
and of curriculum learning (Bengio et al., 2009).

The sentences are made here. Real ones go into `sentences` and `labels` of `Sentences`. A sampler
gives the order of all processes together, so the same samples meet at any number of processes.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import WeightedRandomSampler

import echelon

# --- model and data

WORDS = 20
CLASSES = 3
PADDING = 0


@dataclass
class Settings:
    order: Literal["weighted", "buckets", "curriculum", "shuffle"] = "weighted"
    lr: float = 0.01
    width: int = 32
    samples: int = 1024


class Sentences(torch.utils.data.Dataset):
    """Sentences of random words. A class has a favourite word, and few are of the last class."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = random.Random(seed)
        self.labels = generator.choices(range(CLASSES), [0.75, 0.2, 0.05], k=samples)
        self.sentences = [self._make_sentence(label, generator) for label in self.labels]

    def _make_sentence(self, label: int, generator: random.Random) -> Tensor:
        words = [generator.randrange(1, WORDS) for _ in range(generator.randrange(4, 33))]
        favourites = [1 + label] * (1 + len(words) // 8)
        words[: len(favourites)] = favourites
        generator.shuffle(words)
        return torch.tensor(words)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.sentences[index], self.labels[index]


def pad(samples: list) -> tuple[Tensor, Tensor]:
    """Make a batch of sentences of unequal length."""
    sentences, labels = zip(*samples, strict=True)
    return pad_sequence(list(sentences), batch_first=True), torch.tensor(labels)


class Reader(nn.Module):
    """Weighs every word of a sentence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width, padding_idx=PADDING)
        self.attention = nn.Linear(width, 1)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, sentences: Tensor) -> Tensor:
        words = self.words(sentences)
        scores = self.attention(words.tanh()).squeeze(-1)
        weights = scores.masked_fill(sentences == PADDING, -torch.inf).softmax(-1)
        return self.head((weights.unsqueeze(-1) * words).sum(1))


class Curriculum:
    """A sampler: the shorter half of the sentences in epoch 0, an eighth more in each one after."""

    def __init__(self, data: Sentences) -> None:
        self.by_length = sorted(range(len(data)), key=lambda i: len(data.sentences[i]))
        self.count = 0

    def set_epoch(self, epoch: int) -> None:
        self.count = min(len(self.by_length), len(self.by_length) * (4 + epoch) // 8)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(self.by_length[: self.count], self.count))


def make_sampler(order: str, data: Sentences, batch_size: int) -> dict:
    """Return the `sampler` or `batch_sampler`, as torch's DataLoader takes them too."""
    if order == "weighted":
        weights = [1.0 / data.labels.count(label) for label in data.labels]
        return {"sampler": WeightedRandomSampler(weights, len(data))}
    if order == "buckets":
        lengths = [len(sentence) for sentence in data.sentences]
        tokens = batch_size * sum(lengths) // len(lengths)
        return {"batch_sampler": echelon.data.TokenBudgetSampler(lengths, max_tokens=tokens)}
    return {"sampler": Curriculum(data)} if order == "curriculum" else {}


# --- training

DEFAULTS = ["trainer.epochs=8"]


def make_metrics() -> dict:
    """Every class counts alike in the accuracy, however rare it is."""
    from torchmetrics.classification import MulticlassAccuracy

    return {"accuracy": MulticlassAccuracy(CLASSES, average="macro")}


def experiment(cfg: Settings, training: echelon.TrainingInfo) -> echelon.Experiment:
    model = Reader(cfg.width)
    data = Sentences(cfg.samples, seed=0)
    return echelon.Experiment(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=cfg.lr),
        loss=nn.functional.cross_entropy,
        train_data=data,
        eval_data=Sentences(cfg.samples, seed=1),
        metrics=make_metrics,
        collate_fn=pad,
        **make_sampler(cfg.order, data, training.batch_size),
    )


if __name__ == "__main__":
    echelon.main(experiment, defaults=DEFAULTS)

"""Language models over documents of different lengths: packed into samples of one length, or in
batches under a token budget."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from toy_experiments import Life, trace

import echelon

WORDS, LENGTH, EOS = 12, 8, 0


@dataclass
class PackedSettings:
    file: str = ""
    """Of tokens; see `write_documents`."""
    strategy: str = "concatenate"
    """Or ``best_fit``, or ``budget``: padded documents in batches of a token budget."""
    max_tokens: int = 40


def write_documents(file: Path, documents: int = 37) -> None:
    """Each ends with EOS. Some are longer than a sample, some are EOS alone."""
    generator = np.random.default_rng(4)
    lengths = generator.choice([1, 2, 3, 5, 6, 7, 8, 9, 21], documents)
    tokens = generator.integers(1, WORDS, lengths.sum()).astype(np.uint16)
    tokens[np.cumsum(lengths) - 1] = EOS
    tokens.tofile(file)


class DocumentRows(Dataset[Tensor]):
    """The documents of a file, one a sample."""

    def __init__(self, file: str) -> None:
        tokens = np.fromfile(file, np.uint16).astype(np.int64)
        self.rows = np.split(tokens, np.flatnonzero(tokens == EOS) + 1)[:-1]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Tensor:
        return torch.from_numpy(self.rows[number])


class Attention(nn.Module):
    """One layer, in which a token sees those before it in its own document."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 8), nn.Embedding(64, 8)
        self.query, self.value, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, WORDS)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.words(batch["inputs"]) + self.places(batch["position_ids"])
        ids = batch["document_ids"]
        mask = (ids.unsqueeze(1) == ids.unsqueeze(2)).tril()
        scores = (self.query(x) @ x.transpose(1, 2)).masked_fill(~mask, -torch.inf)
        return self.head(x + scores.softmax(-1) @ self.value(x))  # type: ignore[no-any-return]


def pad(documents: list[Tensor]) -> dict[str, Tensor]:
    inputs = pad_sequence(documents, batch_first=True)
    ids = pad_sequence([torch.zeros_like(each) for each in documents], True, -1)
    shifted = [torch.cat([each[1:], torch.tensor([-100])]) for each in documents]
    return {
        "inputs": inputs,
        "targets": pad_sequence(shifted, True, -100),
        "document_ids": ids,
        "position_ids": torch.arange(inputs.shape[1]).expand_as(inputs),
    }


def make_data(cfg: PackedSettings) -> dict[str, Any]:
    if cfg.strategy == "budget":
        documents = DocumentRows(cfg.file)
        lengths = [len(each) for each in documents.rows]
        sampler = echelon.data.TokenBudgetSampler(lengths, max_tokens=cfg.max_tokens)
        return {"data": documents, "batch_sampler": sampler, "collate_fn": pad}
    strategy: Any = cfg.strategy
    data = echelon.data.pack_documents(cfg.file, length=LENGTH, strategy=strategy, eos_token_id=EOS)
    return {"data": data}


def trace_batch(step: int, batch: dict[str, Tensor]) -> None:
    """Note what identifies each sample, wherever it was padded to."""
    weights = 31 ** (torch.arange(batch["inputs"].shape[1]) % 10)
    trace(batch=step, samples=(batch["inputs"] * weights).sum(1).tolist())


def packed(cfg: PackedSettings) -> echelon.Experiment:
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    life = Life(optimizer)

    def predict(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        if model.training:
            trace_batch(life.steps + 1, batch)
        return model(batch).flatten(0, 1), batch["targets"].flatten()

    given = make_data(cfg)
    return echelon.Experiment(
        model=model,
        optimizer=optimizer,
        loss=nn.functional.cross_entropy,
        train_data=given.pop("data"),
        predict=predict,
        **given,
    )


def loop_over_packed(cfg: PackedSettings, session: echelon.Session) -> None:
    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    life = Life(optimizer)
    session.prepare(model, optimizer)
    given = make_data(cfg)
    for batch in session.batches(given.pop("data"), **given):
        trace_batch(life.steps + 1, batch)
        loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch["targets"].flatten())
        session.backward(loss, count=int((batch["targets"] != -100).sum()))
        session.step(optimizer)
        session.log(loss=loss.detach())

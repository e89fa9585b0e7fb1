"""A decoder-only transformer on random tokens: the cost of a language model, without a language.

Pre-norm blocks, causal attention by torch's fused kernels, a GELU or SwiGLU feed-forward layer, and
an output head that may share the embedding's matrix. A sample is a row of tokens: all but the last
are the input, all but the first are the targets.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.errors import EchelonError, Fault, suggest_nearest
from echelon.experiment.definition import Experiment

_FEED_FORWARD_KINDS = ("gelu", "swiglu")


def experiment(cfg: Any) -> Experiment:
    """Return the experiment; its settings are documented in conf/experiment/transformer.yaml."""
    _check_settings(cfg)
    model = Transformer(
        cfg.layers, cfg.width, cfg.heads, cfg.context, cfg.vocabulary, cfg.feed, cfg.tied
    )
    train, held_out = (
        make_tokens(count, cfg.context, cfg.vocabulary, cfg.data_seed + seed)
        for seed, count in enumerate((cfg.samples, cfg.eval_samples))
    )
    return Experiment(
        model=model,
        optimizer=torch.optim.AdamW(
            model.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=cfg.weight_decay
        ),
        loss=compute_token_loss,
        train_data=train,
        eval_data=held_out if cfg.eval_samples else None,
        predict=predict_next_tokens,
    )


def predict_next_tokens(model: nn.Module, batch: tuple[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the logits for every position, and the token that follows it."""
    (rows,) = batch
    rows = rows.long()
    return model(rows[:, :-1]), rows[:, 1:]


def compute_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy over all tokens of the batch."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def make_tokens(samples: int, context: int, vocabulary: int, seed: int) -> Tensor:
    """Return random rows of `context` + 1 tokens. Small numbers are frequent, as words are, so a
    model can learn something."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(samples, context + 1, generator=generator)
    return (vocabulary * uniform**4).to(torch.int32).clamp_(max=vocabulary - 1)


class Transformer(nn.Module):
    """The model. Names of its parameters are keys of snapshots."""

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        context: int,
        vocabulary: int,
        feed: str = "gelu",
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, feed) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(_init_weights)
        # Every block adds twice to the residual stream; smaller weights keep its variance constant.
        for block in self.blocks:
            assert isinstance(block, Block)
            for last in block.list_residual_projections():
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * layers))
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, rows: Tensor) -> Tensor:
        places = torch.arange(rows.shape[1], device=rows.device)
        x = self.tokens(rows) + self.places(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a residual connection. `replica.blocks=[Block]`
    names it."""

    def __init__(self, width: int, heads: int, feed: str) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads)
        self.before_feed = nn.LayerNorm(width)
        self.feed: SwiGLUFeedForward | GELUFeedForward = (
            SwiGLUFeedForward(width) if feed == "swiglu" else GELUFeedForward(width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        out: Tensor = x + self.feed(self.before_feed(x))
        return out

    def list_residual_projections(self) -> list[nn.Linear]:
        """Return the two layers whose output is added to the residual stream."""
        return [self.attention.out, self.feed.out]


class CausalSelfAttention(nn.Module):
    """Multi-head attention to earlier tokens, with one matrix for query, key and value."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.into = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.into(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return out


class GELUFeedForward(nn.Module):
    """Two linear layers, four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(width, 4 * width, bias=False)
        self.out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(F.gelu(self.into(x), approximate="tanh"))
        return out


class SwiGLUFeedForward(nn.Module):
    """A gated feed-forward layer.

    It is two thirds as wide as the other, because it has three matrices, and a multiple of 64, for
    which kernels are fast.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 64 * math.ceil(8 * width / 3 / 64)
        self.into = nn.Linear(width, 2 * inner, bias=False)
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.into(x).chunk(2, dim=-1)
        out: Tensor = self.out(F.silu(gate) * value)
        return out


def _init_weights(module: nn.Module) -> None:
    """Initialise a linear or embedding layer as GPT-2 does."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def _check_settings(cfg: Any) -> None:
    """Raise with a fault for every setting that makes no model."""
    faults = [
        Fault(f"{name}={getattr(cfg, name)} is below 1", f"set {name} to 1 or more")
        for name in ("layers", "width", "heads", "context", "vocabulary", "samples")
        if getattr(cfg, name) < 1
    ]
    if not faults and cfg.width % cfg.heads:
        faults.append(
            Fault(
                f"width={cfg.width} is not divisible by heads={cfg.heads}",
                f"set width={cfg.heads * math.ceil(cfg.width / cfg.heads)}, or other heads",
            )
        )
    if cfg.feed not in _FEED_FORWARD_KINDS:
        faults.append(
            Fault(
                f"feed={cfg.feed}: there is no such layer",
                suggest_nearest(cfg.feed, _FEED_FORWARD_KINDS),
            )
        )
    if faults:
        raise EchelonError(*faults)

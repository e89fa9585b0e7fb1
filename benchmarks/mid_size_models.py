"""Eleven models of the middle size, written plainly, with made-up data for each.

Each maker returns a model, its inputs and its target for so many samples, and its loss. They are
what people bring: nothing in them is arranged for speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

PICTURE_CLASSES, CHARACTERS = 1000, 65


class Problem(NamedTuple):
    model: nn.Module
    data: tuple[Tensor, ...]
    """Inputs of the model, and the target as the last."""
    loss: Callable[[Tensor, Tensor], Tensor]


def make_resnet18(count: int) -> Problem:
    """ResNet-18 for small pictures."""
    from torchvision.models import resnet18

    model = resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return Problem(model, make_pictures(count, 32, 10), functional.cross_entropy)


def make_resnet50(count: int) -> Problem:
    from torchvision.models import resnet50

    return Problem(resnet50(), make_pictures(count, 224, PICTURE_CLASSES), functional.cross_entropy)


def make_vit_s(count: int) -> Problem:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(224, 16, 12, 6, 384, 1536)
    return Problem(model, make_pictures(count, 224, PICTURE_CLASSES), functional.cross_entropy)


def make_unet(count: int) -> Problem:
    """Segmentation of 128 × 128 pictures into 8 classes."""
    pictures, _ = make_pictures(count, 128, 8)
    return Problem(
        UNet(3, 8), (pictures, torch.randint(8, (count, 128, 128))), functional.cross_entropy
    )


def make_diffusion(count: int) -> Problem:
    """Predicts the noise in 32 × 32 pictures, of which a time says how much there is."""
    pictures, _ = make_pictures(count, 32, 8)
    times, noise = torch.rand(count), torch.randn_like(pictures)
    amount = times.view(-1, 1, 1, 1)
    data = (pictures * (1 - amount) + noise * amount, times, noise)
    return Problem(UNet(3, 3, width=64, with_time=True), data, functional.mse_loss)


def make_lstm(count: int) -> Problem:
    tokens = torch.randint(CHARACTERS, (count, 129))
    return Problem(CharacterLSTM(), (tokens[:, :-1], tokens[:, 1:]), compute_token_loss)


def make_gpt(count: int) -> Problem:
    """The size of nanoGPT's shakespeare_char."""
    tokens = torch.randint(CHARACTERS, (count, 257))
    return Problem(GPT(6, 384, 6, 256), (tokens[:, :-1], tokens[:, 1:]), compute_token_loss)


def make_gnn(count: int) -> Problem:
    """Graphs of 32 nodes with dense adjacency, as molecules are batched."""
    links = (torch.rand(count, 32, 32) < 0.1).float()
    links = ((links + links.mT) > 0).float() + torch.eye(32)
    links /= links.sum(-1, keepdim=True)
    data = (torch.randn(count, 32, 64), links, torch.randn(count, 1))
    return Problem(GraphNetwork(), data, functional.mse_loss)


def make_recommender(count: int) -> Problem:
    users, items = torch.randint(100_000, (count,)), torch.randint(20_000, (count,))
    return Problem(
        Recommender(100_000, 20_000), (users, items, torch.rand(count, 1)), functional.mse_loss
    )


def make_mlp(count: int) -> Problem:
    model = nn.Sequential(
        *(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    )
    return Problem(
        model, (torch.randn(count, 784), torch.randint(10, (count,))), functional.cross_entropy
    )


def make_speech_encoder(count: int) -> Problem:
    """The encoder of Whisper tiny over ten seconds, which names one of 32 speakers."""
    data = (torch.randn(count, 80, 1000), torch.randint(32, (count,)))
    return Problem(SpeechEncoder(), data, functional.cross_entropy)


MAKERS: dict[str, Callable[[int], Problem]] = {
    "resnet18": make_resnet18,
    "resnet50": make_resnet50,
    "vit_s": make_vit_s,
    "unet": make_unet,
    "diffusion": make_diffusion,
    "lstm": make_lstm,
    "gpt": make_gpt,
    "gnn": make_gnn,
    "recommender": make_recommender,
    "mlp": make_mlp,
    "speech_encoder": make_speech_encoder,
}


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name.startswith("resnet"):
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def make_pictures(count: int, side: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, side, side), torch.randint(classes, (count,))


def compute_token_loss(scores: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())


class ConvBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, time_width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norms = nn.ModuleList([nn.GroupNorm(8, outputs), nn.GroupNorm(8, outputs)])
        self.time = nn.Linear(time_width, outputs) if time_width else None

    def forward(self, x: Tensor, time: Tensor | None) -> Tensor:
        x = functional.silu(self.norms[0](self.first(x)))
        if self.time is not None:
            x = x + self.time(time)[:, :, None, None]
        return functional.silu(self.norms[1](self.second(x)))


class UNet(nn.Module):
    """Three levels; with the time of a diffusion, where it has one."""

    def __init__(self, inputs: int, outputs: int, width: int = 32, with_time: bool = False) -> None:
        super().__init__()
        time_width = 4 * width if with_time else 0
        widths = [width, 2 * width, 4 * width]
        self.embed = (
            nn.Sequential(nn.Linear(1, time_width), nn.SiLU(), nn.Linear(time_width, time_width))
            if with_time
            else None
        )
        self.down = nn.ModuleList(
            ConvBlock(a, b, time_width) for a, b in zip([inputs, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(
            ConvBlock(b + a, a, time_width)
            for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True)
        )
        self.last = nn.Conv2d(width, outputs, 1)

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        if self.embed is not None and time is not None:
            time = self.embed(time[:, None])
        kept = []
        for number, block in enumerate(self.down):
            x = block(functional.max_pool2d(x, 2) if number else x, time)
            kept.append(x)
        for block, skipped in zip(self.up, kept[-2::-1], strict=True):
            larger = functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([larger, skipped], 1), time)
        scores: Tensor = self.last(x)
        return scores


class CharacterLSTM(nn.Module):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.embed = nn.Embedding(CHARACTERS, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, CHARACTERS)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.lstm(self.embed(tokens))[0])
        return scores


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            each.view(batch, length, self.heads, -1).transpose(1, 2)
            for each in self.qkv(self.norms[0](x)).split(width, 2)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(CHARACTERS, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads, True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CHARACTERS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


class GraphNetwork(nn.Module):
    def __init__(self, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, nodes: Tensor, links: Tensor) -> Tensor:
        x = self.first(nodes)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + functional.relu(norm(layer(links @ x)))
        score: Tensor = self.head(x.mean(1))
        return score


class Recommender(nn.Module):
    def __init__(self, users: int, items: int, width: int = 64) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.tower = nn.Sequential(nn.Linear(2 * width, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        score: Tensor = self.tower(torch.cat([self.users(users), self.items(items)], 1))
        return score


class SpeechEncoder(nn.Module):
    def __init__(self, width: int = 384, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv1d(80, width, 3, padding=1)
        self.second = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.place = nn.Parameter(0.01 * torch.randn(500, width))
        self.blocks = nn.ModuleList(GPTBlock(width, 6, False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 32)

    def forward(self, sound: Tensor) -> Tensor:
        x = functional.gelu(self.second(functional.gelu(self.first(sound))))
        x = x.transpose(1, 2) + self.place
        for block in self.blocks:
            x = block(x)
        scores: Any = self.head(self.norm(x).mean(1))
        return scores

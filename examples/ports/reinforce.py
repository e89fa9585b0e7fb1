"""REINFORCE on CartPole: the training of pytorch/examples, reinforcement_learning/reinforce.py.

python reinforce.py
python reinforce.py launch=local launch.procs=2

The game is made here. With gymnasium, `play` would call `env.step` instead of `move_carts`.

There is no data, so the loop is over `session.steps`. The episodes of a step are numbered and
seeded by their number, and a process plays its share of them: any number of processes plays the
same games.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

import echelon

# --- model and data


@dataclass
class Settings:
    lr: float = 0.01
    width: int = 32
    episodes: int = 16
    """Of one step, over all processes."""
    length: int = 200
    """Of an episode, at most. The game is solved when the mean of a step is near it."""
    gamma: float = 0.99


class Episodes(NamedTuple):
    """A row for each episode, a column for each move."""

    states: Tensor
    actions: Tensor
    is_played: Tensor
    """1.0, and 0.0 for the moves after the pole has fallen."""


def make_network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


def move_carts(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Push every cart to the left (0) or to the right (1) for 20 ms, as gymnasium's CartPole-v1.

    Returns the new states and whether the poles still stand.
    """
    _, speed, angle, turn = state.unbind(-1)
    sin, cos = angle.sin(), angle.cos()
    push = (20.0 * action - 10.0 + 0.05 * turn**2 * sin) / 1.1
    turn_rate = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
    speed_rate = push - 0.05 * turn_rate * cos / 1.1
    rates = torch.stack([speed, speed_rate, turn, turn_rate], -1)
    state = state + 0.02 * rates
    return state, (state[..., 0].abs() < 2.4) & (state[..., 2].abs() < 0.2095)


@torch.no_grad()
def play(policy: nn.Module, seeds: Sequence[int], length: int, device: torch.device) -> Episodes:
    """Play one episode for each seed."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    draws = torch.stack([torch.rand(4 + length, generator=g) for g in generators]).to(device)
    state = 0.1 * draws[:, :4] - 0.05
    stands = torch.ones(len(seeds), dtype=torch.bool, device=device)
    moves = []
    for draw in draws[:, 4:].T:
        action = (draw < policy(state).softmax(-1)[:, 1]).float()
        moves.append((state, action, stands.float()))
        state, is_up = move_carts(state, action)
        stands = stands & is_up
    return Episodes(*(torch.stack(column, 1) for column in zip(*moves, strict=True)))


def compute_loss(policy: nn.Module, played: Episodes, gamma: float) -> Tensor:
    """Return the mean over episodes of the moves' log probabilities, weighted by how much more than
    the episode's other moves they brought."""
    future, returns = torch.zeros(len(played.is_played), device=played.states.device), []
    for reward in played.is_played.T.flip(0):
        future = reward + gamma * future
        returns.append(future)
    worth, mask = torch.stack(returns[::-1], 1), played.is_played
    count = mask.sum(1, keepdim=True)
    worth = mask * (worth - (mask * worth).sum(1, keepdim=True) / count)
    worth = worth / (worth.square().sum(1, keepdim=True) / count).sqrt().clamp(min=1e-6)
    probabilities = policy(played.states).log_softmax(-1)
    chosen = probabilities.gather(-1, played.actions.long().unsqueeze(-1)).squeeze(-1)
    return -(worth * chosen).sum(1).mean()


# --- training

DEFAULTS = ["trainer.steps=60"]


def train(cfg: Settings, session: echelon.Session) -> None:
    policy = make_network(cfg.width)
    optimizer = torch.optim.Adam(policy.parameters(), lr=cfg.lr)
    session.prepare(policy, optimizer)
    for step in session.steps():
        seeds = session.split(range(step * cfg.episodes, (step + 1) * cfg.episodes))
        played = play(policy, seeds, cfg.length, session.device)
        loss = compute_loss(policy, played, cfg.gamma)
        session.backward(loss, count=len(seeds))
        session.step(optimizer)
        rewards = session.gather(played.is_played.sum(1))
        session.log(loss=loss, reward=rewards.mean())
        if rewards.mean() > 0.95 * cfg.length:
            session.print(f"solved after {step} steps")
            break


if __name__ == "__main__":
    echelon.main(train, defaults=DEFAULTS)

"""DQN on CartPole, with its replay buffer in the snapshots.

A port of PyTorch's tutorial "Reinforcement Learning (DQN)", pytorch/tutorials.

python replay_buffer.py
python replay_buffer.py launch=local launch.procs=2

Games are made here, as in reinforce.py. With gymnasium, `make_moves` would call `env.step`.

A process plays its share of the games, and `session.gather` brings all moves into every buffer.
Processes draw the same rows of it, and each learns from its share of them. `session.register` makes
games and buffer part of a snapshot, so a resumed run remembers what the killed one had seen.
"""

from dataclasses import dataclass

import torch
from reinforce import make_network, move_carts
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

import echelon

# --- model and data


@dataclass
class Settings:
    lr: float = 0.005
    width: int = 64
    games: int = 16
    """Games that are played at the same time, by all processes together."""
    capacity: int = 8192
    batch_size: int = 64
    gamma: float = 0.95
    exploration_steps: int = 200
    """Until then fewer and fewer moves are random."""
    target_rate: float = 0.02
    """How fast the target network follows."""


class ReplayBuffer:
    """The last moves: state, action, next state, whether the pole stands then."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.moves = torch.zeros(capacity, 10, device=device)
        self.count = 0

    def add(self, moves: Tensor) -> None:
        places = (self.count + torch.arange(len(moves))) % len(self.moves)
        self.moves[places] = moves
        self.count += len(moves)

    def draw(self, rows: int, generator: torch.Generator) -> Tensor:
        known = min(self.count, len(self.moves))
        return self.moves[torch.randint(0, known, (rows,), generator=generator)]

    def state_dict(self) -> dict:
        return {"moves": self.moves, "count": self.count}

    def load_state_dict(self, state: dict) -> None:
        self.moves, self.count = state["moves"], state["count"]


class Games:
    """The states of all games, and for how many moves each has gone on."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.states = torch.zeros(count, 4, device=device)
        self.ages = torch.zeros(count, device=device)

    def go_on(self, moves: Tensor, generator: torch.Generator) -> Tensor:
        """Take over what was played; begin anew where a pole fell. Returns the ages before."""
        starts = (0.1 * torch.rand(self.states.shape, generator=generator) - 0.05).to(moves.device)
        stands, ages = moves[:, 9:], self.ages + 1
        self.states = torch.where(stands > 0, moves[:, 5:9], starts)
        self.ages = ages * stands.squeeze(1) * (ages < 200)
        return ages

    def state_dict(self) -> dict:
        return {"states": self.states, "ages": self.ages}

    def load_state_dict(self, state: dict) -> None:
        self.states, self.ages = state["states"], state["ages"]


@torch.no_grad()
def make_moves(network: nn.Module, states: Tensor, draws: Tensor, epsilon: float) -> Tensor:
    """Return a move in each state: the best one that is known, or with `epsilon` a random one."""
    random = (draws[:, 1] < 0.5).long()
    action = torch.where(draws[:, 0] < epsilon, random, network(states).argmax(1))
    after, stands = move_carts(states, action.float())
    columns = [states, action.unsqueeze(1), after, stands.unsqueeze(1)]
    return torch.cat([column.float() for column in columns], 1)


def compute_loss(network: nn.Module, target: nn.Module, moves: Tensor, gamma: float) -> Tensor:
    """Return how far the network's worths of moves are from those by the target network. A pole
    that falls costs 1."""
    states, action, after, stands = moves.split([4, 1, 4, 1], 1)
    with torch.no_grad():
        worth = stands - 1.0 + gamma * stands * target(after).amax(1, keepdim=True)
    return smooth_l1_loss(network(states).gather(1, action.long()), worth)


# --- training

DEFAULTS = ["trainer.steps=800"]


def train(cfg: Settings, session: echelon.Session) -> None:
    network, target = make_network(cfg.width), make_network(cfg.width)
    target.load_state_dict(network.state_dict())
    optimizer = torch.optim.AdamW(network.parameters(), lr=cfg.lr)
    session.prepare(network, target, optimizer)
    games, buffer = Games(cfg.games, session.device), ReplayBuffer(cfg.capacity, session.device)
    session.register(games=games, buffer=buffer)
    for step in session.steps():
        generator = torch.Generator().manual_seed(step)  # the same numbers on every process
        draws = torch.rand(cfg.games, 2, generator=generator).to(session.device)
        epsilon = max(0.05, 1.0 - step / cfg.exploration_steps)
        states, own_draws = session.split(games.states), session.split(draws)
        moves = session.gather(make_moves(network, states, own_draws, epsilon))
        lengths = games.go_on(moves, generator)
        buffer.add(moves)

        batch = session.split(buffer.draw(cfg.batch_size, generator))
        loss = compute_loss(network, target, batch, cfg.gamma)
        session.backward(loss, count=len(batch))
        session.step(optimizer, clip=10.0)
        for slow, fast in zip(target.parameters(), network.parameters(), strict=True):
            slow.data.lerp_(fast.data, cfg.target_rate)
        session.log(loss=loss, game_length=lengths.mean())


if __name__ == "__main__":
    echelon.main(train, defaults=DEFAULTS)

"""Classification of graphs with a graph isomorphism network (GIN).

A port of PyG's examples/mutag_gin.py, without PyG.

python graphs.py
python graphs.py launch=local launch.procs=2

The graphs are made here. Real ones come from a dataset of PyG, with
`collate_fn=torch_geometric.data.Batch.from_data_list`: a batch with a method `to(device)` is moved
to the device, and so is a dataclass of tensors, as `Graphs` is.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

import echelon

# --- model and data

CLASSES = 3
FEATURES = 8


@dataclass
class Settings:
    lr: float = 0.01
    width: int = 32
    samples: int = 512
    eval_samples: int = 256


@dataclass
class Graphs:
    """One graph, or several side by side, as PyG's Data has them."""

    x: Tensor
    """Features, a row for each node: its degree, as of PyG's OneHotDegree."""
    edge_index: Tensor
    """Two rows: from which node to which."""
    y: Tensor
    """The class of each graph."""
    batch: Tensor
    """The graph of each node."""


def make_graph(label: int, generator: random.Random) -> Graphs:
    """A tree that grew in one of three ways: as a chain, anywhere, or around its hubs."""
    edges: list[tuple[int, int]] = []
    for node in range(1, generator.randrange(10, 25)):
        older = generator.choice(edges)[generator.randrange(2)] if edges else 0
        parent = [node - 1, generator.randrange(node), older][label]
        edges += [(parent, node), (node, parent)]
    edge_index = torch.tensor(edges).T
    degrees = edge_index[0].bincount()
    x = one_hot(degrees.clamp(max=FEATURES - 1), FEATURES).float()
    return Graphs(x, edge_index, torch.tensor([label]), torch.zeros_like(degrees))


def make_graphs(samples: int, seed: int) -> list[Graphs]:
    generator = random.Random(seed)
    return [make_graph(generator.randrange(CLASSES), generator) for _ in range(samples)]


def join_graphs(graphs: list[Graphs]) -> Graphs:
    """Put graphs side by side, with nodes numbered through."""
    sizes = torch.tensor([len(graph.x) for graph in graphs])
    first = (sizes.cumsum(0) - sizes).tolist()
    return Graphs(
        x=torch.cat([graph.x for graph in graphs]),
        edge_index=torch.cat([g.edge_index + n for g, n in zip(graphs, first, strict=True)], 1),
        y=torch.cat([graph.y for graph in graphs]),
        batch=torch.repeat_interleave(torch.arange(len(graphs)), sizes),
    )


class GIN(nn.Module):
    """Three rounds of messages between neighbours, and a sum over the nodes of each graph."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rounds = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
            for inputs in (FEATURES, width, width)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CLASSES))

    def forward(self, graphs: Graphs) -> Tensor:
        nodes, (source, target) = graphs.x, graphs.edge_index
        for update in self.rounds:
            nodes = update(nodes.index_add(0, target, nodes[source]))
        sums = nodes.new_zeros(len(graphs.y), nodes.shape[1])
        return self.head(sums.index_add(0, graphs.batch, nodes))


# --- training

DEFAULTS = ["trainer.epochs=8"]


def make_metrics() -> dict:
    from torchmetrics.classification import MulticlassAccuracy

    return {"accuracy": MulticlassAccuracy(CLASSES, average="micro")}


def experiment(cfg: Settings) -> echelon.Experiment:
    model = GIN(cfg.width)
    return echelon.Experiment(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=cfg.lr),
        loss=nn.functional.cross_entropy,
        train_data=make_graphs(cfg.samples, seed=0),
        eval_data=make_graphs(cfg.eval_samples, seed=1),
        metrics=make_metrics,
        collate_fn=join_graphs,
        predict=lambda model, graphs: (model(graphs), graphs.y),
    )


if __name__ == "__main__":
    echelon.main(experiment, defaults=DEFAULTS)

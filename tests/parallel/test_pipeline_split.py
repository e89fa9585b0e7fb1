"""How a model is cut into stages. The `meta` device stands for a second one: it has no numbers, but
torch refuses to mix it with the CPU as it would two GPUs."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor, nn

from echelon import Experiment
from echelon.errors import EchelonError
from echelon.parallel.model_parallel import (
    SampleBatch,
    describe_manual_placement,
    format_stages,
    list_layer_groups,
    split_costs_evenly,
    split_model,
)

CPU, OTHER = torch.device("cpu"), torch.device("meta")
NAMES = ("first", "second")


def _experiment(model: nn.Module, rate: float = 0.1, **more: object) -> Experiment:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    return Experiment(model, optimizer, nn.functional.mse_loss, None, **more)  # type: ignore[arg-type]


def _split(model: nn.Module, sample: Tensor, times: float = 1.0) -> list[str]:
    stages = split_model(
        _experiment(model), NAMES, (CPU, OTHER), SampleBatch((sample, sample), times)
    )
    return [stage.layers for stage in stages]


def _list_devices(model: nn.Module) -> dict[str, str]:
    return {name: p.device.type for name, p in model.named_parameters()}


# ---- where to cut -------------------------------------------------------------------------------


def test_no_other_cut_has_a_smaller_largest_part() -> None:
    draw = random.Random(1)
    for _ in range(200):
        costs = [draw.randrange(20) for _ in range(draw.randrange(1, 9))]
        parts = draw.randrange(1, len(costs) + 1)
        cuts = itertools.combinations(range(1, len(costs)), parts - 1)
        bounds = [[0, *cut, len(costs)] for cut in cuts]
        best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise(ends)) for ends in bounds)
        found = split_costs_evenly(costs, parts)
        ends = [0, *itertools.accumulate(found)]
        assert len(found) == parts
        assert all(found)
        assert ends[-1] == len(costs)
        assert max(sum(costs[a:b]) for a, b in itertools.pairwise(ends)) == best


def test_parts_are_even_where_the_largest_allows_it() -> None:
    assert split_costs_evenly([1] * 6 + [4], 3) == [3, 3, 1]


def test_layers_without_parameters_stay_with_the_one_before() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    assert [(p.first, p.last) for p in list_layer_groups(model)] == [("0", "2"), ("3", "4")]


def test_a_sequential_within_a_sequential_is_cut_too() -> None:
    def half() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    assert [p.first for p in list_layer_groups(nn.Sequential(half(), half()))] == [
        "0.0",
        "0.2",
        "1.0",
        "1.2",
    ]


def test_parameters_and_outputs_decide_together() -> None:
    def model() -> nn.Module:
        convolutions = nn.Conv1d(1, 1, 3), nn.Conv1d(1, 1, 3)
        return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(96, 4))

    sample = torch.zeros(2, 1, 100)
    assert _split(model(), sample, times=0.0) == ["0 … 2", "3"]
    assert _split(model(), sample, times=1e6) == ["0", "1 … 3"]


# ---- the model afterwards -----------------------------------------------------------------------


class Transformer(nn.Module):
    """With layers in a list, and something before, between and after."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(1, 8))
        self.embed = nn.Embedding(16, 8)
        self.body = nn.Module()
        self.body.norm = nn.LayerNorm(8)
        self.body.layers = nn.ModuleList(Layer() for _ in range(4))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body.norm(self.embed(tokens) + self.place)  # type: ignore[operator]
        mask = torch.ones_like(x)
        for layer in self.body.layers:  # type: ignore[union-attr]
            x = layer(x, mask=mask)
        return self.head(self.norm(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.mix(x * mask)


def test_layers_of_a_list_with_what_is_around_them() -> None:
    model = Transformer()
    names = list(model.state_dict())
    experiment = _experiment(model)
    tokens = torch.zeros(2, 3, dtype=torch.long)
    stages = split_model(experiment, NAMES, (CPU, OTHER), SampleBatch((tokens, tokens), 1.0))
    assert [stage.layers for stage in stages] == ["place … body.layers.1", "body.layers.2 … head"]
    where = _list_devices(model)
    assert {n for n, d in where.items() if d == "cpu"} == {
        *("place", "embed.weight", "body.norm.weight", "body.norm.bias"),
        *(n for n in names if n.startswith(("body.layers.0", "body.layers.1"))),
    }
    assert list(model.state_dict()) == names
    assert experiment.predict is not None
    output, target = experiment.predict(model, (tokens, torch.zeros(2, 3, 16)))
    assert (output.device, target.device) == (OTHER, OTHER)  # the mask went along


def test_the_optimizer_keeps_its_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    experiment = _experiment(model)
    split_model(
        experiment, NAMES, (CPU, CPU), SampleBatch((torch.zeros(2, 4), torch.zeros(2, 4)), 1.0)
    )
    held = {id(p) for group in experiment.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}


def test_looking_at_the_layers_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    split_model(
        _experiment(model),
        NAMES,
        (CPU, CPU),
        SampleBatch((torch.ones(2, 4), torch.ones(2, 4)), 1.0),
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_a_model_that_reads_its_numbers_is_cut_by_its_parameters() -> None:
    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert float(x.sum()) == 0.0
            return super().forward(x)

    model = nn.Sequential(Reads(4, 4), Reads(4, 4))
    assert _split(model, torch.zeros(2, 4)) == ["0", "1"]


def test_a_loss_of_the_last_device_comes_to_the_first() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    experiment = _experiment(model)
    split_model(
        experiment, NAMES, (OTHER, CPU), SampleBatch((torch.zeros(2, 4), torch.zeros(2, 4)), 1.0)
    )
    assert experiment.loss(torch.ones(2), torch.zeros(2)).device == OTHER


def test_sizes_are_told() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 400))
    sample = SampleBatch((torch.zeros(2, 4), torch.zeros(2, 400)), 1.0)
    stages = split_model(_experiment(model), ("cuda:0", "cuda:1"), (CPU, CPU), sample)
    assert format_stages(stages) == "cuda:0: 0, 80 B; cuda:1: 1, 8 kB"


# ---- what cannot be cut, or was placed wrongly --------------------------------------------------


class Free(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


class Clever(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("model", "what", "do"),
    [
        (Free(), "Free cannot be split: there is no Sequential", "def experiment(cfg, devices)"),
        (Clever(nn.Linear(4, 4), nn.Linear(4, 4)), "Clever cannot be split", "put its layers into"),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "only 1 layers", "set replica.devices=1"),
        (
            Transformer(tied=True),
            "embed.weight and head.weight are one parameter, which stages 0 and 1 both need",
            "give each its own",
        ),
    ],
)
def test_a_model_that_cannot_be_cut(model: nn.Module, what: str, do: str) -> None:
    with pytest.raises(EchelonError) as told:
        _split(model, torch.zeros(2, 4, dtype=torch.long))
    [fault] = told.value.faults
    assert "replica.devices=2" in fault.what
    assert what in fault.what
    assert do in fault.do


def test_a_forward_that_mixes_stages_is_told_before_the_first_step() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[3](self.layers[2](x)) + self.layers[0](x)

    with pytest.raises(EchelonError) as told:
        _split(Skips(), torch.zeros(2, 8))
    [fault] = told.value.faults
    assert "the forward of Skips uses tensors of two stages at once: Expected all" in fault.what
    assert "def experiment(cfg, devices)" in fault.do


def test_layers_that_an_experiment_forgot_to_place() -> None:
    with pytest.raises(EchelonError) as told:
        describe_manual_placement(_experiment(Free()), ("cuda:0", "cuda:1"), (OTHER, OTHER))
    [fault] = told.value.faults
    assert "takes devices (cuda:0, cuda:1), but left a.weight on cpu, and 3 more" in fault.what


def test_many_stages_are_told_in_few_words() -> None:
    names = tuple(f"cpu stage {i}" for i in range(100))
    [stage] = describe_manual_placement(_experiment(Free()), names, (torch.device("cpu"),) * 100)
    assert stage.device == "cpu stage 0 … cpu stage 99"

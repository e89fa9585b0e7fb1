"""Modules that an experiment has put into eval mode, at the start and around an evaluation."""

from __future__ import annotations

from torch import nn

from echelon.experiment.module_modes import enter_train_mode, use_eval_mode


def backbone_and_head() -> nn.Sequential:
    backbone = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    return nn.Sequential(backbone, nn.BatchNorm1d(2, affine=False), nn.Linear(2, 1))


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_a_frozen_part_in_eval_mode_stays_there() -> None:
    model = backbone_and_head()
    model[0].requires_grad_(False).eval()
    model[1].eval()  # nothing of it is frozen: it has no parameters
    enter_train_mode(model)
    assert modes(model) == [True, False, False, False, False, True, True]


def test_a_frozen_norm_in_a_part_that_trains() -> None:
    model = backbone_and_head()
    model[0][1].requires_grad_(False).eval()  # type: ignore[index]
    model[0][0].eval()  # type: ignore[index]  # not frozen
    enter_train_mode(model)
    assert modes(model) == [True, True, True, False, True, True, True]


def test_a_part_of_the_frozen_that_is_to_train_does() -> None:
    model = backbone_and_head()
    model[0].requires_grad_(False).eval()
    model[0][2].train()  # type: ignore[index]
    enter_train_mode(model)
    assert modes(model[0]) == [False, False, False, True]


def test_a_model_that_comes_in_eval_mode_trains() -> None:
    model = backbone_and_head()
    model[0].requires_grad_(False)
    enter_train_mode(model.eval())
    assert all(modes(model))


class Merged(nn.Linear):
    """Does more than set a flag, and keeps what is inside in eval mode."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.inside = nn.Dropout()
        self.calls: list[bool] = []

    def train(self, mode: bool = True) -> Merged:
        self.calls.append(mode)
        super().train(mode)
        self.inside.eval()
        return self


def test_an_evaluation_leaves_every_mode_as_it_was() -> None:
    model = nn.Sequential(backbone_and_head(), Merged(), Merged())
    model[0][0].eval()  # type: ignore[index]
    model[0][0][1].train()  # type: ignore[index]
    model[1].inside.train()  # type: ignore[union-attr]
    model[2].train()
    before = modes(model)
    with use_eval_mode(model):
        assert not any(modes(model))
    assert modes(model) == before
    assert model[1].calls == [False, True]

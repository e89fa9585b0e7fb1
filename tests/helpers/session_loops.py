"""Training loops of one's own that the tests run, over a session.

The faults of `toy_experiments.Life` happen to them as well: after an optimizer's step.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from toy_experiments import FEATURES, Life, trace

import echelon

WIDTH = 600
"""A layer of that many inputs and outputs does not share the first message with others."""


@dataclass
class Settings:
    samples: int = 17
    lr: float = 0.05
    batch_norm: bool = False
    dropout: float = 0.0
    mistake: str = ""
    stop_at: int = 0
    leave_at: int = 0
    leave_before: int = 0
    noise: bool = False


def make_data(samples: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, FEATURES, generator=generator)
    y = x @ torch.arange(1.0, FEATURES + 1) + 0.1 * torch.randn(samples, generator=generator)
    return torch.arange(samples), x, y


def make_model(cfg: Settings) -> nn.Sequential:
    between = nn.BatchNorm1d(8) if cfg.batch_norm else nn.Identity()
    return nn.Sequential(
        nn.Linear(FEATURES, 8), between, nn.Tanh(), nn.Dropout(cfg.dropout), nn.Linear(8, 1)
    )


class WeightAverage:
    """A part with a state of its own."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = copy.deepcopy(model.state_dict())
        self.updates = 0

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for name, value in model.state_dict().items():
            self.weights[name] = 0.9 * self.weights[name] + 0.1 * value

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self.updates = dict(state["weights"]), state["updates"]


def regression(cfg: Settings, session: echelon.Session) -> None:
    """One model, one optimizer, a scheduler, an average of the weights, an evaluation."""
    model = make_model(cfg)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    session.prepare(model, optimizer, schedule)
    average = WeightAverage(model)
    session.register(average=average)
    life = Life(optimizer)
    life.steps = session.completed_steps
    for numbers, x, y in session.batches(make_data(cfg.samples)):
        if session.completed_steps + 1 == cfg.leave_before:
            break
        trace(batch=session.completed_steps + 1, samples=numbers.tolist())
        loss = nn.functional.mse_loss(model(x).squeeze(1), y)
        session.backward(loss)
        session.step(optimizer, clip=5.0)
        average.update(model)
        if session.completed_steps + 1 == int(os.environ.get("ECHELON_TEST_ERROR_AT", "0")):
            raise ValueError("in the middle of an iteration")
        session.log(loss=loss, grad_norm=session.grad_norm)
        if session.every(epochs=1):
            schedule.step()
            session.best(error=evaluate(model, cfg, session), higher_is_better=False)
        if session.completed_steps + 1 == cfg.stop_at:
            session.stop()
        if session.completed_steps + 1 == cfg.leave_at:
            break


def evaluate(model: nn.Module, cfg: Settings, session: echelon.Session) -> Tensor:
    """The error over the samples, none of them twice."""
    model.eval()
    errors = []
    with torch.no_grad():
        for _, x, y in session.eval_batches(make_data(cfg.samples), batch_size=6):
            errors.append(session.gather((model(x).squeeze(1) - y).abs()))
    model.train()
    found = torch.cat(errors)
    assert len(found) == cfg.samples, len(found)
    return found.mean()


def adversaries(cfg: Settings, session: echelon.Session) -> None:
    """Two models and two optimizers: one judges what the other makes, in turn."""
    maker, judge = nn.Linear(3, FEATURES), nn.Linear(FEATURES, 1)
    makes, judges = (torch.optim.Adam(m.parameters(), lr=cfg.lr) for m in (maker, judge))
    session.prepare(maker, judge, makes, judges)
    Life(makes)
    score = nn.functional.binary_cross_entropy_with_logits
    for numbers, x, _ in session.batches(make_data(cfg.samples)):
        # What is drawn for a sample is the same on any rank.
        noise = torch.sin(numbers.unsqueeze(1) * torch.tensor([1.0, 2.0, 3.0], device=x.device))
        judge.zero_grad()
        real = judge(x).squeeze(1)
        loss_real = score(real, torch.ones_like(real))
        session.backward(loss_real)
        fake = judge(maker(noise).detach()).squeeze(1)
        loss_fake = score(fake, torch.zeros_like(fake))
        session.backward(loss_fake)
        session.step(judges)
        fooled = judge(maker(noise)).squeeze(1)
        loss = score(fooled, torch.ones_like(fooled))
        session.backward(loss)
        session.step(makes)
        session.log(loss=loss, judge_loss=loss_real + loss_fake)


class WideJudge(nn.Module):
    """Gradients of more than one message. A share without a rare sample has none of one part."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.plain, self.rare = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, is_rare: Tensor) -> Tensor:
        hidden = self.body(x)
        score: Tensor = self.plain(hidden).squeeze(1)
        return score + self.rare(hidden).squeeze(1) * is_rare if is_rare.any() else score


def wide_adversaries(cfg: Settings, session: echelon.Session) -> None:
    """`adversaries` of some size. Between backward and step gradients are clipped, cut and cleared
    by hand."""
    maker = nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, FEATURES))
    judge = WideJudge()
    makes, judges = (torch.optim.SGD(m.parameters(), lr=cfg.lr) for m in (maker, judge))
    session.prepare(maker, judge, makes, judges)
    score = nn.functional.binary_cross_entropy_with_logits
    for numbers, x, _ in session.batches(make_data(cfg.samples)):
        noise = torch.sin(numbers.unsqueeze(1) * torch.tensor([1.0, 2.0, 3.0], device=x.device))
        is_rare = numbers % 4 == 0
        judge.zero_grad()
        real = judge(x, is_rare)
        session.backward(score(real, torch.ones_like(real)))
        nn.utils.clip_grad_norm_(judge.parameters(), 0.5)
        fake = judge(maker(noise).detach(), is_rare)
        session.backward(score(fake, torch.zeros_like(fake)))
        for p in judge.body.parameters():
            assert p.grad is not None
            p.grad.data.clamp_(-0.01, 0.01)
        session.step(judges)
        if session.completed_steps % 2:
            judge.requires_grad_(False)
        fooled = judge(maker(noise), is_rare)
        loss = score(fooled, torch.ones_like(fooled))
        session.backward(loss)
        judge.requires_grad_(True)
        if session.completed_steps % 3 == 0:
            maker[0].zero_grad()
        session.step(makes, clip=0.1)
        session.log(loss=loss, grad_norm=session.grad_norm)


def thawing(cfg: Settings, session: echelon.Session) -> None:
    """The first layer is frozen at first, the last one in the end."""
    model = make_model(cfg)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9)
    session.prepare(model, optimizer)
    for _, x, y in session.batches(make_data(cfg.samples)):
        model[0].requires_grad_(session.completed_steps >= 3)
        model[-1].requires_grad_(session.completed_steps < 8)
        loss = nn.functional.mse_loss(model(x).squeeze(1), y)
        session.backward(loss)
        session.step(optimizer, clip=5.0)
        session.log(loss=loss)


def thawed_once(cfg: Settings, session: echelon.Session) -> None:
    """The first layer is thawed in one step, which a resumed run does not come to again."""
    model = make_model(cfg)
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    session.prepare(model, optimizer)
    Life(optimizer).steps = session.completed_steps
    for _, x, y in session.batches(make_data(cfg.samples)):
        if session.completed_steps == 3:
            model[0].requires_grad_(True)
        loss = nn.functional.mse_loss(model(x).squeeze(1), y)
        session.backward(loss)
        session.step(optimizer)
        session.log(loss=loss)


def rare_targets(cfg: Settings, session: echelon.Session) -> None:
    """One sample of a batch has a target: the loss of the other shares is 0 / 0."""
    model = nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    session.prepare(model, optimizer)
    data = make_data(20)
    for numbers, x, y in session.batches(data, sampler=range(20)):
        is_known = numbers % 5 == 1
        errors = (model(x).squeeze(1) - y).square() * is_known
        loss = errors.sum() / is_known.sum()
        session.backward(loss, count=is_known.sum())
        session.step(optimizer)
        session.log(loss=loss)


def evaluated(cfg: Settings, session: echelon.Session) -> None:
    """Batch norms, and results that come after the loop."""
    model = make_model(cfg)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    session.prepare(model, optimizer)
    average = torch.optim.swa_utils.AveragedModel(model)
    session.register(average=average)
    for _, x, y in session.batches(make_data(cfg.samples)):
        session.backward(nn.functional.mse_loss(model(x).squeeze(1), y))
        session.step(optimizer)
        average.update_parameters(model)
        session.log(lr=7.0)
        for _ in session.eval_batches(make_data(5)):
            for norm in [*model.buffers(), *average.buffers()]:
                rows = session.gather(norm.reshape(1, -1))
                assert torch.equal(rows, rows[:1].expand_as(rows))
    session.log(tested=0.25)
    session.best(error=evaluate(model, cfg, session), higher_is_better=False)


class Collected:
    """What a rank has seen."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


def unequal(cfg: Settings, session: echelon.Session) -> None:
    """What ranks do each in their own way."""
    model = nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    collected = Collected()
    session.prepare(model, optimizer, schedule)
    session.register(collected=collected)
    for numbers, x, y in session.batches(make_data(cfg.samples)):
        loss = nn.functional.mse_loss(model(x).squeeze(1), y)
        session.backward(loss)
        if cfg.mistake == "rows":
            session.gather(x if session.rank == 0 else x.double())
        session.step(optimizer)
        if cfg.mistake == "schedule":
            schedule.step(loss.item())
        if cfg.mistake == "state":
            collected.seen += numbers.tolist()


def tokens(cfg: Settings, session: echelon.Session) -> None:
    """A mean over tokens, of which samples have different numbers."""
    model = nn.Linear(FEATURES, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    session.prepare(model, optimizer)
    for numbers, x, _ in session.batches(make_data(cfg.samples)):
        places = torch.arange(3, device=x.device)
        target = (numbers.unsqueeze(1) + places) % 4
        target[places > numbers.unsqueeze(1) % 3] = -100
        scores = model(x).unsqueeze(1).expand(-1, 3, -1).reshape(-1, 4)
        loss = nn.functional.cross_entropy(scores, target.reshape(-1), ignore_index=-100)
        count = int((target != -100).sum())
        session.backward(loss, count=count)
        session.step(optimizer)
        session.log(loss=loss)


def contrast(cfg: Settings, session: echelon.Session) -> None:
    """Every sample is compared with those of all ranks."""
    compare_samples(nn.Linear(FEATURES, 4), cfg, session)


def wide_contrast(cfg: Settings, session: echelon.Session) -> None:
    """`contrast` with gradients of more than one message."""
    layers = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)
    compare_samples(nn.Sequential(*layers), cfg, session)


def compare_samples(model: nn.Module, cfg: Settings, session: echelon.Session) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    session.prepare(model, optimizer)
    for numbers, x, _ in session.batches(make_data(cfg.samples)):
        own = model(x)
        everyone, everyones = session.gather(own), session.gather(numbers)
        target = (numbers.unsqueeze(1) == everyones).float().argmax(1)
        loss = nn.functional.cross_entropy(own @ everyone.T, target)
        session.backward(loss)
        session.step(optimizer)
        session.log(loss=loss)


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples that are dicts, and noise that is drawn for each of them."""

    def __init__(self, samples: int) -> None:
        self.columns = make_data(samples)

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number, x, y = (column[index] for column in self.columns)
        return {"number": number, "x": x + 0.1 * torch.randn(FEATURES), "y": y}


def join_rows(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def sampled(cfg: Settings, session: echelon.Session) -> None:
    """A Dataset, a sampler that takes some samples more often, a collate_fn, loader processes."""
    model = nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    session.prepare(model, optimizer)
    Life(optimizer).steps = session.completed_steps
    weights = torch.arange(1.0, cfg.samples + 1).tolist()
    sampler = torch.utils.data.WeightedRandomSampler(weights, cfg.samples)
    data = Rows(cfg.samples)
    for batch in session.batches(data, collate_fn=join_rows, sampler=sampler):
        loss = nn.functional.mse_loss(model(batch["x"]).squeeze(1), batch["y"])
        session.backward(loss)
        session.step(optimizer)
        session.log(loss=loss)
        if session.every(epochs=1):
            batches = session.eval_batches(data, batch_size=6, collate_fn=collect_numbers)
            seen = torch.cat([session.gather(numbers) for numbers in batches])
            assert seen.tolist() == list(range(cfg.samples))


def collect_numbers(rows: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack([row["number"] for row in rows])


def policy(cfg: Settings, session: echelon.Session) -> None:
    """No data: every rank plays for itself."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    session.prepare(model, optimizer)
    for step in session.steps():
        played = torch.full((1, 2), float(step))
        session.backward(model(played).square().mean())
        session.step(optimizer)
        session.log(loss=float(step))


def split_rows(cfg: Settings, session: echelon.Session) -> None:
    """No data, but rows that every rank has: a rank works on its share of them."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    session.prepare(model, optimizer)
    for step in session.steps():
        rows = torch.arange(2.0 * step).reshape(step, 2)
        assert torch.equal(session.gather(session.split(rows)), rows)
        own = session.split(rows)
        assert len(own) == len(session.split(range(step)))
        loss = model(own).square().sum() / max(1, len(own))
        session.backward(loss, count=len(own))
        session.step(optimizer)
        session.log(loss=loss)


def mistaken(cfg: Settings, session: echelon.Session) -> None:
    """What a person may get wrong, by name."""
    model, other = nn.Linear(FEATURES, 1), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    mistake = cfg.mistake
    if mistake == "foreign":
        session.prepare(other, optimizer)
    if mistake == "nothing":
        session.prepare()
    if mistake == "data":
        session.prepare(make_data(3))
    if mistake == "no state":
        session.register(buffer=[1, 2])  # type: ignore[arg-type]
    if mistake == "total":
        session.total_steps  # noqa: B018
    if mistake == "closure":
        session.prepare(model, torch.optim.LBFGS(model.parameters()))
    session.prepare(model, optimizer)
    if mistake == "object":
        collected = Collected()
        collected.seen.append(object())
        session.register(collected=collected)
    if mistake == "twice":
        session.prepare(model)
    if mistake == "unequal" and session.rank == 1:
        session.register(extra=WeightAverage(model))
    if mistake == "no loop":
        return
    if mistake == "too early":
        session.backward(model(torch.ones(1, FEATURES)).sum())
    if mistake == "batch size":
        session.batches(make_data(8), batch_size=0)
    orders: dict[str, dict[str, Any]] = {
        "shuffle": {"shuffle": False},
        "index": {"batch_sampler": [[0, 99]]},
        "two orders": {"sampler": [1], "batch_sampler": [[1]]},
        "share": {"sampler": torch.utils.data.DistributedSampler(range(17), 2, 0)},  # type: ignore[arg-type]
        "collate": {"collate_fn": 3},
        "own size": {"batch_size": 4},
    }
    data, eval_data = make_data(cfg.samples), make_data(5)
    if mistake in ("own data", "own eval data") and session.rank == 1:
        rows = data if mistake == "own data" else eval_data
        rows[1][0] += 1.0
    batches = session.batches(data, **orders.get(mistake, {}))
    if mistake == "no iteration":
        return
    for _, x, y in batches:
        if mistake == "own eval data":
            list(session.eval_batches(eval_data))
        loss = nn.functional.mse_loss(model(x).squeeze(1), y)
        counts = {"count": -1, "word": "3", "counts": torch.ones(2), "none": 0}
        if mistake in counts:
            session.backward(loss, count=counts[mistake])  # type: ignore[arg-type]
        if mistake == "row":
            session.gather(loss)
        if mistake == "own backward":
            loss.backward()  # type: ignore[no-untyped-call]
        if mistake == "own gradient":
            model.weight.grad = torch.ones_like(model.weight)
            session.step(optimizer)
        if mistake == "own step":
            session.backward(loss)
            optimizer.step()
        if mistake == "never":
            continue
        if mistake == "no rows":
            session.split(5)
        if mistake == "late":
            session.prepare(other)
        if mistake == "second loop":
            session.batches(make_data(8))
        if mistake == "number":
            session.backward(loss.item())  # type: ignore[arg-type]
        if mistake == "rows":
            session.backward(model(x))
        if mistake != "no backward":
            session.backward(loss)
        if mistake == "norm":
            session.grad_norm  # noqa: B018
        if mistake == "stranger":
            session.step(torch.optim.SGD(other.parameters(), lr=1.0))
        session.step(optimizer, clip=-1.0 if mistake == "clip" else None)
        if mistake == "place":
            session.log(step=3)
        if mistake == "no name":
            session.log(loss)  # type: ignore[arg-type]
        if mistake == "eval size":
            list(session.eval_batches(eval_data, batch_size=-1))
        if mistake == "text":
            session.log(loss=["high"])
        if mistake == "best":
            session.best(flumph=1.0)
        if mistake == "interval":
            session.every()
        if mistake == "zero":
            session.every(epochs=0)
        if mistake == "no time":
            session.every(minutes=0)
    if mistake == "again":
        for _ in batches:
            pass
    if mistake == "after":
        session.backward(model(make_data(1)[1]).sum())


def nonfinite(cfg: Settings, session: echelon.Session) -> None:
    model = nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=float("inf"))
    session.prepare(model, optimizer)
    for _, x, _ in session.batches(make_data(cfg.samples)):
        session.backward(model(x).square().mean())
        session.step(optimizer)


def repeated_passes(cfg: Settings, session: echelon.Session) -> None:
    """`regression`, but its gradients are computed in two passes now and then."""
    model = make_model(cfg)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    session.prepare(model, optimizer)
    for _, x, y in session.batches(make_data(cfg.samples)):
        loss = nn.functional.mse_loss(model(x).squeeze(1), y)
        if session.completed_steps % 3 == 2:
            session.backward(loss / 2)
            loss = nn.functional.mse_loss(model(x).squeeze(1), y)
            session.backward(loss / 2)
        else:
            session.backward(loss)
        session.step(optimizer)
        session.log(loss=loss)


def media(cfg: Settings, session: echelon.Session) -> None:
    """Texts, images and histograms beside numbers; each rank has its own, and rank 0's count."""
    model = nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    session.prepare(model, optimizer)
    Life(optimizer).steps = session.completed_steps
    if cfg.mistake == "early":
        session.log(said="too early")
    for _, x, y in session.batches(make_data(cfg.samples)):
        loss = nn.functional.mse_loss(model(x).squeeze(1), y)
        session.backward(loss)
        step = session.completed_steps + 1
        if step % 2 == 0:
            color = torch.full((4, 3, 8, 8), step / 255 if session.rank == 0 else 1.0)
            session.log(
                said=f"step {step} of rank {session.rank}",
                seen=echelon.Image(torch.tensor(torch.nan) if cfg.mistake == "nan" else color),
                weights=echelon.Histogram(model.weight, bins=3),
            )
        session.step(optimizer)
        session.log(loss=loss)
        if cfg.mistake == "name":
            session.log(step="a text")


def timed(cfg: Settings, session: echelon.Session) -> None:
    """What is due by a clock."""
    model = nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    session.prepare(model, optimizer)
    for _, x, _ in session.batches(make_data(cfg.samples)):
        step = session.completed_steps + 1
        due = [session.every(minutes=minutes) for minutes in (1e-9, 1e-4, 1e9)]
        if step % 3:  # a backward pass carries the clock, and the end of an iteration
            session.backward(model(x).square().mean())
            session.step(optimizer)
        due += [session.every(minutes=minutes) for minutes in (1e-9, 1e-4, 1e9)]
        trace(due=due, at=step)


def informed(cfg: Settings, session: echelon.Session, training: echelon.TrainingInfo) -> None:
    assert training.rank == session.rank
    assert training.run_folder == session.folder
    trace(begun=training.step, total=training.count_total_steps(cfg.samples))
    regression(cfg, session)


def uneven(cfg: Settings, session: echelon.Session) -> None:
    """The last rank leaves the loop by itself."""
    model = make_model(cfg)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
    session.prepare(model, optimizer)
    is_last = session.rank == session.world_size - 1
    for _, x, y in session.batches(make_data(cfg.samples)):
        step = session.completed_steps + 1
        if is_last and step == cfg.leave_before:
            break
        if cfg.mistake == "all skip" and step == 5:
            continue
        loss = nn.functional.mse_loss(model(x).squeeze(1), y)
        if cfg.mistake == "skip" and is_last and step == 5:
            continue
        session.backward(loss)
        session.step(optimizer)
        if is_last and step == cfg.leave_at:
            break
        if cfg.mistake == "gather alone" and is_last and step == 5:
            session.gather(x)
        if cfg.mistake == "best alone" and is_last and step == 5:
            session.best(loss=loss)
        if cfg.mistake == "gather":
            session.gather(x)
    if cfg.mistake == "gather":
        session.gather(torch.ones(1))


class Running(nn.Module):
    """A buffer that is replaced in every iteration."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 3000), nn.Linear(3000, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(torch.tanh(self.first(x))).squeeze(1) / 50
        return output


def awkward(cfg: Settings, session: echelon.Session) -> None:
    """Gradients changed by hand, a group that comes later, two evaluations at once, counts of
    zero."""
    model = Running()
    optimizer = torch.optim.SGD(model.first.parameters(), lr=cfg.lr)
    session.prepare(model, optimizer)
    eval_data = make_data(5), make_data(7)
    for numbers, x, y in session.batches(make_data(cfg.samples)):
        if session.completed_steps == 2:
            optimizer.add_param_group({"params": list(model.last.parameters()), "lr": cfg.lr})
        model.seen = model.seen + session.gather(x).mean()
        counted = numbers % 5 < 2
        errors = (model(x) - y).square() * counted
        session.backward(errors.sum() / counted.sum().clamp(min=1), count=counted.sum())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for p in model.parameters():
            if p.grad is not None:
                p.grad = p.grad.clamp(-0.05, 0.05)
        session.step(optimizer)
        list(zip(*(session.eval_batches(data) for data in eval_data), strict=False))
        session.log(loss=errors.sum() / counted.sum())  # of a share without one: not a number

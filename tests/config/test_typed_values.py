"""Values become what their annotations declare, and the same again after a trip through JSON."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, make_dataclass
from pathlib import Path, PurePosixPath
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    Optional,
    TypedDict,
    TypeVar,
    Union,
)

import pytest
import torch

from echelon.config.settings_classes import list_setting_names
from echelon.config.typed_values import ValueConverter
from echelon.errors import EchelonError


class Colour(enum.Enum):
    RED = 1
    BLUE = "sea"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Parts(enum.Flag):
    HEAD = 1
    BODY = 2


Width = NewType("Width", int)
T = TypeVar("T")


@dataclass
class Adam:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)


@dataclass
class Sgd:
    lr: float = 0.2
    momentum: float = 0.5


@dataclass
class Box(Generic[T]):
    item: T
    more: list[T] = field(default_factory=list)


class Point(NamedTuple):
    x: int
    y: int = 7


class Row(TypedDict):
    name: str
    size: int


NONE: Any = object()


def convert(hint: Any, given: Any, default: Any = NONE) -> Any:
    """The object that `given` becomes, in a field of this annotation; and again from JSON."""
    make: Any = {} if default is NONE else {"default_factory": lambda: default}
    holder = make_dataclass("Holder", [("value", hint, field(**make))])
    converter = ValueConverter()
    converted = converter.convert(holder, {} if given is NONE else {"value": given}, ())
    assert converted is not None, converter.problems
    stored = json.loads(json.dumps(converted.plain))
    again = ValueConverter().convert(holder, stored, ())
    assert again is not None
    assert again.plain == stored
    assert repr(again.typed.value) == repr(converted.typed.value)
    return converted.typed.value


def list_problems(hint: Any, given: Any) -> list[str]:
    converter = ValueConverter()
    assert converter.convert(hint, given, ("experiment",)) is None
    return [f"{'.'.join(p.path[1:])}: {p.what} | {p.do}" for p in converter.problems]


@pytest.mark.parametrize(
    ("hint", "given", "value"),
    [
        (float, 1, 1.0),
        (float, "1e-4", 1e-4),
        (int, "12", 12),
        (bool, "yes", True),
        (bool, 0, False),
        (str, 5, "5"),
        (str, True, "true"),
        (Optional[int], None, None),  # noqa: UP045
        (int | None, 3, 3),
        (Union[int, str], "8", "8"),  # noqa: UP007
        (int | str, 8, 8),
        (float | int, 8, 8),
        (str | float, 8, 8.0),
        (Path | None, "a/b", Path("a/b")),
        (PurePosixPath, "a", PurePosixPath("a")),
        (Literal["a", "b"], "b", "b"),
        (Literal[1, 2], 2, 2),
        (Literal["1", "2"], 1, "1"),
        (Literal["auto"] | int, "auto", "auto"),
        (Literal["auto"] | int, 4, 4),
        (Literal[Colour.RED], "RED", Colour.RED),
        (Colour, "BLUE", Colour.BLUE),
        (Colour, "sea", Colour.BLUE),
        (Colour, 1, Colour.RED),
        (Level, "HIGH", Level.HIGH),
        (Parts, "HEAD|BODY", Parts.HEAD | Parts.BODY),
        (list[float], [1, "2"], [1.0, 2.0]),
        (tuple[int, float], [1, 2], (1, 2.0)),
        (tuple[int, ...], [1, 2, 3], (1, 2, 3)),
        (tuple, [1, "a"], (1, "a")),
        (tuple[tuple[int, int], ...], [[1, 2], [3, 4]], ((1, 2), (3, 4))),
        (set[int], [2, 1, 2], {1, 2}),
        (frozenset[str], ["b"], frozenset("b")),
        (Sequence[int], [1], [1]),
        (collections.deque[int], [1], collections.deque([1])),
        (dict[str, float], {"a": 1}, {"a": 1.0}),
        (dict[int, tuple[int, ...]], {"1": [2]}, {1: (2,)}),
        (Mapping[Colour, int], {"RED": 2}, {Colour.RED: 2}),
        (Annotated[int, "positive"], "3", 3),
        (Width, 3, 3),
        (Any, {"a": [1, None]}, {"a": [1, None]}),
        (bytes, "ab", b"ab"),
        (complex, "1+2j", 1 + 2j),
        (decimal.Decimal, 0.1, decimal.Decimal("0.1")),
        (fractions.Fraction, "1/3", fractions.Fraction(1, 3)),
        (uuid.UUID, "0" * 32, uuid.UUID("0" * 32)),
        (datetime.date, "2026-01-31", datetime.date(2026, 1, 31)),
        (datetime.datetime, "2026-01-31T10:00", datetime.datetime(2026, 1, 31, 10)),
        (datetime.time, "10:30", datetime.time(10, 30)),
        (datetime.timedelta, 90, datetime.timedelta(seconds=90)),
        (datetime.timedelta, "2 days, 1:00:00", datetime.timedelta(days=2, hours=1)),
        (torch.dtype, "bfloat16", torch.bfloat16),
        (torch.device, "cuda:1", torch.device("cuda:1")),
        (Adam, {"lr": 1}, Adam(1.0)),
        (Adam | None, {"betas": [0.5, 1]}, Adam(betas=(0.5, 1.0))),
        (list[Adam], [{"lr": 1}, {}], [Adam(1.0), Adam()]),
        (dict[str, Adam], {"a": {"lr": 1}}, {"a": Adam(1.0)}),
        (Adam | Sgd, {"momentum": 1}, Sgd(momentum=1.0)),
        (Adam | Sgd, {"class": "Sgd"}, Sgd()),
        (list[Adam | Sgd], [{"class": "Sgd"}, {"class": "Adam", "lr": 2}], [Sgd(), Adam(2.0)]),
        (Adam | str, "none", "none"),
        (Box[int], {"item": "3", "more": [4]}, Box(3, [4])),
        (Point, {"x": 1}, Point(1, 7)),
        (Row, {"name": 3, "size": "4"}, {"name": "3", "size": 4}),
    ],
)
def test_a_value_becomes_what_its_annotation_declares(hint: Any, given: Any, value: Any) -> None:
    found = convert(hint, given)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("hint", "default"),
    [
        (tuple[float, float], (0.9, 0.99)),
        (Any, (1, (2, 3))),
        (Any, Path("a")),
        (Any, Adam(3.0)),
        (list[int] | tuple[int, ...], (1, 2)),
        (str | Path, Path("a")),
        (Path | str, "a"),
        (Adam | Sgd, Sgd(5.0)),
        (float, None),
        (Colour, Colour.BLUE),
        (set[str], {"a", "b", "c"}),
        (Point, Point(1)),
        (torch.dtype, torch.float16),
    ],
)
def test_a_default_stays_as_it_is(hint: Any, default: Any) -> None:
    found = convert(hint, NONE, default)
    assert found == default
    assert type(found) is type(default)


def test_a_group_changes_single_values_of_its_default() -> None:
    assert convert(Adam, {"lr": 3}, Adam(1.0, (0.1, 0.2))) == Adam(3.0, (0.1, 0.2))
    assert convert(Adam | Sgd, {"lr": 3}, Sgd(1.0, 0.1)) == Sgd(3.0, 0.1)
    assert convert(Adam | Sgd, {"class": "Adam"}, Sgd(1.0, 0.1)) == Adam(), "another class, its own"
    assert convert(dict[str, Adam], {"b": {"lr": 2}, "a": {"lr": 3}}, {"a": Adam(1.0, (0, 1))}) == {
        "a": Adam(3.0, (0, 1)),
        "b": Adam(2.0),
    }
    assert convert(tuple[int, ...], [3], (1, 2)) == (3,), "a list replaces"


def test_fields_that_are_not_settings() -> None:
    @dataclass
    class Mixed:
        first: int = 1
        kind: ClassVar[str] = "a"
        scale: InitVar[int] = 2
        _: KW_ONLY
        total: int = field(init=False)

        def __post_init__(self, scale: int) -> None:
            self.total = self.first * scale

    found = convert(Mixed, {"first": 5, "scale": 3})
    assert found.total == 15
    assert list_problems(Mixed, {"total": 1, "kind": "b"}) == [
        "total: there is no such setting | known: first, scale",
        "kind: there is no such setting | known: first, scale",
    ]


def test_a_post_init_runs_once() -> None:
    @dataclass
    class Doubled:
        width: int = 4

        def __post_init__(self) -> None:
            self.width *= 2

    assert convert(Doubled, NONE, Doubled()).width == 8
    assert convert(Doubled, {"width": 5}, Doubled()).width == 10
    holder = make_dataclass(
        "Holder", [("value", Doubled, field(default_factory=lambda: Doubled(7)))]
    )
    [problem] = list_problems(holder, {})
    assert "Doubled makes other values of its own" in problem


def test_what_does_not_fit_is_told_all_at_once() -> None:
    @dataclass
    class Whole:
        inner: Adam = field(default_factory=Adam)
        choice: Adam | Sgd = field(default_factory=Sgd)
        layers: list[Adam] = field(default_factory=list)
        kind: Literal["mean", "sum"] = "mean"
        colour: Colour = Colour.RED
        size: int = 3
        place: Path = Path("x")
        maybe: float | None = None
        pair: tuple[int, int] = (1, 2)
        needed: int = field(kw_only=True)

    given = {
        "inner": {"lrr": 1, "lr": "fast"},
        "choice": {"class": "Sdg"},
        "layers": [{}, {"bets": 1}],
        "kind": "maen",
        "colour": "BLEU",
        "size": 2.0,
        "place": None,
        "maybe": "often",
        "pair": [1],
        "extra": 1,
    }
    assert list_problems(Whole, given) == [
        "extra: there is no such setting | known: choice, colour, inner, kind, layers, maybe, "
        "needed, pair, place, size",
        "inner.lrr: there is no such setting | did you mean 'lr'? known: lr, betas",
        "inner.lr: not a number | give a number; the default is 0.1",
        "choice.class: not one of Adam, Sgd | did you mean 'Sgd'? known: Sgd, Adam",
        "layers.[1].bets: there is no such setting | did you mean 'betas'? known: betas, lr",
        "kind: not one of mean, sum | did you mean 'mean'? known: mean, sum",
        "colour: not one of RED, BLUE | did you mean 'BLUE'? known: BLUE, RED",
        "size: not a whole number | write size=2",
        "place: not a path | give a path; the default is x",
        "maybe: not a number | give a number; the default is null",
        "pair: not a list of 2 values | give a list of 2 values; the default is (1, 2)",
        "needed: needed has no value: Whole declares no default | give one: needed=VALUE",
    ]


@pytest.mark.parametrize(
    ("hint", "default", "said"),
    [
        (Callable[[], int], print, "is declared as Callable"),
        (torch.Tensor, None, "value is declared as Tensor"),
        (Any, print, "is declared as builtin_function_or_method"),
        (int, 0.5, "Holder.value is declared as a whole number, but its default is 0.5"),
        (set[list[int]], {frozenset()}, "value is declared as set, which cannot be"),
    ],
)
def test_a_declaration_that_cannot_be_is_named(hint: Any, default: Any, said: str) -> None:
    holder = make_dataclass("Holder", [("value", hint, field(default_factory=lambda: default))])
    problems = list_problems(holder, {"value": [[1]]} if default is None else {})
    assert any(said in problem for problem in problems), problems


def test_a_class_may_refuse_its_values() -> None:
    @dataclass
    class Checked:
        lr: float = 0.1

        def __post_init__(self) -> None:
            if self.lr < 0:
                raise ValueError("lr is below 0")

    [problem] = list_problems(Checked, {"lr": -1})
    assert "Checked refuses these settings: lr is below 0" in problem


def test_an_annotation_that_cannot_be_resolved() -> None:
    @dataclass
    class Hidden:
        inner: Missing  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(
        EchelonError, match="annotation of Hidden cannot be resolved: name 'Missing'"
    ):
        ValueConverter().convert(Hidden, {}, ())


def test_names_of_nested_settings() -> None:
    @dataclass
    class Whole:
        lr: float = 0.1
        inner: Adam | None = None
        choice: Adam | Sgd = field(default_factory=Sgd)
        layers: list[Adam] = field(default_factory=list)

    assert list_setting_names(Whole) == [
        *("lr", "inner.lr", "inner.betas"),
        *("choice.lr", "choice.betas", "choice.momentum", "layers"),
    ]


@dataclass
class Tree:
    size: int = 1
    left: Tree | None = None


def test_a_class_within_itself() -> None:
    assert convert(Tree, {"left": {"left": {"size": 3}}}).left.left == Tree(3)
    assert list_setting_names(Tree) == ["size", "left.size", "left.left"]

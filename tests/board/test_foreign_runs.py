"""Runs of TensorBoard and wandb, as the real packages write them, read without them."""

from __future__ import annotations

import json
import math
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from board_requests import ask
from other_users import NOBODY, act_as, give_away, make_open_folder, needs_root
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter

from echelon.board.foreign.foreign_runs import (
    ROUTES,
    ForeignRun,
    choose_best_metric,
    list_foreign_runs,
    remove_stale_conversions,
    scan_foreign_runs,
)
from echelon.board.server import Board
from echelon.runs.metrics_file import read_metrics
from echelon.runs.metrics_summary import read_summary


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


def find_one(root: Path) -> ForeignRun:
    [run] = list_foreign_runs(root)
    return run


def read_values(run: ForeignRun) -> dict[str, list[tuple[float, Any]]]:
    """Return the values of a converted run by name, with their steps."""
    values: dict[str, list[tuple[float, Any]]] = {}
    for line in read_metrics(run.converted.metrics_file):
        for name, value in line.items():
            if name not in ("step", "time"):
                values.setdefault(name, []).append((line["step"], value))
    return values


def convert(root: Path) -> tuple[ForeignRun, dict[str, list[tuple[float, Any]]]]:
    run = find_one(root)
    run.refresh()
    return run, read_values(run)


def round_to_float(value: float) -> float:
    """Return a number as four bytes hold it."""
    found: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return found


# --- TensorBoard ---


class EventFile:
    """An event file with the records that a test wants, framed by TensorBoard itself."""

    def __init__(self, folder: Path, moment: int = 1_700_000_000, suffix: str = "host.1.0") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"events.out.tfevents.{moment}.{suffix}"
        self._file = self.path.open("ab")
        self._records = RecordWriter(self._file)
        self.moment = float(moment)

    def add(self, step: int, **values: float) -> EventFile:
        self.moment += 10
        summary = Summary(value=[Summary.Value(tag=n, simple_value=v) for n, v in values.items()])
        return self.add_event(Event(wall_time=self.moment, step=step, summary=summary))

    def add_version(self) -> EventFile:
        return self.add_event(Event(wall_time=self.moment, file_version="brain.Event:2"))

    def add_start(self, step: int) -> EventFile:
        log = SessionLog(status=SessionLog.START)
        return self.add_event(Event(wall_time=self.moment, step=step, session_log=log))

    def add_event(self, event: Any) -> EventFile:
        return self.add_record(event.SerializeToString())

    def add_record(self, record: bytes) -> EventFile:
        self._records.write(record)
        self._file.flush()
        return self


def test_what_summary_writer_writes_is_read_exactly(root: Path) -> None:
    import torch

    with SummaryWriter(str(root / "exp" / "a")) as writer:
        for step in range(40):
            writer.add_scalar("train/loss", 1 / (step + 1), step * 3)
            writer.add_scalar(
                "acc", math.sqrt(step), step * 3, new_style=True, double_precision=True
            )
            writer.add_scalar("half", step / 7, step * 3, new_style=True)
        writer.add_scalar("wild", math.nan, 1)
        writer.add_scalar("wild", math.inf, 2)
        writer.add_text("note", "a *sentence* with ümlaut", 5)
        writer.add_image("picture", torch.rand(3, 7, 5), 6)
        writer.add_histogram("weights", torch.arange(100.0), 7)
        writer.add_scalars("both", {"x": 1.0, "y": 2.0}, 3)
    runs = {run.name: run for run in list_foreign_runs(root)}
    assert set(runs) == {"exp/a", "exp/a/both_x", "exp/a/both_y"}, "as in TensorBoard"
    run = runs["exp/a"]
    assert run.refresh()
    assert not run.refresh()
    values = read_values(run)

    accumulator = EventAccumulator(str(root / "exp" / "a"), {"scalars": 0, "tensors": 0})
    accumulator.Reload()
    expected = [(e.step, e.value) for e in accumulator.Scalars("train/loss")]
    assert values["train/loss"] == expected
    assert values["acc"] == [(step * 3, math.sqrt(step)) for step in range(40)]
    assert [value for _, value in values["half"]] == [round_to_float(i / 7) for i in range(40)]
    assert math.isnan(values["wild"][0][1])
    assert values["wild"][1] == (2, math.inf)
    assert values["note/text_summary"] == [(5, "a *sentence* with ümlaut")]
    [(shown_at, image)] = values["picture"]
    encoded = accumulator.Images("picture")[0].encoded_image_string
    assert (shown_at, (run.converted.folder / image["image"]).read_bytes()) == (6, encoded)
    [(_, histogram)] = values["weights"]
    assert sum(histogram["counts"]) == 100
    assert (histogram["bins"][0], histogram["bins"][-1]) == (0.0, 99.0)
    assert len(histogram["bins"]) == len(histogram["counts"]) + 1
    assert not run.facts.faults

    times = [line["time"] for line in read_metrics(run.converted.metrics_file)]
    moments = [event.wall_time for event in accumulator.Scalars("train/loss")]
    assert times[0] == moments[0]
    assert run.facts.started == pytest.approx(moments[0], abs=10)


def test_hparams_are_settings_and_say_how_a_run_ended(root: Path) -> None:
    settings = {"lr": 0.1, "optimizer": "sgd", "layers": 3, "nesterov": True}
    with SummaryWriter(str(root)) as writer:
        writer.add_hparams(settings, {"hparam/accuracy": 0.75}, run_name="trial")
    run = next(run for run in list_foreign_runs(root) if run.name == "trial")
    run.refresh()
    row = run.make_row(2)
    assert row["settings"] == {"lr": 0.1, "optimizer": "sgd", "layers": 3, "nesterov": 1}
    assert row["state"] == "finished"
    assert row["metrics"]["hparam/accuracy"] == [0.75, 0.75, 0.75, 1, "max"]
    assert (row["id"], row["best"], row["best_name"]) == (
        *("2:tensorboard:trial", 0.75, "hparam/accuracy"),
    )


def test_tensors_as_tensorflow_2_writes_them(root: Path) -> None:
    import numpy as np
    from tensorboard.plugins.histogram.summary_v2 import histogram_pb
    from tensorboard.plugins.image import metadata as image_metadata
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.util.tensor_util import make_tensor_proto

    file = EventFile(root)
    png = make_png(1)
    described = image_metadata.create_summary_metadata("", "")
    pictures = make_tensor_proto(np.array([b"4", b"2", png, png], dtype=object))
    image = Summary(value=[Summary.Value(tag="img", metadata=described, tensor=pictures)])
    unknown = Summary.Value(tag="raw", tensor=make_tensor_proto(np.float64(2.5)))
    matrix = Summary.Value(tag="matrix", tensor=make_tensor_proto(np.ones((4, 5))))
    dtypes = (np.float32, np.float64, np.int32, np.int64, np.uint8, np.float16)
    for dtype in dtypes:
        name = np.dtype(dtype).name
        value = Summary.Value(tag=name, tensor=make_tensor_proto(dtype(3)))
        file.add_event(Event(step=1, summary=Summary(value=[value])))
    file.add_event(Event(step=1, summary=scalar_pb("loss", 0.3)))
    # Only the first value of a tag says by which plugin it is drawn.
    for step, loss in ((2, 0.25), (3, 0.125)):
        summary = scalar_pb("loss", loss)
        summary.value[0].ClearField("metadata")
        file.add_event(Event(step=step, summary=summary))
    file.add_event(Event(step=4, summary=histogram_pb("h", [1.0, 2.0, 2.0, 9.0], buckets=4)))
    file.add_event(Event(step=5, summary=text_pb("t", "words")))
    file.add_event(Event(step=6, summary=image))
    file.add_event(Event(step=7, summary=Summary(value=[unknown, matrix])))
    run, values = convert(root)
    assert values["loss"] == [(1, round_to_float(0.3)), (2, 0.25), (3, 0.125)]
    assert values["h"] == [(4, {"bins": [1, 3, 5, 7, 9], "counts": [3, 0, 0, 1]})]
    assert values["t"] == [(5, "words")]
    assert [(run.converted.folder / v["image"]).read_bytes() for _, v in values["img"]] == [png]
    assert "img/1" in values
    assert values["raw"] == [(7, 2.5)]
    for dtype in dtypes:
        assert values[np.dtype(dtype).name] == [(1, 3)]
    assert run.facts.left_out == {"tensors of unknown kind": 1}


def test_files_of_one_folder_are_one_run_in_the_order_of_their_times(root: Path) -> None:
    EventFile(root / "a", 1_700_000_900).add(10, loss=1.0)
    EventFile(root / "a", 1_600_000_000, "other").add(5, loss=2.0)
    (root / "a" / "events.out.tfevents.1700000950.host.gz").write_bytes(b"\x1f\x8b")
    _, values = convert(root)
    assert values["loss"] == [(5, 2.0), (10, 1.0)]


def test_a_restart_purges_the_steps_that_come_again(root: Path) -> None:
    first = EventFile(root, 1_700_000_000).add_version().add_start(0)
    for step in range(10):
        first.add(step, loss=step, other=step)
    run = find_one(root)
    run.refresh()
    second = EventFile(root, 1_700_001_000).add_version().add_start(6)
    for step in range(6, 9):
        second.add(step, loss=100 + step)
    assert run.refresh()
    values = read_values(run)
    accumulator = EventAccumulator(str(root))
    accumulator.Reload()
    for name in ("loss", "other"):
        assert values[name] == [(e.step, e.value) for e in accumulator.Scalars(name)]
    assert [step for step, _ in values["other"]] == list(range(6))
    summary = read_summary(run.converted)
    assert (summary.metrics["loss"].count, summary.metrics["loss"].last) == (9, 108)

    anew = ForeignRun(root, root, "tensorboard")
    anew.converted.metrics_file.unlink()
    anew.refresh()
    assert read_values(anew) == values, "followed and read at once are the same"


def test_a_restart_that_does_not_say_so_purges_only_what_it_logs_again(root: Path) -> None:
    first = EventFile(root, 1_700_000_000)
    for step in range(10):
        first.add(step, loss=step, other=step)
    EventFile(root, 1_700_001_000).add(4, loss=50).add(5, loss=51)
    _, values = convert(root)
    assert values["loss"] == [*((s, s) for s in range(4)), (4, 50), (5, 51)]
    assert [step for step, _ in values["other"]] == list(range(10))


def test_smaller_steps_within_one_file_stay(root: Path) -> None:
    EventFile(root).add(5, loss=1).add(3, loss=2).add(5, loss=3)
    _, values = convert(root)
    assert values["loss"] == [(5, 1), (3, 2), (5, 3)]


def test_only_what_was_added_is_read(root: Path) -> None:
    file = EventFile(root).add(1, loss=1)
    run = find_one(root)
    run.refresh()
    offset = run.facts.files[file.path.name].offset
    before = run.converted.metrics_file.read_bytes()
    assert offset == file.path.stat().st_size
    file.add(2, loss=2, acc=3)
    again = find_one(root)
    assert again.refresh()
    after = again.converted.metrics_file.read_bytes()
    assert after.startswith(before)
    assert read_values(again) == {"loss": [(1, 1), (2, 2)], "acc": [(2, 3)]}
    assert read_summary(again.converted).offset == len(after)


def test_a_half_written_record_waits_for_its_end(root: Path) -> None:
    whole = EventFile(root).add(1, loss=1).add(2, loss=2).path
    data = whole.read_bytes()
    run = find_one(root)
    record_bytes = len(data) // 2
    for size in range(len(data) + 1):
        whole.write_bytes(data[:size])
        run.refresh()
        assert len(read_metrics(run.converted.metrics_file)) == size // record_bytes
        assert not run.facts.faults


def test_a_damaged_record_is_said_and_skipped(root: Path) -> None:
    file = EventFile(root)
    for step in range(1, 6):
        file.add(step, loss=step)
    data = bytearray(file.path.read_bytes())
    size = len(data) // 5
    data[size + 14] ^= 1  # in the content of the second
    data[3 * size + 1] ^= 1  # in the length of the fourth
    file.path.write_bytes(data)
    run, values = convert(root)
    assert values["loss"] == [(1, 1), (3, 3), (5, 5)]
    assert run.facts.faults == {"a damaged record": 1, "damage between records": 1}
    assert "a damaged record" in run.make_row(0)["why"]


def test_a_length_beyond_the_file_takes_no_memory(root: Path) -> None:
    from echelon.board.foreign.crc32c import compute_crc32c, mask_checksum

    EventFile(root).add(1, loss=1)
    for length in (1 << 62, (1 << 64) - 1, 1 << 40):
        header = struct.pack("<Q", length)
        data = header + struct.pack("<I", mask_checksum(compute_crc32c(header)))
        (root / "events.out.tfevents.1800000000.x").write_bytes(data + b"rest")
        _, values = convert(root)
        assert values["loss"] == [(1, 1)]
    long = root / "events.out.tfevents.1800000000.x"
    length = 40 << 20
    header = struct.pack("<Q", length)
    with long.open("wb") as opened:
        opened.write(header + struct.pack("<I", mask_checksum(compute_crc32c(header))))
        opened.truncate(length + 16)
    EventFile(root, 1_800_000_000, "x").add(2, loss=2)
    run, values = convert(root)
    assert values["loss"] == [(1, 1), (2, 2)]
    assert list(run.facts.faults) == ["a record of more than 32 MiB"]


@pytest.mark.parametrize("change", ["replaced", "shorter", "removed", "cache damaged"])
def test_a_conversion_is_made_anew_where_it_no_longer_fits(root: Path, change: str) -> None:
    EventFile(root, 1_600_000_000).add(1, loss=1).add(2, loss=2)
    file = EventFile(root, 1_700_000_000).add(3, loss=3).add(4, loss=4)
    run, _ = convert(root)
    expected = [(1, 1), (2, 2), (3, 3), (4, 4)]
    data = file.path.read_bytes()
    if change == "removed":
        file.path.unlink()
        expected = expected[:2]
    elif change == "shorter":
        file.path.write_bytes(data[: len(data) // 2])
        expected = expected[:3]
    elif change == "replaced":
        file.path.unlink()
        EventFile(root, 1_700_000_000).add(7, loss=7).add(8, loss=8).add(9, loss=9)
        expected = [*expected[:2], (7, 7), (8, 8), (9, 9)]
    else:
        run.converted.metrics_file.write_bytes(b"{}\n")
    annotations = run.converted.annotations_file
    annotations.write_text('{"tags": ["mine"], "note": "kept"}')
    assert run.refresh()
    assert read_values(run)["loss"] == expected
    assert run.make_row(0)["note"] == "kept"


def test_a_copy_with_the_same_bytes_is_followed(root: Path) -> None:
    file = EventFile(root).add(1, loss=1)
    run, _ = convert(root)
    before = run.converted.metrics_file.stat().st_ino
    other = EventFile(root.parent / "elsewhere").add(1, loss=1).add(2, loss=2)
    os.replace(other.path, file.path)  # as rsync does
    assert run.refresh()
    assert read_values(run)["loss"] == [(1, 1), (2, 2)]
    assert run.converted.metrics_file.stat().st_ino == before


def test_lines_of_a_killed_conversion_are_cut_off(root: Path) -> None:
    file = EventFile(root).add(1, loss=1)
    run, _ = convert(root)
    with run.converted.metrics_file.open("ab") as opened:
        opened.write(b'{"step": 2, "loss": 2.0}\n{"ste')
    file.add(2, loss=2)
    assert run.refresh()
    assert read_values(run)["loss"] == [(1, 1), (2, 2)]


def test_a_long_file_can_be_read_in_pieces(root: Path) -> None:
    file = EventFile(root)
    for step in range(3000):
        file.add(step, loss=step)
    run = find_one(root)
    rounds = 0
    while run.refresh(max_bytes=1):  # a batch at least
        rounds += 1
        assert rounds < 10
    assert rounds
    assert run.is_complete
    assert len(read_values(run)["loss"]) == 3000


def test_names_that_mean_something_else_here(root: Path) -> None:
    long = "x" * 5000
    values = {"step": 1.0, "time": 2.0, "epoch": 3.0, "": 4.0, long: 5.0}
    summary = Summary(value=[Summary.Value(tag=n, simple_value=v) for n, v in values.items()])
    picture = Summary.Value(tag="samples", image=Summary.Image(encoded_image_string=make_png(1)))
    jpeg = Summary.Value(tag="jpeg", image=Summary.Image(encoded_image_string=b"\xff\xd8\xff"))
    summary.value.extend([picture, jpeg])
    EventFile(root).add_event(Event(wall_time=5.0, step=9, summary=summary))
    run, _ = convert(root)
    [line] = read_metrics(run.converted.metrics_file)
    assert (line["step"], line["time"], line["epoch"]) == (9, 5.0, 3.0)
    assert (line["tensorboard/step"], line["tensorboard/time"], line["unnamed"]) == (1, 2, 4)
    assert "image" in line["tensorboard/samples"]
    assert max(len(name) for name in line) < 400
    assert run.facts.left_out == {"images that are not PNG": 1}


def test_every_layout_of_an_event_reads_the_same(root: Path) -> None:
    from echelon.board.foreign.tensorboard_events import parse_event, parse_scalar_event

    generator = random.Random(1)
    quick = 0
    for _ in range(3000):
        event = Event(wall_time=generator.uniform(0, 2e9))
        event.step = generator.choice([0, 1, 127, 128, 1 << 40, (1 << 63) - 1, -1, -(1 << 63)])
        tag = "x" * generator.choice([0, 1, 5, 100, 117, 118, 119, 120, 130])
        event.summary.value.add(tag=tag, simple_value=generator.uniform(-1, 1))
        record = event.SerializeToString()
        found = parse_event(record)
        [value], [expected] = found.values, event.summary.value
        assert (found.time, found.step) == (event.wall_time, event.step)
        assert (value.tag, value.value) == (expected.tag, expected.simple_value)
        scalar = parse_scalar_event(record)
        quick += scalar is not None
        assert scalar in (None, (found.time, found.step, tag.encode(), value.value))
    assert quick > 500


# --- damage ---


def make_png(seed: int) -> bytes:
    import numpy as np

    from echelon.train.media import encode_png

    return encode_png(np.random.default_rng(seed).integers(0, 255, (3, 4, 3), np.uint8))


def damage(data: bytes, generator: random.Random) -> bytes:
    """Return data with a few bits, bytes or pieces that are not as they were."""
    changed = bytearray(data)
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(len(changed))
        kind = generator.randrange(4)
        if kind == 0:
            changed[at] ^= 1 << generator.randrange(8)
        elif kind == 1:
            changed[at : at + generator.randint(1, 20)] = generator.randbytes(4)
        elif kind == 2:
            changed[at : at + 11] = b"\xff" * 11
        else:
            del changed[at : at + generator.randint(1, 40)]
        changed = changed or bytearray(b"\0")
    return bytes(changed)


def make_events() -> Sequence[bytes]:
    """Return records of every kind."""
    from tensorboard.plugins.histogram.summary_v2 import histogram_pb
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.plugins.text.summary_v2 import text_pb

    image = Summary.Image(width=4, height=3, encoded_image_string=make_png(2))
    summaries = [
        Summary(value=[Summary.Value(tag="loss", simple_value=1.5)]),
        Summary(value=[Summary.Value(tag="img", image=image)]),
        histogram_pb("h", [1.0, 2.0, 3.0], buckets=3),
        text_pb("t", "hello"),
        hparams_pb({"lr": 0.1, "name": "x"}),
    ]
    return [Event(step=i, summary=s).SerializeToString() for i, s in enumerate(summaries)]


def test_a_damaged_event_is_a_fault_and_never_an_error(root: Path) -> None:
    generator = random.Random(7)
    file = EventFile(root)
    events = make_events()
    for _ in range(1500):  # framed soundly, so that what is inside is looked at
        file.add_record(damage(generator.choice(events), generator))
    for depth in (10, 1000, 100_000):
        nested = b""
        for _ in range(min(depth, 3000)):
            nested = b"\x2a" + encode_varint(len(nested)) + nested
        file.add_record(nested)
    file.add_record(b"\x10" + b"\xff" * 10 + b"\x01")  # a number of eleven bytes
    file.add_record(b"\x2a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
    file.add(77, loss=4.0)
    run, values = convert(root)
    assert values["loss"][-1] == (77, 4.0)
    assert run.facts.faults["a record that is not an event"] > 100
    json.dumps(run.make_row(0))


def encode_varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


def test_a_damaged_event_file_is_never_an_error(root: Path) -> None:
    file = EventFile(root)
    for record in make_events():
        file.add_record(record)
    data = file.path.read_bytes()
    generator = random.Random(3)
    run = find_one(root)
    for _ in range(150):
        file.path.write_bytes(damage(data, generator))
        run.refresh()
        run.make_row(0)
    for junk in (b"", b"\0" * 5000, generator.randbytes(5000), b"\xff" * 3_000_000):
        file.path.write_bytes(junk)
        run.refresh()
        assert run.make_row(0)["step"] is None


# --- wandb ---

_WANDB_PROGRAM = """
import sys
import numpy as np
import wandb

folder, code = sys.argv[1], int(sys.argv[2])
settings = wandb.Settings(console="off", disable_git=True, x_disable_stats=True)
config = {"lr": 0.1, "model": {"depth": 3, "sizes": [1, 2]}, "name": "x"}
run = wandb.init(
    mode="offline", dir=folder, project="words", name="my run", notes="a note", tags=["a", "b"],
    config=config, settings=settings,
)
for step in range(200):
    run.log({"loss": 1 / (step + 1), "val/acc": step, "nested": {"x": step / 3}, "flag": step > 5})
run.log({"odd": float("nan")})
picture = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
run.log({
    "image": wandb.Image(picture), "images": [wandb.Image(picture), wandb.Image(picture)],
    "hist": wandb.Histogram(np_histogram=([1, 2], [0.0, 0.5, 1.0])), "said": "a sentence",
    "html": wandb.Html("<b>x</b>"), "list": [1, 2],
})
run.config.update({"late": 3})
if code == 7:
    run.define_metric("step_of_mine")
    run.define_metric("*", step_metric="step_of_mine")
    for step in range(3):
        run.log({"loss": 7.0, "step_of_mine": 1000 * step})
run.log({"long": "x" * 100_000})
run.finish(exit_code=code)
"""


@pytest.fixture(scope="module")
def wandb_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what wandb writes offline: `good`, which ended well, and `bad`."""
    folder = tmp_path_factory.mktemp("wandb")
    program = folder / "program.py"
    program.write_text(_WANDB_PROGRAM)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    environ |= {"HOME": str(folder), "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    environ |= {"WANDB_CACHE_DIR": str(folder / "c"), "WANDB_DATA_DIR": str(folder / "d")}
    children = []
    for name, code in (("good", 0), ("bad", 7)):
        (folder / name).mkdir()
        command = [sys.executable, str(program), str(folder / name), str(code)]
        children.append(subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL))
    assert [child.wait(300) for child in children] == [0, 0]
    return folder


@pytest.mark.slow
def test_what_wandb_writes_is_read_exactly(wandb_folders: Path) -> None:
    run, values = convert(wandb_folders / "good")
    assert run.name.startswith("wandb/offline-run-")
    steps = range(200)
    assert values["loss"] == [(step, 1 / (step + 1)) for step in steps]
    assert values["val/acc"] == [(step, step) for step in steps]
    assert values["nested.x"] == [(step, step / 3) for step in steps]
    assert values["flag"] == [(step, int(step > 5)) for step in steps]
    assert math.isnan(values["odd"][0][1])
    assert values["said"] == [(201, "a sentence")]
    assert values["hist"] == [(201, {"bins": [0, 0.5, 1], "counts": [1, 2]})]
    [original] = run.folder.glob("files/media/images/image_*.png")
    for name in ("image", "images", "images/1"):
        [(step, image)] = values[name]
        assert (run.converted.folder / image["image"]).read_bytes() == original.read_bytes()
        assert step == 201
    assert values["long"][0][1].startswith("xxx")
    row = run.make_row(1)
    assert row["settings"] == {
        **{"lr": 0.1, "model.depth": 3, "model.sizes": [1, 2], "name": "x", "late": 3}
    }
    assert (row["name"], row["note"], row["tags"]) == ("my run", "a note", ["a", "b"])
    assert (row["state"], row["experiment"], row["source"]) == ("finished", "words", "wandb")
    assert row["best_name"] == "val/acc"
    assert row["best"] == 199
    assert row["started"] <= read_metrics(run.converted.metrics_file)[0]["time"] <= row["updated"]
    assert not run.facts.faults
    assert {"html-file", "lists"} <= run.facts.left_out.keys()


@pytest.mark.slow
def test_an_exit_code_is_a_failure_and_a_chosen_step_is_the_step(wandb_folders: Path) -> None:
    run, values = convert(wandb_folders / "bad")
    row = run.make_row(1)
    assert (row["state"], row["why"]) == ("failed", "exit code 7")
    assert values["loss"][-3:] == [(0, 7.0), (1000, 7.0), (2000, 7.0)]
    assert row["step"] == 2000


@pytest.mark.slow
def test_wandb_records_agree_with_what_wandb_itself_reads(wandb_folders: Path) -> None:
    from wandb.proto import wandb_internal_pb2

    from echelon.board.foreign.wandb_files import read_log_batch
    from echelon.tracking.wandb_file import read_records

    [path] = (wandb_folders / "good").glob("wandb/offline-run-*/*.wandb")
    with path.open("rb") as file:
        batch = read_log_batch(file, 7, path.stat().st_size)
    assert batch.offset == path.stat().st_size
    parsed = [wandb_internal_pb2.Record.FromString(each) for each in batch.records]  # type: ignore[attr-defined]
    assert parsed == list(read_records(path))


@pytest.mark.slow
def test_a_growing_wandb_file_is_followed(wandb_folders: Path, root: Path) -> None:
    [path] = (wandb_folders / "good").glob("wandb/offline-run-*/*.wandb")
    data = path.read_bytes()
    assert len(data) > 3 * 32768, "records cross blocks"
    copy = root / "offline-run-1-x" / "run-x.wandb"
    copy.parent.mkdir()
    run = ForeignRun(root, copy.parent, "wandb")
    generator = random.Random(5)
    size = 0
    while size < len(data):
        size = min(len(data), size + generator.randint(1, 9000))
        copy.write_bytes(data[:size])
        run.refresh()
        assert not run.facts.faults
    whole, _ = convert(wandb_folders / "good")
    expected = whole.converted.metrics_file.read_text()
    names = ("image", "images", "images/1")  # their files are not beside the copy
    wanted = [
        {k: v for k, v in json.loads(line).items() if k not in names}
        for line in expected.splitlines()
    ]
    assert str(read_metrics(run.converted.metrics_file)) == str(wanted)
    assert run.state == "finished"


@pytest.mark.slow
def test_a_damaged_wandb_file_is_never_an_error(wandb_folders: Path, root: Path) -> None:
    [path] = (wandb_folders / "bad").glob("wandb/offline-run-*/*.wandb")
    data = path.read_bytes()
    copy = root / "run-1-x" / "run-x.wandb"
    copy.parent.mkdir()
    run = ForeignRun(root, copy.parent, "wandb")
    generator = random.Random(6)
    for size in range(0, 3000, 7):
        copy.write_bytes(data[:size])
        run.refresh()
    for _ in range(30):
        copy.write_bytes(data[:7] + damage(data[7:], generator))
        run.refresh()
        json.dumps(run.make_row(0))
    copy.write_bytes(b"something else entirely")
    run.refresh()
    assert "does not begin" in run.make_row(0)["why"]
    records = split_records(data)
    for _ in range(300):  # framed soundly
        changed = [damage(record, generator) for record in generator.sample(records, 5)]
        copy.write_bytes(frame_records(changed))
        run.refresh()
        run.make_row(0)


def split_records(data: bytes) -> list[bytes]:
    import io

    from echelon.board.foreign.wandb_files import read_log_batch

    return read_log_batch(io.BytesIO(data), 7, len(data)).records


def frame_records(records: Sequence[bytes]) -> bytes:
    """Return records as a file of wandb; they must fit into its first block."""
    import zlib

    out = b":W&B\xe1\xbe\x00"
    for record in records:
        data = record[:5000]
        out += struct.pack("<IHB", zlib.crc32(data, zlib.crc32(b"\x01")), len(data), 1) + data
    return out


def test_a_media_path_does_not_lead_out_of_the_run(root: Path) -> None:
    from wandb.proto import wandb_internal_pb2

    secret = root / "secret.png"
    secret.write_bytes(make_png(3))
    folder = root / "run-1-x"
    (folder / "files" / "media").mkdir(parents=True)
    (folder / "files" / "media" / "link.png").symlink_to(secret)
    (folder / "files" / "media" / "out").symlink_to(root)
    records = []
    paths = ["../../secret.png", "media/../../../secret.png", str(secret), "media/link.png"]
    for path in [*paths, "media/out/secret.png", "media/\0", "media/none.png"]:
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        value = {"_type": "image-file", "path": path, "format": "png"}
        record.history.item.add(key="image", value_json=json.dumps(value))
        records.append(record.SerializeToString())
    deep = '{"a":' * 900 + "1" + "}" * 900
    for text in (deep, "[" * 100_000, "1e999", '"\\ud800"', '{"\\ud800": 1}', "9" * 5000):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.history.item.add(key="x", value_json=text)
        record.run.config.update.add(key="y", value_json=text)
        records.append(record.SerializeToString())
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.config.update.add(key="y", value_json=text)
        records.append(record.SerializeToString())
    (folder / "run-x.wandb").write_bytes(frame_records(records))
    run, values = convert(root)
    assert "image" not in values
    assert run.facts.left_out["images whose file is gone"] == 7
    json.dumps(run.make_row(0)).encode()


@needs_root
def test_a_file_that_may_not_be_read_is_said_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with make_open_folder() as folder:
        path = EventFile(folder / "runs").add(1, loss=1).path
        EventFile(folder / "runs", 1_800_000_000).add(2, loss=2)
        path.chmod(0)
        (folder / "cache").mkdir()
        give_away(folder / "cache", NOBODY)
        monkeypatch.setenv("ECHELON_CACHE", str(folder / "cache"))
        run = find_one(folder / "runs")
        import echelon.board.foreign.tensorboard_events
        import echelon.runs.annotations  # noqa: F401

        with act_as(NOBODY):
            run.refresh()
            assert not run.refresh(), "nothing has changed"
            assert read_values(run)["loss"] == [(2, 2)]
            assert "permission denied" in run.make_row(0)["why"]
        path.chmod(0o644)
        with act_as(NOBODY):
            assert run.refresh()
            assert [step for step, _ in sorted(read_values(run)["loss"])] == [1, 2]
            assert not run.make_row(0)["why"]


@pytest.mark.slow
def test_two_boards_convert_a_run_once(root: Path) -> None:
    file = EventFile(root)
    for step in range(20_000):
        file.add(step, loss=step)
    program = (
        "import sys; from pathlib import Path;"
        "from echelon.board.foreign.foreign_runs import list_foreign_runs;"
        "[run] = list_foreign_runs(Path(sys.argv[1]))\n"
        "while run.refresh(1) or not run.is_complete: pass"
    )
    command = [sys.executable, "-c", program, str(root)]
    children = [subprocess.Popen(command) for _ in range(3)]
    assert [child.wait(120) for child in children] == [0, 0, 0]
    run = find_one(root)
    assert not run.refresh()
    assert read_values(run)["loss"] == [(step, step) for step in range(20_000)]


def test_the_page_hears_what_is_not_shown(root: Path) -> None:
    jpeg = Summary.Value(tag="jpeg", image=Summary.Image(encoded_image_string=b"\xff\xd8\xff"))
    EventFile(root).add(1, loss=1).add_event(Event(summary=Summary(value=[jpeg])))
    run, _ = convert(root)
    board = Board([root])
    board.index.update_foreign(0, [(run.make_row(0), str(run.converted.folder))])
    answer = ask(board, ROUTES, f"/api/run/{quote(run.make_id(0))}/foreign")
    assert answer.data["left_out"] == {"images that are not PNG": 1}
    assert (answer.data["folder"], answer.data["faults"]) == (str(root), {})
    assert ask(board, ROUTES, "/api/run/0:none/foreign").status == 404


# --- which there are ---


def test_runs_of_echelon_are_not_listed_again(root: Path) -> None:
    own = root / "own"
    own.mkdir()
    (own / "config.json").write_text('{\n  "run_format": 2,\n  "seed": 0\n}\n')
    EventFile(own / "tensorboard").add(1, loss=1)
    (own / "wandb" / "offline-run-1-x").mkdir(parents=True)
    (own / "wandb" / "offline-run-1-x" / "run-x.wandb").write_bytes(b"")
    lost = root / "lost-its-config"
    lost.mkdir()
    (lost / "status.json").write_text("{}")
    (lost / "metrics.jsonl").write_text("")
    EventFile(lost / "tensorboard").add(1, loss=1)
    model = root / "model-of-others"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["Bert"]}')
    EventFile(model / "runs" / "now").add(1, loss=1)
    assert [run.name for run in list_foreign_runs(root)] == ["model-of-others/runs/now"]


def test_event_files_of_echelon_in_a_folder_of_their_own_are_not_listed_again(root: Path) -> None:
    from tensorboard.plugins.text.summary_v2 import text_pb

    config = {"run": {"dir": str(root / "runs"), "name": "first"}, "seed": 1}
    lines = "\n".join(f"    {line}" for line in json.dumps(config, indent=2).splitlines())
    file = EventFile(root / "boards" / "first", 1_700_000_000_000_000_000, "host.12")
    file.add_start(1).add_event(Event(summary=text_pb("config", lines)))
    assert [run.name for run in list_foreign_runs(root)] == ["boards/first"], "a copy"
    (root / "runs" / "first").mkdir(parents=True)
    (root / "runs" / "first" / "config.json").write_text('{"run_format": 2}')
    assert not list_foreign_runs(root)


def test_the_search_is_bounded_and_follows_no_links(root: Path) -> None:
    deep = root
    for i in range(9):
        deep = deep / str(i)
        EventFile(deep).add(1, loss=1)
    (root / "loop").symlink_to(root)
    outside = root.parent / "outside"
    EventFile(outside).add(1, loss=1)
    (root / "link").symlink_to(outside)
    (root / "0" / "events.out.tfevents.1900000000.x").symlink_to(next(outside.iterdir()))
    EventFile(root / ".hidden").add(1, loss=1)
    os.mkfifo(root / "events.out.tfevents.1900000000.pipe")
    scan = scan_foreign_runs(root)
    assert [run.name.count("/") for run in scan.runs] == [0, 1, 2, 3, 4, 5]
    assert not scan.stopped
    few = scan_foreign_runs(root, max_folders=3)
    assert len(few.runs) == 2
    assert "more than 3 folders" in few.stopped
    scan.runs[0].refresh()
    assert read_values(scan.runs[0])["loss"] == [(1, 1)]


def test_a_run_is_running_while_its_files_grow(root: Path) -> None:
    file = EventFile(root).add(1, loss=1)
    run, _ = convert(root)
    assert run.state == "running"
    signature = run.signature
    old = time.time() - 3600
    os.utime(file.path, (old, old))
    assert run.signature != signature
    run.refresh()
    assert run.make_row(0)["state"] == "unknown"
    assert run.make_row(0)["updated"] == pytest.approx(old, abs=1)


def test_conversions_of_what_is_gone_are_removed_later(root: Path) -> None:
    file = EventFile(root / "a").add(1, loss=1)
    EventFile(root / "b").add(1, loss=1)
    runs = list_foreign_runs(root)
    for run in runs:
        run.refresh()
    file.path.unlink()
    file.path.parent.rmdir()
    assert remove_stale_conversions() == 0
    assert remove_stale_conversions(older_s=-1) == 1
    assert [run.converted.folder.exists() for run in runs] == [False, True]


def test_the_copy_is_for_nobody_else(root: Path) -> None:
    EventFile(root).add(1, loss=1)
    run, _ = convert(root)
    assert run.converted.folder.stat().st_mode & 0o077 == 0


def test_the_metric_that_is_shown_first() -> None:
    assert choose_best_metric(["loss", "val_loss", "lr"]) == "val_loss"
    assert choose_best_metric(["train/loss", "train/grad_norm"]) == "train/loss"
    assert choose_best_metric(["loss", "eval/accuracy", "eval/loss"]) == "eval/accuracy"
    assert choose_best_metric(["x"]) == "loss"


# --- checksums ---


def test_checksums_are_those_of_tensorboard() -> None:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c

    from echelon.board.foreign.crc32c import compute_checksums, compute_crc32c

    assert compute_crc32c(b"123456789") == 0xE3069283
    generator = random.Random(2)
    for size in (0, 1, 8, 4095, 4096, 4097, 50_000):
        data = generator.randbytes(size)
        assert compute_crc32c(data) == crc32c(data)
    records = [generator.randbytes(generator.choice([5, 50, 51, 5000])) for _ in range(200)]
    assert compute_checksums(records) == [crc32c(record) for record in records]

"""What runs cost, from histories and accounts as data."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from run_folders import STARTED, echelon, lines, make_run, write_phases

from echelon.runs.cost import (
    IDLE,
    LOST,
    OTHER,
    STEPPING,
    WAITING,
    RunCost,
    RunUse,
    TimeWindow,
    compute_costs,
)
from echelon.runs.run_folder import Run
from echelon.runs.slurm_accounts import JobAccount, JobStart, _parse_lines

NOW = STARTED + 100_000


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def cost(run: Run, window: TimeWindow | None = None, is_active: bool = False) -> RunCost:
    use = RunUse.read(run, is_active, NOW)
    return compute_costs([use], window or TimeWindow())[0]


def add_events(run: Run, *found: dict[str, Any]) -> None:
    with run.history_file.open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in found)


def test_every_second_of_a_gpu_is_spent_on_one_thing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "a", lines())
    # 20 steps, of which 10 are made again after a restart that takes 3 s
    write_phases(run, (STARTED, STARTED + 100, 0, 20), gpus=4, attempt=0)
    write_phases(run, (STARTED + 110, STARTED + 210, 10, 30), gpus=4, attempt=1)
    found = cost(run)
    assert found.gpu_s == {STEPPING: 600, WAITING: 12, LOST: 212, IDLE: 0, OTHER: 0}
    assert (found.gpu_hours, found.cpu_hours) == (824 / 3600, 0)
    assert sum(found.compute_shares().values()) == pytest.approx(1)


def test_a_queue_costs_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "a", lines())
    write_phases(run, (STARTED, STARTED + 10, 0, 20), gpus=1, job="7", requeues=0)
    write_phases(run, (STARTED + 110, STARTED + 120, 20, 40), gpus=1, job="7", requeues=1)
    found = cost(run)
    assert found.queue_s == 97  # the second start began 3 s before its first step
    assert found.gpu_s[STEPPING] == 20


def test_devices_of_lost_ranks_are_idle(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "a", lines())
    write_phases(run, (STARTED, None, 0, 20), gpus=2, processes=2)
    lost = {"number": 1, "processes": 1, "step": 10, "standstill_s": 0.0, "lost": [1]}
    end = {"step": 20, "samples": 640, "cause": "finished"}
    add_events(
        run,
        {"event": "round", "time": STARTED + 50, **lost},
        {"event": "stop", "time": STARTED + 100, **end},
    )
    found = cost(run).gpu_s
    assert (found[STEPPING], found[IDLE]) == (150, 50)


def test_cores_are_counted_where_there_is_no_gpu(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "a", lines())
    write_phases(run, (STARTED, STARTED + 97, 0, 20), gpus=0, cpus=8)
    found = cost(run)
    assert (found.gpu_hours, found.cpu_hours) == (0, 800 / 3600)
    assert not found.is_estimate


def test_older_histories_are_an_estimate_by_settings(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "a", lines())
    write_phases(run, (STARTED, STARTED + 97, 0, 20), nodes=2, processes=8)
    assert (cost(run).cpu_hours, cost(run).is_estimate) == (800 / 3600, True)
    config = json.loads(run.config_file.read_text())
    config["launch"]["gpus_per_node"] = 4
    run.config_file.write_text(json.dumps(config))
    assert (cost(run).gpu_hours, cost(run).is_estimate) == (800 / 3600, True)


def test_a_run_that_goes_on_costs_until_now(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "a", lines(), status={"state": "running"})
    write_phases(run, (NOW - 1000, None, 0, 20), gpus=1)
    assert sum(cost(run, is_active=True).gpu_s.values()) == 1003
    # killed: until its last line, which is older than this start
    assert sum(cost(run).gpu_s.values()) < 1003


def test_a_program_counts_no_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "a")
    add_events(
        run,
        {"event": "start", "time": STARTED, "nodes": 1, "processes": 1, "gpus": 1},
        {"event": "train", "time": STARTED + 1},
        {"event": "stop", "time": STARTED + 11, "cause": "finished"},
    )
    assert cost(run).gpu_s == {STEPPING: 0, WAITING: 1, LOST: 0, IDLE: 0, OTHER: 10}


def test_damaged_files_leave_gaps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "a")
    text = '{"event": "start", "time": 1, "gpus": "x", "nodes": []}\n\xff\n{"event": "stop"}\n[1]\n'
    run.history_file.write_bytes(text.encode("latin-1"))
    run.energy_folder.mkdir()
    for name, energy in {"a": "[]", "b": "{", "c": '{"started": 2, "joules": 7}'}.items():
        (run.energy_folder / f"{name}.json").write_text(energy)
    run.config_file.write_text("{")
    assert cost(run).energy_j is None
    assert not cost(run).has_cost


def test_a_window_takes_its_part(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "a", lines())
    write_phases(run, (STARTED, STARTED + 100, 0, 20), gpus=1)
    run.energy_folder.mkdir()
    energy = {"started": STARTED, "updated": STARTED + 100, "joules": {"a": 600, "b": 400}}
    (run.energy_folder / "h-1.json").write_text(json.dumps(energy))
    border = STARTED + 25
    before, after = cost(run, TimeWindow(0, border)), cost(run, TimeWindow(border))
    assert (before.gpu_s[WAITING], before.gpu_s[STEPPING], before.energy_j) == (3, 25, 250)
    assert (after.gpu_s[WAITING], after.gpu_s[STEPPING], after.energy_j) == (0, 75, 750)


# --- Slurm's accounts ---------------------------------------------------------------------------

SACCT = """\
7|7|1000|2000|8|billing=8,cpu=8,gres/gpu=4,node=1|0
7.batch|7.batch|1000|2000|8|cpu=8,gres/gpu=4|3600
7.0|7.0|1100|1990|8|cpu=8,gres/gpu=4|3000
7|7|3000|Unknown|8|cpu=8,gres/gpu=4|18446744073709551614
9_2|11|1000|1500|2|cpu=2,gres/gpu:a100=2|
12|12|Unknown|Unknown|0||
nonsense
"""


def test_accounts_are_read_with_requeues_arrays_and_energy() -> None:
    found: dict[str, JobAccount] = {}
    _parse_lines(SACCT.splitlines(), found)
    first, again = JobStart(1000, 2000, 4, 8, 3600.0), JobStart(3000, None, 4, 8, None)
    assert found["7"].starts == [first, again]
    assert found["9_2"].starts == found["11"].starts == [JobStart(1000, 1500, 2, 2, None)]
    assert "12" not in found
    assert found["7"].measure(1500, 3500, 4000) == (4 * 1000, 8 * 1000, 1800)


def test_what_a_job_held_beside_its_runs_is_theirs_as_they_used_it(tmp_path: Path) -> None:
    short, long = (make_run(tmp_path / "runs", name, lines()) for name in "ab")
    write_phases(short, (STARTED + 3, STARTED + 100, 0, 20), gpus=2, job="7")
    write_phases(long, (STARTED + 103, STARTED + 400, 0, 20), gpus=2, job="7")
    account = JobAccount([JobStart(STARTED, STARTED + 500, 2, 8, 5000.0)])
    uses = [RunUse.read(run, False, NOW) for run in (short, long)]
    first, second = compute_costs(uses, TimeWindow(), {"7": account})
    assert (first.gpu_s[STEPPING], first.gpu_s[WAITING], first.gpu_s[IDLE]) == (194, 6, 50)
    assert (second.gpu_hours, second.energy_j) == (750 / 3600, 3750)
    assert first.sources == {"slurm"}


def test_a_job_that_failed_before_its_run_began_has_held_its_nodes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "a")
    run.job_id_file.write_text("7\n")
    account = JobAccount([JobStart(STARTED, STARTED + 50, 4, 8, None)])
    (found,) = compute_costs([RunUse.read(run, False, NOW)], TimeWindow(), {"7": account})
    assert found.gpu_s[IDLE] == 200


# --- the command --------------------------------------------------------------------------------


def test_months_begin_where_the_reader_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An hour on both sides of midnight UTC, seen from UTC and from an hour east of it."""
    midnight = 1_772_323_200  # 2026-03-01T00:00Z
    run = make_run(tmp_path / "runs", "a", lines(start=midnight - 3600))
    write_phases(run, (midnight - 3600 + 3, midnight + 3600, 0, 20), gpus=1)
    try:
        for zone, hours in (("UTC", [1, 1]), ("XXX-1", [0, 2]), ("XXX+1", [2, 0])):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            code, out, _ = echelon(capsys, "cost", "--by", "month", "--json")
            rows = {row["month"]: row["gpu_hours"] for row in json.loads(out)["rows"]}
            assert code == 0
            assert [rows.get(m, 0) for m in ("2026-02", "2026-03")] == pytest.approx(hours)
            for month, expected in zip(("2026-02", "2026-03"), hours, strict=True):
                _, out, _ = echelon(capsys, "cost", "--month", month, "--json")
                assert json.loads(out)["total"]["gpu_hours"] == pytest.approx(expected)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_runs_are_added_up_by_sweep_and_by_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("lr-0", "lr-1", "other-1"):
        run = make_run(tmp_path / "runs", name, lines())
        write_phases(run, (STARTED, STARTED + 3597, 0, 20), gpus=2)
    (tmp_path / "runs" / "lr").mkdir()
    (tmp_path / "runs" / "lr" / "sweep.json").write_text("{}")
    owner = 4242  # who has no name here
    os.chown(tmp_path / "runs" / "other-1", owner, -1)
    (tmp_path / "echelon.yaml").write_text("cost:\n  gpu_hour_price: 2.50 EUR\n")
    code, out, _ = echelon(capsys, "cost", "--by", "sweep")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["lr", "other-1", "total"]
    assert "10.00 EUR" in out.splitlines()[1]
    _, out, _ = echelon(capsys, "cost", "--by", "user", "--json", "--price", "1")
    found = {row["user"]: (row["gpu_hours"], row["runs"]) for row in json.loads(out)["rows"]}
    assert set(found.values()) == {(4, 2), (2, 1)}
    assert found["4242"] == (2, 1)
    _, out, _ = echelon(capsys, "cost", "--user", "4242", "--json")
    assert [row["run"] for row in json.loads(out)["rows"]] == ["other-1"]
    _, out, _ = echelon(capsys, "cost", "--sweep", "lr", "--json")
    assert [row["run"] for row in json.loads(out)["rows"]] == ["lr-0", "lr-1"]


def test_show_has_a_line_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "runs", "a", lines())
    write_phases(run, (STARTED + 3, STARTED + 3600, 0, 40), gpus=8)
    run.energy_folder.mkdir()
    energy = {"started": STARTED, "updated": STARTED + 60, "joules": {"a": 7.2e6}}
    (run.energy_folder / "h-1.json").write_text(json.dumps(energy))
    _, out, _ = echelon(capsys, "show", "a")
    (line,) = [line for line in out.splitlines() if line.startswith("  cost ")]
    assert line.split(maxsplit=1)[1] == "8 GPU-hours, 99.9 % stepping, 0.1 % waiting, 2 kWh"
    _, out, _ = echelon(capsys, "show", "a", "--json")
    assert json.loads(out)["cost"]["gpu_hours"] == 8


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--month", "2026-13"], "is not a month"),
        (["--since", "yesterday"], "is not a time"),
        (["--since", "2026-03-02", "--until", "2026-03-01"], "no time is between"),
        (["--price", "much"], "is not a price"),
        (["--sweep", "none"], "none"),
        (["none"], "no run 'none'"),
    ],
)
def test_mistakes_are_named(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code, _, err = echelon(capsys, "cost", *words)
    except SystemExit as ended:  # of argparse
        code, err = int(ended.code or 0), capsys.readouterr().err
    assert code in (2, 3)
    assert says in err


def test_without_runs_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert echelon(capsys, "cost")[:2] == (
        0,
        "no run has cost anything, of those that were asked for\n",
    )


def test_gpus_that_a_cluster_does_not_account_for_are_those_that_the_run_saw(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path / "runs", "a", lines())
    write_phases(run, (STARTED + 3, STARTED + 100, 0, 20), gpus=2, job="7")
    account = JobAccount([JobStart(STARTED, STARTED + 110, 0, 16, None)])
    (found,) = compute_costs([RunUse.read(run, False, NOW)], TimeWindow(), {"7": account})
    assert (found.gpu_s[STEPPING], found.gpu_s[IDLE], found.cpu_hours) == (194, 20, 0)

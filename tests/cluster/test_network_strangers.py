"""Somebody else on the network of a job can neither join nor end it, nor find its key."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest
from command_line import FAULTY, START_S, CommandLine, curve
from command_runner import free_port, until, workers
from network_stranger import NetworkStranger
from node_worlds import PACE, let_run, wait_for_text

from echelon.errors import ExitCode
from echelon.world.network_key import KEY_VARIABLE, make_key

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

STEPS = 400
FILLED_BYTES = 200 << 20
KEYS = (make_key(), make_key())
WORLD = (
    FAULTY,
    "trainer.batch_size=8",
    "trainer.save.epochs=null",
    "trainer.evaluate.epochs=null",
    "trainer.log_steps=1",
    "launch.threads=1",
)


def test_a_run_goes_on_with_the_same_numbers_whatever_a_stranger_does(
    command_line: CommandLine,
) -> None:
    node_0 = command_line.cluster.nodes[0]
    port = free_port()
    steps = f"trainer.steps={STEPS}"
    words = ("train", "launch=env", "launch.procs=2", "run.name=a", *WORLD, steps, *PACE)
    world = command_line.env_world(*words, port=port, ECHELON_KEY=make_key())
    command_line.wait_for_step(5)
    agent = psutil.Process(command_line.agent(node_0))
    before = agent.memory_info().rss
    stranger = NetworkStranger(command_line.cluster.addresses[node_0], port)
    stranger.do_everything()
    assert agent.memory_info().rss - before < 30 << 20
    assert command_line.step() < STEPS, "it was over before the stranger was"
    # A rank that is lost is replaced all the same, with what the stranger has written beside it.
    os.kill(command_line.worker(node_0), signal.SIGKILL)
    wait_for_text(command_line, "replaced: 4 processes")
    done = [node.wait(START_S) for node in world]
    assert [each.code for each in done] == [ExitCode.OK] * 2, command_line.recent_output()
    assert "forged" not in done[0].err + done[1].err
    refused = [line for line in done[0].err.splitlines() if "refused a connection from" in line]
    assert 0 < len(refused) <= 10
    assert done[0].err.count("warning: ignored") <= 3 * 5, "three lines in every process"

    alone = ("train", "launch=local", "launch.procs=4", "run.name=b", *WORLD, steps)
    assert command_line.type(*alone).code == ExitCode.OK
    disturbed, undisturbed = (curve(command_line.run(name)) for name in ("a", "b"))
    assert [step for step, _ in disturbed] == [step for step, _ in undisturbed]
    assert [loss for _, loss in disturbed] == pytest.approx(
        [loss for _, loss in undisturbed], rel=1e-4
    )
    command_line.require_nothing_left()


@pytest.mark.parametrize("keys", [("", ""), (KEYS[0], KEYS[1]), (KEYS[0], ""), ("", KEYS[1])])
def test_both_sides_say_at_once_that_their_keys_differ(
    keys: tuple[str, str], command_line: CommandLine
) -> None:
    """Also where there is none, and the folder of the runs is not shared. Node 0 waits on, and
    trains with the node that is started as it should be."""
    node_0, node_1, _ = command_line.cluster.nodes
    variables = {"MASTER_ADDR": node_0, "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    words = ("train", "launch=env", "run.name=a", *WORLD, "trainer.steps=10")
    own = {KEY_VARIABLE: keys[0]} if keys[0] else {}
    first = command_line.start(*words, on=node_0, NODE_RANK="0", **variables, **own)
    there = () if any(keys) else (f"run.dir={command_line.folder / 'not shared'}",)
    variables["NODE_RANK"] = "1"
    wrong = {KEY_VARIABLE: keys[1]} if keys[1] else {}
    second = command_line.start(*words, *there, on=node_1, **variables, **wrong).wait(START_S)
    assert second.code == ExitCode.RENDEZVOUS, second.err
    assert node_1 in second.err
    assert KEY_VARIABLE in second.err
    assert not set(filter(None, keys)) & set(re.findall(r"[0-9a-f]{64}", second.err))
    refused = f"refused a connection from {command_line.cluster.addresses[node_1]}: it does not"
    assert first.read_output().count(refused) == 1, "it says so before it could time out"
    third = command_line.start(*words, on=node_1, **variables, **own).wait(START_S)
    done = first.wait(START_S)
    assert (done.code, third.code) == (ExitCode.OK, ExitCode.OK), done.err + third.err


def test_without_a_variable_the_key_is_in_a_private_file_until_the_end(
    command_line: CommandLine,
) -> None:
    node_0, port = command_line.cluster.nodes[0], free_port()
    steps = f"trainer.steps={STEPS}"
    words = ("train", "launch=env", "run.name=a", *WORLD, steps, *PACE)
    world = command_line.env_world(*words, port=port)
    command_line.wait_for_step(5)
    runs = command_line.run().folder.parent
    (file,) = runs.glob(".key-*")
    assert file.stat().st_mode & 0o777 == 0o600
    key = json.loads(file.read_text())["key"].encode()
    stranger = NetworkStranger(command_line.cluster.addresses[node_0], port)
    assert not any(key in value for value in stranger.read_everything())
    stranger.write_into_store()
    stranger.speak_to_agent()
    let_run(command_line)
    assert key.decode() not in command_line.output()
    done = [node.wait(START_S) for node in world]
    assert [each.code for each in done] == [ExitCode.OK] * 2, command_line.recent_output()
    assert [*runs.glob(".key-*")] == []
    command_line.require_nothing_left()


def test_a_key_that_can_be_guessed_is_refused(command_line: CommandLine) -> None:
    node_1 = command_line.cluster.nodes[1]
    variables = {"MASTER_ADDR": node_1, "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    variables |= {"NODE_RANK": "0", KEY_VARIABLE: "1234"}
    words = ("train", "launch=env", "run.name=a", *WORLD, "trainer.steps=10")
    short = command_line.start(*words, on=node_1, **variables).wait(START_S)
    assert short.code == ExitCode.USAGE
    assert "ECHELON_KEY has 4 characters, so it can be guessed" in short.err


def test_a_stranger_who_fills_the_store_makes_no_reader_allocate(
    command_line: CommandLine,
) -> None:
    """What he writes lies in the memory of node 0's agent until somebody looks at it: here the
    ranks that go on when one is lost."""
    node_0, node_1, _ = command_line.cluster.nodes
    port = free_port()
    steps = f"trainer.steps={STEPS}"
    words = ("train", "launch=env", "run.name=a", *WORLD, steps, *PACE)
    world = command_line.env_world(*words, port=port, ECHELON_KEY=make_key())
    command_line.wait_for_step(5)
    survivor = command_line.worker(node_1)
    before = _read_peak_bytes(survivor)
    stranger = NetworkStranger(command_line.cluster.addresses[node_0], port)
    stranger.fill_value(FILLED_BYTES)
    os.kill(command_line.worker(node_0), signal.SIGKILL)
    until(lambda: not stranger.is_filled(), START_S, "the deletion of what is too large")
    assert _read_peak_bytes(survivor) - before < FILLED_BYTES // 4
    wait_for_text(command_line, "replaced: 2 processes")
    done = [node.wait(START_S) for node in world]
    assert [each.code for each in done] == [ExitCode.OK] * 2, command_line.recent_output()
    command_line.require_nothing_left()


@pytest.mark.parametrize("launcher", ["local", "ssh", "slurm"])
def test_the_key_is_in_environments_alone(launcher: str, command_line: CommandLine) -> None:
    ssh = f"launch.ssh='ssh -F {command_line.cluster.ssh_config}'"
    hosts = f"launch.hosts=[{','.join(command_line.cluster.nodes[:2])}]"
    settings = {
        "local": ("launch.procs=2",),
        "ssh": (ssh, hosts),
        "slurm": ("launch.nodes=2", command_line.first_two_nodes),
    }[launcher]
    words = ("train", f"launch={launcher}", *settings, "run.name=a", *WORLD)
    plan = command_line.type(*words, "trainer.steps=60", "--dry-run")
    started = command_line.start(*words, "trainer.steps=1000000", "pause_s=0.02")
    command_line.wait_for_step(5)
    host = None if launcher == "local" else command_line.cluster.nodes[0]
    agent = started.process.pid if host is None else command_line.agent(host)
    key = _read_key_of(workers(agent)[0])
    assert not [p for p in psutil.process_iter() if key in " ".join(_get_words(p))]
    command_line.type("cancel", "a")
    until(lambda: command_line.left() == [], START_S, "its end")
    started.wait(START_S)
    assert key not in plan.out + plan.err + command_line.output()
    files = [path for path in command_line.folder.rglob("*") if path.is_file()]
    assert command_line.run().config_file in files
    assert [path for path in files if key.encode() in path.read_bytes()] == []


def _read_peak_bytes(pid: int) -> int:
    """Return the most memory that a process has had so far."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match
    return int(match[1]) << 10


def _get_words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _read_key_of(pid: int) -> str:
    """Return the key that a process has. It was set after its start, so the kernel does not show
    it among the variables; but root may read its memory."""
    found = b""
    with open(f"/proc/{pid}/mem", "rb") as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "rw-p" in line and not found:
                start, end = (int(text, 16) for text in line.split()[0].split("-"))
                with contextlib.suppress(OSError, ValueError, OverflowError):
                    memory.seek(start)
                    match = re.search(rb"ECHELON_KEY=([0-9a-f]{64})\0", memory.read(end - start))
                    found = match[1] if match else b""
    assert found, "it has no key"
    return found.decode()

"""Breaks something of a run on three hosts every minute, and compares its curve with that of a run
in peace.

The run has two processes on each host of the test cluster, by `launch=ssh` or as a job of Slurm's.
Faults are drawn at random: a rank is killed or stopped, a host is killed, its cable is cut, the
disk is full; by ssh the launcher is killed, by Slurm the controller is started again. A host comes
back after a while. The launcher is kept running as systemd or a loop of the shell would do it: the
same command is started again, and continues. The run must end well by itself, with every step once
and the numbers of the undisturbed run, and must leave no process behind.

By Slurm the disk is full only where `--faults` says so: Slurm queues a job again whose first host
was killed, and a job that begins on a full disk fails, which only a person can change.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import report
import slurm_cluster
from command_runner import children, workers
from curve_comparison import compare_curves
from slurm_cluster import ClusterSlot, TestCluster

from echelon.runs.history import read_history
from echelon.runs.run_folder import Run

EXPERIMENT = report.ROOT / "tests" / "helpers" / "faulty_experiment.py"
_PROCESSES = 6
_STEP_S = 0.2
_STANDSTILL_S = 120.0
_GONE_S = 30.0
_DISK_BYTES = 256 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--every-s", type=float, default=60.0, help="time between two faults")
    parser.add_argument("--launch", choices=("ssh", "slurm"), default="ssh")
    parser.add_argument("--faults", nargs="*", choices=FAULTS, help="all that --launch has")
    parser.add_argument("--silence-s", type=float, default=5.0, help="launch.silence_s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.faults = args.faults or [name for name in FAULTS if name not in _NOT_OF[args.launch]]
    epochs = max(4, int(args.minutes * 60 / _STEP_S / 10))
    slot = ClusterSlot()  # kept: it is free again for others as soon as nobody refers to it
    kind = slot.make_kind(accounting=False)
    was_up = slurm_cluster.is_up(kind)
    cluster = slurm_cluster.start(kind)
    try:
        with tempfile.TemporaryDirectory() as folder, _mount_disk(Path(folder)) as disk:
            result = _soak(cluster, disk, args, epochs)
    finally:
        if not was_up:  # a developer's is left running
            slurm_cluster.require(slurm_cluster.manage(kind, "down"))
    print(json.dumps(result, indent=2).replace("\\n", "\n"))
    if args.json:
        report.write(args.json, result)
    sys.exit(0 if result["bad"] == 0 and not result["orphans"] else 1)


def _soak(cluster: TestCluster, disk: Path, args: Any, epochs: int) -> dict[str, Any]:
    clean, disturbed = disk / "clean", disk / "disturbed"
    if _train(clean, [f"trainer.epochs={epochs}", "launch=inline"], cluster.env).wait():
        sys.exit("the undisturbed run failed:\n" + (clean / "output").read_text()[-2000:])
    launch = [f"launch={args.launch}", "launch.procs=2"]
    if args.launch == "ssh":
        launch += [f"launch.hosts=[{','.join(cluster.nodes)}]"]
        launch += [f"launch.ssh='ssh -F {cluster.ssh_config}'"]
    else:
        launch += [f"launch.nodes={len(cluster.nodes)}", "--wait"]
    pace = [f"trainer.epochs={epochs}", f"pause_s={_STEP_S}", "launch.hang_s=5"]
    # The faults are ours, not those of the machines they happen on.
    pace += [f"launch.silence_s={args.silence_s:g}", "launch.max_node_faults=0"]
    scene = _Scene(cluster, disk, [*launch, *pace], random.Random(args.seed))
    scene.wait_for_progress()
    counts = scene.break_until_over(args.faults, args.every_s)
    code = scene.run.wait()
    scene.heal_all()
    if code:
        print((disturbed / "output").read_text()[-4000:], file=sys.stderr)
    status = json.loads((disturbed / "runs" / "r" / "status.json").read_text())
    return compare_curves(clean, disturbed, code) | {
        "faults": dict(counts),
        "orphans": scene.list_orphans(),
        "accounting": status.get("accounting"),
    }


def _train(folder: Path, words: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    command = ["-m", "echelon", "train", f"experiment={EXPERIMENT}:experiment", "run.name=r"]
    command += ["trainer.batch_size=8", "trainer.log_steps=1", "track.progress=none"]
    command += ["trainer.keep_last=2", *words]
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *command], cwd=folder, env=env, stdout=output, stderr=output
        )


@contextmanager
def _mount_disk(folder: Path) -> Iterator[Path]:
    """A small file system of its own, which can be filled."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "soak", folder], check=True
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


class _Scene:
    """The run and what it runs on."""

    def __init__(
        self,
        cluster: TestCluster,
        disk: Path,
        words: list[str],
        chance: random.Random,
    ) -> None:
        self.cluster, self.disk, self.chance = cluster, disk, chance
        self._words = words
        self.run = _train(disk / "disturbed", words, cluster.env)
        self._history = Run(disk / "disturbed" / "runs" / "r")
        self._heal_later: list[tuple[float, Callable[[], None]]] = []

    def break_until_over(self, faults: list[str], every_s: float) -> Counter[str]:
        counts: Counter[str] = Counter()
        due_s = time.monotonic()
        while self.run.poll() is None:
            self._heal_due()
            if time.monotonic() >= due_s and not self._heal_later:
                self.wait_for_progress()
                if not self.is_whole():
                    continue  # a second node that is lost meanwhile may leave no majority
                name = self.chance.choice(faults)
                host = self.chance.choice(self.cluster.nodes)
                print(f"{time.strftime('%H:%M:%S')} {name} on {host}", file=sys.stderr, flush=True)
                if FAULTS[name](self, host):
                    counts[name] += 1
                    due_s = time.monotonic() + every_s
            time.sleep(0.2)
        return counts

    def kill_launcher(self) -> None:
        self.run.kill()
        self.run.wait()
        self.run = _train(self.disk / "disturbed", self._words, self.cluster.env)

    def wait_for_progress(self) -> None:
        """Wait until new lines of metrics are written; the run must not stand still."""
        metrics = self.disk / "disturbed" / "runs" / "r" / "metrics.jsonl"
        before, deadline = None, time.monotonic() + _STANDSTILL_S
        while self.run.poll() is None:
            self._heal_due()
            size = metrics.stat().st_size if metrics.exists() else None
            if size is not None and before is not None and size > before + 1000:
                return
            before = size if before is None else before
            if time.monotonic() > deadline:
                output = (self.disk / "disturbed" / "output").read_text()
                self.run.kill()
                sys.exit(f"the run stands still:\n{output[-4000:]}")
            time.sleep(0.1)

    def is_whole(self) -> bool:
        """Return whether all ranks take part."""
        rounds = read_history(self._history, is_running=True).phases[-1].rounds
        return not rounds or rounds[-1].processes == _PROCESSES

    def heal_after(self, seconds: float, heal: Callable[[], None]) -> None:
        self._heal_later.append((time.monotonic() + seconds, heal))

    def heal_all(self) -> None:
        for _, heal in self._heal_later:
            heal()
        self._heal_later.clear()

    def _heal_due(self) -> None:
        due = [each for each in self._heal_later if each[0] <= time.monotonic()]
        for each in due:
            each[1]()
            self._heal_later.remove(each)

    def pick_worker(self, host: str) -> int | None:
        agents = [p for p, words in self.cluster.processes(host).items() if "echelon" in words]
        # A worker is the child of a child of the agent, and has none itself.
        found = [w for agent in agents for w in workers(agent) if not children(w)]
        return self.chance.choice(found) if found else None

    def list_orphans(self) -> list[str]:
        """Return what is left of the run on any host."""
        deadline = time.monotonic() + _GONE_S
        while True:
            left = [
                f"{host}: {' '.join(words)}"
                for host in self.cluster.nodes
                for words in self.cluster.processes(host).values()
                if str(self.disk / "disturbed" / "runs" / "r") in words
            ]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.5)


# --- faults; each returns whether it could be done ---


def _signal_worker(number: signal.Signals) -> Callable[[_Scene, str], bool]:
    def send(scene: _Scene, host: str) -> bool:
        worker = scene.pick_worker(host)
        if worker is not None:
            os.kill(worker, number)
        return worker is not None

    return send


def _kill_node(scene: _Scene, host: str) -> bool:
    scene.cluster.kill_node(host)
    scene.heal_after(10.0, lambda: scene.cluster.start_node(host))
    return True


def _cut_cable(scene: _Scene, host: str) -> bool:
    scene.cluster.link(host, "down")
    scene.heal_after(20.0, lambda: scene.cluster.link(host, "up"))
    return True


def _fill_disk(scene: _Scene, host: str) -> bool:
    ballast = scene.disk / "ballast"
    with ballast.open("wb") as file:
        while True:
            try:
                file.write(bytes(1 << 20))
                file.flush()
            except OSError:
                break
    scene.heal_after(10.0, lambda: ballast.unlink(missing_ok=True))
    return True


def _kill_launcher(scene: _Scene, host: str) -> bool:
    scene.kill_launcher()
    return True


def _restart_controller(scene: _Scene, host: str) -> bool:
    scene.cluster.restart_controller()
    return True


FAULTS: dict[str, Callable[[_Scene, str], bool]] = {
    "kill-rank": _signal_worker(signal.SIGKILL),
    "stop-rank": _signal_worker(signal.SIGSTOP),
    "kill-node": _kill_node,
    "cut-cable": _cut_cable,
    "fill-disk": _fill_disk,
    "kill-launcher": _kill_launcher,
    "restart-controller": _restart_controller,
}
_NOT_OF = {"ssh": ("restart-controller",), "slurm": ("kill-launcher", "fill-disk")}


if __name__ == "__main__":
    main()

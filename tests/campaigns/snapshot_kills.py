"""Kill the writer of snapshots, and damage what it wrote, until one bad outcome shows or none.

    python tests/campaigns/snapshot_kills.py --kills 1000 --flips 1000 --json OUT

Four parts, each counting what went wrong; any count above 0 makes the exit code 1.

* ``random``: a child saves in a loop and is killed at a random moment.
* ``operations``: a child kills itself at the k-th operation on the file system, for every k of a
  save that writes, marks the best, replaces a damaged folder and prunes; a write is cut in half.
* ``syscalls``: the same with strace killing at the k-th system call (where strace works).
* ``flips``: a bit flipped or a file cut short; it must be found, and the one before be used.

torch is imported once; children are forks of this process, which has one thread.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import report
import torch

from echelon.snapshot.layout import find_best, list_snapshots
from echelon.snapshot.reader import find_newest
from echelon.snapshot.writer import SnapshotWriter

KEEP_LAST = 2
Count = Counter[str]


def state(step: int) -> dict[str, Any]:
    """Every tensor says which step it is of."""
    model = {f"layer{i}": torch.full((64, 64), float(step)) for i in range(4)}
    moments = {i: {"m": torch.full((64, 64), float(step)), "step": step} for i in range(4)}
    return {"model": model, "optimizer": {"state": moments}, "rng": torch.full((9,), step)}


def steps_in(tree: Any) -> Iterator[int]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from steps_in(value)
    else:
        values = torch.as_tensor(tree)
        yield from {int(values.min()), int(values.max())}


def save(writer: SnapshotWriter, step: int) -> None:
    writer.save(step, state(step), {"step": step}, is_best=step % 5 == 0)
    (saved,) = writer.wait()
    if saved.error:
        raise RuntimeError(saved.error)


def judge(root: Path, announced: int, count: Count) -> None:
    """Hold what a kill left against the promises."""
    snapshot, damaged = find_newest(root)
    count["damaged"] += len(damaged)
    count["unreadable"] += snapshot is None and announced >= 0
    if snapshot is None:
        return
    count["lost"] += snapshot.step < announced
    found = {step for part in snapshot.parts for step in steps_in(snapshot.load_part(part))}
    count["mixed"] += found | {snapshot.info["step"]} != {snapshot.step}
    kept = find_best(root)
    newest_best = announced - announced % 5
    count["best lost"] += announced >= 5 and (kept is None or int(kept.name[5:]) < newest_best)


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """A child that does the work, given a pipe to report on: (its id, our end)."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            work(writer)
        except BaseException as error:
            os.write(2, f"child: {error!r}\n".encode())
            os._exit(3)
        os._exit(0)
    os.close(writer)
    return child, reader


def said(reader: int) -> list[int]:
    with os.fdopen(reader) as text:
        return [int(line) for line in text.read().split("\n") if line]


# Random moments ------------------------------------------------------------------------------


def random_kills(folder: Path, kills: int, rng: random.Random) -> Count:
    root, count, announced = folder / "random", Count(), -1

    def save_for_ever(pipe: int) -> None:
        snapshot, _ = find_newest(root)
        step = snapshot.step if snapshot else -1
        writer = SnapshotWriter(root, KEEP_LAST)
        while True:
            step += 1
            save(writer, step)
            os.write(pipe, f"{step}\n".encode())

    for _ in range(kills):
        child, reader = forked(save_for_ever)
        time.sleep(rng.uniform(0.001, 0.04))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        count["child failed"] += not os.WIFSIGNALED(status)
        announced = max([announced, *said(reader)])
        judge(root, announced, count)
        count["kills"] += 1
    count["saves"] = announced + 1
    return count


# Every operation of a save -------------------------------------------------------------------

OPERATIONS = ("open", "write", "fsync", "close", "mkdir", "rename", "symlink", "unlink", "rmdir")


def template(folder: Path) -> Path:
    """Steps 1 to 3 are there, 4 too but damaged; the save of 5 has all there is to do."""
    root = folder / "template"
    writer = SnapshotWriter(root, keep_last=9)
    for step in range(1, 6):
        save(writer, step)
    shutil.rmtree(root / "step-000000004")
    os.truncate(root / "step-000000005" / "model.pt", 100)
    (root / "best").unlink()
    (root / "best").symlink_to("step-000000001")
    return root


def kill_at_operation(
    k: int,
    operations: Sequence[str] = OPERATIONS,
    is_counted: Callable[[], bool] = lambda: True,
) -> None:
    """Make this process kill itself at its k-th operation from now, of those that are counted."""
    left = [k]

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            left[0] -= is_counted()
            if left[0] == 0:
                if name == "write":
                    call(args[0], memoryview(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return run

    for name in operations:
        setattr(os, name, counted(name, getattr(os, name)))


def operation_kills(folder: Path, most: int) -> Count:
    count, source = Count(), template(folder)
    for k in range(1, most + 1):
        root = fresh(source, folder / "operations")

        def once(pipe: int, root: Path = root, k: int = k) -> None:
            writer = SnapshotWriter(root, KEEP_LAST)
            kill_at_operation(k)
            save(writer, 5)

        child, reader = forked(once)
        _, status = os.waitpid(child, 0)
        os.close(reader)
        judge_save(root, count)
        if not os.WIFSIGNALED(status):
            count["child failed"] += os.WEXITSTATUS(status) != 0
            count["complete"] = 1
            break
        count["kills"] += 1
    return count


def judge_save(root: Path, count: Count) -> None:
    """Step 3 stood before; after the kill it is 3 or 5, and the next writer goes on."""
    snapshot, damaged = find_newest(root)
    count["damaged"] += any(d.folder.name != "step-000000005" for d in damaged)
    count["lost"] += snapshot is None or snapshot.step not in (3, 5)
    if snapshot is not None:
        found = {step for part in snapshot.parts for step in steps_in(snapshot.load_part(part))}
        count["mixed"] += found != {snapshot.step}
    writer = SnapshotWriter(root, KEEP_LAST)
    count["leftovers"] += any(name.startswith(".") for name in os.listdir(root))
    save(writer, 6)
    after, damaged = find_newest(root)
    count["stuck"] += after is None or after.step != 6 or bool(damaged)
    if snapshot is not None and snapshot.step == 5:
        count["best lost"] += find_best(root) != root / "step-000000005"
    count["too many"] += len(list_snapshots(root)) > KEEP_LAST + 1


def fresh(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)
    return target


# Every system call of a save -----------------------------------------------------------------


def strace_works() -> bool:
    if not shutil.which("strace"):
        return False
    tried = subprocess.run(["strace", "-qq", "-o", os.devnull, "true"], capture_output=True)
    return tried.returncode == 0


def syscall_kills(folder: Path, most: int) -> Count:
    """Counted in the writing thread: strace counts for each thread by itself."""
    count, source = Count(), folder / "template"
    for k in range(1, most + 1):
        root = fresh(source, folder / "syscalls")
        status = one_syscall_kill(root, k)
        judge_save(root, count)
        if not os.WIFSIGNALED(status):
            count["child failed"] += os.WEXITSTATUS(status) != 0
            count["complete"] = 1
            break
        count["kills"] += 1
    return count


def one_syscall_kill(root: Path, k: int) -> int:
    gate, opened = os.pipe()

    def once(pipe: int) -> None:
        writer = SnapshotWriter(root, KEEP_LAST)
        os.write(pipe, b"1\n")
        os.read(gate, 1)
        save(writer, 5)

    child, reader = forked(once)
    os.read(reader, 2)
    inject = f"inject=%file,%desc:signal=KILL:when={k}"
    command = ["strace", "-f", "-e", "trace=%file,%desc", "-e", inject, "-o", os.devnull]
    tracer = subprocess.Popen([*command, "-p", str(child)], stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    tracer.stderr.readline()  # "Process N attached"
    os.write(opened, b"x")
    _, status = os.waitpid(child, 0)
    tracer.communicate()
    for end in (gate, opened, reader):
        os.close(end)
    return status


# Damage --------------------------------------------------------------------------------------


def flips(folder: Path, number: int, rng: random.Random) -> Count:
    root, count = folder / "flips", Count()
    writer = SnapshotWriter(root, keep_last=9)
    for step in (1, 2):
        save(writer, step)
    files = sorted((root / "step-000000002").iterdir())
    for _ in range(number):
        path = rng.choice(files)
        whole = path.read_bytes()
        path.write_bytes(damage(whole, rng))
        snapshot, damaged = find_newest(root)
        count["not found"] += snapshot is None or snapshot.step != 1
        count["not said"] += [d.folder for d in damaged] != [path.parent]
        path.write_bytes(whole)
        count["damages"] += 1
    snapshot, damaged = find_newest(root)
    count["found in a whole one"] += snapshot is None or snapshot.step != 2 or bool(damaged)
    return count


def damage(whole: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(whole))
    if rng.random() < 0.25:
        return whole[:at]
    changed = bytearray(whole)
    changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed)


# ---------------------------------------------------------------------------------------------

HARMLESS = {"kills", "saves", "damages", "complete"}


def campaign(
    folder: Path, kills: int, flip_count: int, most_calls: int = 1000, seed: int = 0
) -> dict[str, dict[str, int]]:
    torch.set_num_threads(1)
    rng = random.Random(seed)
    found = {
        "random": random_kills(folder, kills, rng),
        "operations": operation_kills(folder, most_calls),
        "flips": flips(folder, flip_count, rng),
    }
    if strace_works():
        found["syscalls"] = syscall_kills(folder, most_calls)
    return {part: dict(count) for part, count in found.items()}


def bad(found: dict[str, dict[str, int]]) -> int:
    return sum(
        number for count in found.values() for name, number in count.items() if name not in HARMLESS
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="kill the snapshot writer, damage snapshots")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--most-calls", type=int, default=1000, help="a sample, if below ~250")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="the file system to try")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="echelon-kills-", dir=options.folder))
    try:
        found = campaign(folder, options.kills, options.flips, options.most_calls, options.seed)
    finally:
        shutil.rmtree(folder)
    for part, count in found.items():
        print(f"{part:12} " + ", ".join(f"{name} {n}" for name, n in count.items()))
    print(f"{'bad':12} {bad(found)}")
    if options.json:
        report.write(options.json, {"found": found})
    parts = {"operations", "syscalls"} & found.keys()
    complete = all(found[part].get("complete") for part in parts)
    return 0 if bad(found) == 0 and complete else 1


if __name__ == "__main__":
    sys.exit(main())

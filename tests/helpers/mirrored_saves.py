"""A program that saves snapshots for ever and mirrors them, until it is killed.

    python mirrored_saves.py FOLDER URL

It goes on as a training does, and prints every step that it has seen in the mirror.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from echelon.snapshot.mirror import MirrorProcess, SnapshotMirror
from echelon.snapshot.reader import find_newest
from echelon.snapshot.writer import SnapshotWriter

KEEP_LAST = 2


def make_state(step: int) -> dict[str, Any]:
    """Every tensor says which step it is of."""
    model = {f"layer{i}": torch.full((64, 64), float(step)) for i in range(4)}
    return {"model": model, "rng": torch.full((9,), step)}


def main(folder: Path, url: str) -> None:
    root, owner_file = folder / "snapshots", str(folder / "owner.json")
    newest, _ = find_newest(root)
    process = MirrorProcess()
    process.ask(
        "fetch newer",
        url,
        owner_file=owner_file,
        snapshots=str(root),
        newest_step=newest.step if newest else None,
        is_adopted=newest is None,
        is_fetched=True,
    )
    owner = process.ask("take", url, owner_file=owner_file)["owner"]
    newest, _ = find_newest(root)
    step = newest.step if newest else 0
    writer = SnapshotWriter(root, KEEP_LAST, resumed_step=step)
    mirror = SnapshotMirror(process, url, owner, KEEP_LAST)
    writer.mirror_to(mirror)
    said = None
    while True:
        step += 1
        writer.save(step, make_state(step), {"step": step}, is_best=step % 5 == 0)
        for saved in writer.wait():
            assert saved.error is None, saved.error
        if mirror.mirrored_step != said:
            said = mirror.mirrored_step
            print(said, flush=True)
        time.sleep(0.01)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

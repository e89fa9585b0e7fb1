"""Snapshots of a state on an NVIDIA GPU: the training may change it at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.snapshot.reader import find_newest
from echelon.snapshot.writer import SnapshotWriter

pytestmark = pytest.mark.gpu

SLEEP_CYCLES = 2_000_000_000
"""Some second, in which the stream of the training is busy."""


def make_state() -> dict[str, Any]:
    """Storages of which a copy needs several chunks, and what is not a plain tensor."""
    torch.manual_seed(1)
    device = torch.device("cuda", 0)
    whole = torch.randn(6, 50, device=device)
    lone = torch.randn(1000, device=device)
    model = {f"w{i}": torch.randn(12_000_000 + i, device=device) for i in range(7)}
    model |= {"whole": whole, "turned": whole.t(), "slice": lone[7:90], "every": lone.clone()[::2]}
    model |= {"half": lone.bfloat16(), "flags": lone > 0, "none": torch.empty(0, 3, device=device)}
    number = torch.tensor(3.5, device=device)
    return {"model": model, "optimizer": {"step": number, "here": torch.arange(9), "lr": 0.1}}


def copy_to_host(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.cpu().clone()
    return {k: copy_to_host(v) for k, v in tree.items()} if isinstance(tree, dict) else tree


def require_equal(found: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            require_equal(found[key], wanted[key])
    elif isinstance(wanted, torch.Tensor):
        assert found.device.type == "cpu"
        assert torch.equal(found, wanted)
    else:
        assert found == wanted


def save_and_change(root: Path, waits: bool) -> None:
    """Save twice, and change everything right after each."""
    state = make_state()
    stream = torch.cuda.current_stream()
    writer = SnapshotWriter(root, 2)
    for step in (1, 2):
        wanted = copy_to_host(state)
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        writer.save(step, state, {"step": step})
        assert stream.query() is waits
        for tensor in state["model"].values():
            tensor.logical_not_() if tensor.dtype == torch.bool else tensor.add_(1)
        state["optimizer"]["step"].add_(1)
        state["optimizer"]["here"].add_(1)
        [saved] = writer.wait()
        assert saved.error is None
        snapshot, damaged = find_newest(root)
        assert snapshot is not None
        assert not damaged
        assert snapshot.step == step
        require_equal({part: snapshot.load_part(part) for part in wanted}, wanted)
    writer.close()


def test_a_snapshot_is_the_state_at_its_step_and_waits_for_nothing(tmp_path: Path) -> None:
    before = torch.cuda.memory_allocated()
    save_and_change(tmp_path, waits=False)
    assert torch.cuda.memory_allocated() == before


def test_without_room_on_the_gpu_it_waits_for_the_copy(tmp_path: Path) -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    make_state()  # what it needs is cached, and there is no more
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        save_and_change(tmp_path, waits=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)

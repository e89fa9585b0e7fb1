"""Measure beside the peers, and write down what came out.

    python benchmarks/run.py [NAME …]       all that this machine can, or some of them
    python benchmarks/run.py --gpu          those for a machine with an NVIDIA GPU
    python benchmarks/run.py --pictures     draw again what is in results/

Every benchmark runs in a process of its own, one after the other, and leaves results/NAME.json and
results/NAME.png; README.md is written from all results that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import (
    HERE,
    Figure,
    Result,
    compute_ratios,
    describe_machine,
    make_figure,
    reached_target,
    read_versions,
)
from pictures import draw

RESULTS = HERE / "results"
TITLES = {
    "steps": "What a training step costs",
    "own_loops": "What a session costs in a loop of one's own",
    "startup": "From the command to the first step, and memory",
    "restart": "From a killed worker to the next step",
    "survival_cost": "What being ready for a lost rank costs",
    "peer_copies": "What copies of the state in the memory of other ranks cost",
    "many_agents": "From a lost agent to the new group, with thousands of agents",
    "cli": "What a command that needs no torch costs",
    "order": "Starting and drawing an epoch",
    "shuffle_quality": "How well data in files is shuffled",
    "data_files": "Samples from files, on one core",
    "indexing": "Finding the samples of tar shards",
    "object_store": "An epoch from an object store",
    "snapshots": "Saving and reading back 600 MB",
    "reading": "Preparing 20 million ratings",
    "feeding": "Feeding a recommender",
    "loading": "Loading samples with processes",
    "recommender": "Training a recommender",
    "environments": "Building an environment",
    "on_slurm": "On a Slurm cluster of several hosts",
    "submitting": "From typing to a job in the queue",
    "login_submitting": "From Enter on a laptop to a job in the queue",
    "sweeping": "What a sweep costs, and what early stopping saves",
    "large_runs": "Looking at what has become large",
    "board": "The board in a browser",
    "gpus": "One look at 8 GPUs with 100 processes",
    "gpu": "On one NVIDIA GPU",
    "gpu_own_steps": "A step of one's own on one NVIDIA GPU",
    "gpu_recommender": "A large recommender on one NVIDIA GPU",
    "gpu_feeding": "A training on one NVIDIA GPU, fed from tar shards",
    "gpu_models": "Models of the middle size on one NVIDIA GPU",
    "gpu_models_compiled": "The same, compiled",
    "gpu_snapshots": "Saving a state of 16 GB on one NVIDIA GPU",
    "transformer": "A transformer on one NVIDIA GPU",
}
NEED_GPU = (
    *("gpu", "gpu_own_steps", "gpu_recommender", "gpu_feeding"),
    *("gpu_models", "gpu_models_compiled", "gpu_snapshots", "transformer"),
)
NEED_CLUSTER = ("on_slurm", "submitting", "login_submitting")
HAVE_CLUSTER = os.geteuid() == 0 or "SLURM_CONF" in os.environ
ON_CPU = [n for n in TITLES if n not in NEED_GPU and (n not in NEED_CLUSTER or HAVE_CLUSTER)]


def main() -> None:
    parser = argparse.ArgumentParser(description="measure beside the peers")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ON_CPU))
    parser.add_argument("--gpu", action="store_true", help="only what needs a GPU")
    parser.add_argument("--pictures", action="store_true", help="draw what was measured before")
    given = parser.parse_args()
    unknown = set(given.names) - TITLES.keys()
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(TITLES)}")
    RESULTS.mkdir(exist_ok=True)
    names = [] if given.pictures else given.names or (NEED_GPU if given.gpu else ON_CPU)
    for name in names:
        print(f"{name}: {TITLES[name].lower()} …", file=sys.stderr, flush=True)
        result = measure_in_child(name)
        write(name, result)
        show(result["figures"])
    for name in names or list_stored_results():
        draw(TITLES[name], load(name), RESULTS / f"{name}.png")
    (HERE / "README.md").write_text(readme())


# --- measuring ----------------------------------------------------------------------------------


def measure_in_child(name: str) -> Result:
    """By a child: what one benchmark imports and allocates is not there for the next."""
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        answer = Path(folder) / "answer.json"
        code = (
            f"import json, {name}; open({str(answer)!r}, 'w').write(json.dumps({name}.measure()))"
        )
        subprocess.run([sys.executable, "-c", code], cwd=HERE, check=True)
        result: Result = json.loads(answer.read_text())
    return FIGURES_OF[name](result) if name in FIGURES_OF else result


def write(name: str, result: Result) -> None:
    flag = "--gpu" if name in NEED_GPU else name
    told = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": f"python benchmarks/run.py {flag}",
        "machine": describe_machine(),
        "versions": read_versions(),
        **result,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")


def order_figures(result: Result) -> Result:
    [start] = [r for r in result["start"] if r["name"] == "echelon" and r["size"] == 10**9]
    milliseconds = [1e3 * s for s in start["seconds"]["values"]]
    rows = [make_figure("starting an epoch over 10⁹ samples at 8 ranks", milliseconds, 1.0, "ms")]
    if start["megabytes"] is not None:
        rows.append(make_figure("memory for that", [max(0.0, start["megabytes"])], 1.0, "MB"))
    torch_starts = [r for r in result["start"] if r["name"] == "DistributedSampler"]
    largest = max(torch_starts, key=lambda r: r["size"])
    taken = [1e3 * s for s in largest["seconds"]["values"]]
    rows.append(
        make_figure(f"DistributedSampler over {largest['size']:,} samples", taken, unit="ms")
    )
    rows += [draw_figure(result["draw"], kind) for kind in ("ints", "lists")]
    return {"config": {"world": 8}, "figures": rows, **result}


def draw_figure(draws: list[dict[str, Any]], kind: str) -> Figure:
    """Of all sizes, worlds and batch sizes the one that is worst for us."""
    per_setting: dict[tuple[int, int, int], dict[str, list[float]]] = {}
    for row in draws:
        setting = per_setting.setdefault((row["size"], row["world"], row["batch"]), {})
        setting[row["name"]] = row["ns"]["values"]
    rows = [
        make_figure(
            f"drawing {kind}, × DistributedSampler, the worst of {len(per_setting)} settings",
            compute_ratios(values[f"echelon, {kind}"], values[f"DistributedSampler, {kind}"]),
            1.0,
        )
        for values in per_setting.values()
    ]
    return max(rows, key=lambda row: float(row["median"]))


def snapshot_figures(result: Result) -> Result:
    named = {
        "loop blocked by a 600 MB save, × torch.save": ("save_blocks / torch.save", 0.1),
        "reading it back, verified, × torch.load": ("verify_and_load / torch.load", 0.3),
        "until it is flushed to disk, × torch.save, which flushes nothing": (
            "until_on_disk / torch.save (which flushes nothing)",
            None,
        ),
        "reading it back in a process that did before, × torch.load": (
            "warm verify_and_load / torch.load",
            None,
        ),
    }
    rows = [make_figure(n, result[key]["values"], at_most) for n, (key, at_most) in named.items()]
    return {"figures": rows, **result}


FIGURES_OF = {"order": order_figures, "snapshots": snapshot_figures}


# --- telling ------------------------------------------------------------------------------------


def show(rows: Sequence[Figure]) -> None:
    for row in rows:
        print(f"  {row['what']:<76}{format_figure(row):<26}{verdict(row)}", file=sys.stderr)


def format_figure(row: Figure) -> str:
    unit = "" if row["unit"] == "×" else f" {row['unit']}"
    return f"{row['median']:.3g}{unit} [{row['min']:.3g}–{row['max']:.3g}]"


def verdict(row: Figure) -> str:
    return {True: "yes", False: "**no**", None: ""}[reached_target(row)]


def list_stored_results() -> list[str]:
    return [name for name in TITLES if (RESULTS / f"{name}.json").exists()]


def load(name: str) -> Result:
    result: Result = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def readme() -> str:
    results = {name: load(name) for name in list_stored_results()}
    parts = [
        "# Benchmarks",
        "Written by `python benchmarks/run.py` (`make bench`, `make bench-gpu`) from `results/`, "
        "where every single value is kept. Figures are ratios within one round of runs that take "
        "turns on the same machine: the median over the rounds, and the least and the most. How "
        "each contestant is set up is said at the top of the file of the same name.",
        "## What was to be reached",
        goals(results),
    ]
    for name, result in results.items():
        parts += section(name, result)
    return "\n\n".join(parts) + "\n"


def goals(results: dict[str, Result]) -> str:
    lines = ["| what | at most | measured, median [min–max] | reached |", "|---|---|---|---|"]
    for result in results.values():
        for row in result["figures"]:
            if row["at_most"] is not None:
                unit = "" if row["unit"] == "×" else f" {row['unit']}"
                cells = (row["what"], f"{row['at_most']:g}{unit}", format_figure(row), verdict(row))
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def section(name: str, result: Result) -> list[str]:
    where = result["machine"]
    device = result["config"].get("device") if name in NEED_GPU else None
    on = f"{device}, {where['cpu']}" if device else where["cpu"]
    software = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    lines = ["| what | measured, median [min–max] |", "|---|---|"]
    lines += [f"| {row['what']} | {format_figure(row)} |" for row in result["figures"]]
    return [
        f"## {TITLES[name]}",
        f"{result['date']} · `{result['command']}` · {on}, {where['cores']} cores, "
        f"{where['memory_gb']:g} GB · {software}",
        "\n".join(lines),
        *([note] if (note := result.get("config", {}).get("note")) else []),
        *([f"![{TITLES[name]}](results/{name}.png)"] if (RESULTS / f"{name}.png").exists() else []),
    ]


if __name__ == "__main__":
    main()

"""The rooms of the package: a lower one never imports a higher one, and torch stays in its own.

Imports under `if TYPE_CHECKING:` cost nothing and may look up; those inside a function may not.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import echelon
from echelon.config.schema import LAUNCHERS

SOURCE = Path(echelon.__file__).parent

LEVELS = {
    "errors": 0,
    "utils": 0,
    "snapshot.layout": 0,
    "object_store": 1,
    "hosts": 1,
    "config": 1,
    "world": 1,
    "runs": 1,
    "gpus": 1,
    "kernels": 1,
    "data": 2,
    "optim": 2,
    "tracking": 2,
    "notify": 2,
    "launch": 2,
    "environments": 2,
    "experiment": 3,
    "parallel": 4,
    "cudagraph": 5,
    "snapshot": 5,
    "monitoring": 6,
    "train": 7,
    "jobs": 7,
    "views": 7,
    "doctor": 8,
    "preflight": 8,
    "sweep": 8,
    "board": 8,
    "cluster_info": 8,
    "submission": 8,
    "login": 8,
    "ssh_setup": 9,
    "interactive": 9,
    "completion": 8,
    "entrypoint": 9,
    "python_api": 9,
    "script_api": 9,
    "commands": 9,
    "cli": 9,
    "recipes": 10,
}
"""Recipes are on top: the command line loads theirs by name, and nothing else knows them."""
BESIDE = {
    ("runs", "config"),
    ("gpus", "hosts"),
    ("config", "world"),
    ("config", "object_store"),
    ("runs", "object_store"),
    ("launch", "tracking"),
    ("launch", "notify"),
    ("notify", "tracking"),
    ("preflight", "doctor"),
    ("submission", "sweep"),
    ("login", "submission"),
    ("login", "sweep"),
    ("login", "preflight"),
    ("commands", "entrypoint"),
    ("commands", "ssh_setup"),
    ("commands", "interactive"),
    ("interactive", "ssh_setup"),
    ("commands", "cli"),
    ("entrypoint", "cli"),
    ("python_api", "entrypoint"),
    ("script_api", "entrypoint"),
}
"""Rooms of one level that may import each other."""
OUTSIDE = {"echelon", "__main__"}
"""The package's own front door names what it offers, and opens it when asked."""
LIKE_OUTSIDE = {"conf"}
"""Holds yaml files."""

TORCH_ROOMS = {
    *("data", "kernels", "optim", "experiment", "parallel", "cudagraph", "snapshot"),
    *("monitoring", "train", "recipes"),
}
TORCH_FILES = {
    "launch/node/agent.py",
    "launch/node/rank_replacement.py",
    "launch/node/rendezvous.py",
    "doctor/torch_facts.py",
    "preflight/all_reduce.py",
}
NUMPY_FOLDERS = ("board/curves/",)
"""Whose modules are imported when a curve is asked for, and use numpy without torch."""

ASKING_FOR_A_LAUNCHER = {
    "config/compose.py": "the defaults of a file are chosen for the launcher",
    "config/defaults_files.py": "the same",
    "config/validate.py": "each kind has settings of its own",
    "launch/containers/command.py": "in a job, srun has a plugin that starts images of registries",
    "launch/registry.py": "from the kind to the launcher",
    "runs/create.py": "a run says where it will be before its launcher has started it",
    "runs/status.py": "only Slurm knows whether a recorded job is still queued",
    "jobs/stacks.py": "hosts of ssh may have a folder of their own, a run in one process no agent",
    "interactive/allocation.py": "only Slurm allocates",
    "jobs/cancel.py": "a job is cancelled by scancel, a process by a signal",
    "jobs/scale.py": "nobody starts further nodes but ssh and Slurm; of a job they are given back",
    "python_api.py": "a job is queued, or its agent is started in the background here",
    "submission/enqueue.py": "sbatch is asked before anything is copied",
    "submission/launch_modes.py": "a command's GPUs are counted from what the job asks of Slurm",
    "submission/plan.py": "commands become jobs of Slurm's queue, or run one by one here",
    "submission/submit_commands.py": "the same",
    "submission/wandb_agent.py": "inside a job a trial is a step of srun",
    "sweep/plan.py": "the launcher is kept with the sweep",
    "sweep/run_sweep.py": "on Slurm the workers are an array of jobs",
    "sweep/worker.py": "in a job a trial is a step of srun",
    "sweep/wandb/engine.py": "a trial in Slurm's queue is cancelled by scancel",
}
"""The files that may ask which launcher it is, and why. All others ask the launcher: what they need
is a value or a method of `launch.launcher.Launcher`, so that a new launcher is one file."""


class Import(NamedTuple):
    file: str
    """Relative to the package."""
    room: str
    line: int
    module: str
    """As imported, e.g. echelon.config.schema."""
    at_top: bool
    """Done when the file is imported, as opposed to when a function runs."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


@cache
def imports() -> list[Import]:
    return [found for path in sorted(SOURCE.rglob("*.py")) for found in _imports_of(path)]


def _imports_of(path: Path) -> Iterator[Import]:
    file = path.relative_to(SOURCE)
    room = _room([*file.parts[:-1], file.stem])
    room = "echelon" if room == "__init__" else room
    for node, at_top in _walk(_parse(path), True):
        for module in _modules(node):
            yield Import(str(file), room, node.lineno, module, at_top)


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _walk(tree: ast.AST, at_top: bool) -> Iterator[tuple[ast.stmt, bool]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):
            continue  # most of a file, and no import is in one
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, at_top
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        yield from _walk(node, at_top and not inside)


def _modules(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert isinstance(node, ast.ImportFrom)
    assert node.level == 0, f"relative import in line {node.lineno}"
    if node.module == "echelon":  # from echelon import runs
        return [f"echelon.{alias.name}" for alias in node.names]
    return [node.module or ""]


def _room(parts: list[str]) -> str:
    """The first part, or a module that has a level of its own, such as `snapshot.layout`."""
    own = ".".join(parts[:2])
    return own if own in LEVELS else parts[0]


def _target(module: str) -> str | None:
    """The room an import of ours goes to; None for a name of the front door, such as a version."""
    parts = module.split(".")
    if parts[0] != "echelon" or len(parts) < 2:
        return None
    room = _room(parts[1:])
    return room if room in LEVELS else None


def test_every_room_has_a_level() -> None:
    entries = [p for p in SOURCE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
    rooms = {p.stem for p in entries} - {"__init__", "__main__"} - LIKE_OUTSIDE
    assert rooms == {room for room in LEVELS if "." not in room}


def test_a_lower_room_never_imports_a_higher_one() -> None:
    wrong = [
        str(found)
        for found in imports()
        if found.room not in OUTSIDE
        and (target := _target(found.module))
        and target != found.room
        and LEVELS[target] >= LEVELS[found.room]
        and (found.room, target) not in BESIDE
    ]
    assert wrong == []


def test_the_checks_above_see_imports() -> None:
    """A reader that finds nothing would hold any table."""
    found = {(i.room, _target(i.module)) for i in imports()}
    assert {
        ("train", "data"),
        ("runs", "config"),
        ("config", "world"),
        ("config", "object_store"),
        ("runs", "object_store"),
        ("launch", "errors"),
        ("commands", "entrypoint"),
    } <= found


def test_torch_is_imported_by_its_own_rooms() -> None:
    wrong = [
        str(found)
        for found in imports()
        if found.module.split(".")[0] in ("torch", "torchmetrics", "numpy")
        and found.at_top
        and found.room not in TORCH_ROOMS
        and found.file not in TORCH_FILES
        and not (found.module.startswith("numpy") and found.file.startswith(NUMPY_FOLDERS))
    ]
    assert wrong == []


def test_no_module_is_imported_by_what_it_imports() -> None:
    """Not even by an import inside a function, which hides a cycle instead of breaking it."""
    paths = {_name(path): path for path in SOURCE.rglob("*.py")}
    graph = {name: _imported_modules(path, set(paths)) for name, path in paths.items()}
    assert graph["echelon.entrypoint"] >= {"echelon.errors", "echelon.launch.registry"}
    while leaves := {module for module, needed in graph.items() if not needed & graph.keys()}:
        graph = {module: needed for module, needed in graph.items() if module not in leaves}
    on_cycles = {
        module: sorted(needed & graph.keys())
        for module, needed in graph.items()
        if any(module in graph[other] for other in graph)  # else it only leads to a cycle
    }
    assert on_cycles == {}


def _name(path: Path) -> str:
    return ".".join(["echelon", *path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(
        ".__init__"
    )


def _imported_modules(path: Path, own: set[str]) -> set[str]:
    """The modules of ours that a file imports; of `from SOURCE import MODULE`, the module."""
    found: set[str] = set()
    for node, _ in _walk(_parse(path), True):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= submodules & own or {node.module or ""}
    return found & own


def test_only_these_files_ask_which_launcher_it_is() -> None:
    asking = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if any(_asks_for_launcher(node) for node in ast.walk(_parse(path)))
    }
    assert asking == set(ASKING_FOR_A_LAUNCHER)


def _asks_for_launcher(node: ast.AST) -> bool:
    """Whether a node reads `launch.kind`, or compares a kind or launcher with one that exists."""
    if isinstance(node, ast.Attribute):
        return node.attr == "kind" and ast.unparse(node.value).split(".")[-1] == "launch"
    if not isinstance(node, ast.Compare):
        return False
    subject = ast.unparse(node.left)
    words = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
    return ("kind" in subject or "launcher" in subject) and not words.isdisjoint(LAUNCHERS)


def test_hydra_is_known_to_the_configuration_alone() -> None:
    wrong = [
        str(found)
        for found in imports()
        if found.module.split(".")[0] in ("hydra", "omegaconf") and found.room != "config"
    ]
    assert wrong == []


def test_the_loop_and_its_step_boundary_fit_one_screen() -> None:
    from echelon.train.loop import train
    from echelon.train.session_engine import SessionEngine
    from echelon.train.step_boundary import StepBoundary

    loop, boundary = inspect.getsource(train), inspect.getsource(StepBoundary.end_step)
    assert len((loop + boundary).splitlines()) <= 60
    _require_order(loop, "t.replica.step(", "t.end_step(")
    steps = ("count_step", "agree", "schedule_log_line", "write_due_lines", "save", "evaluate")
    _require_order(boundary, *(f"self.{name}(" for name in steps), "raise TrainingStopped")
    assert SessionEngine.end_step is StepBoundary.end_step


def _require_order(source: str, *parts: str) -> None:
    places = [source.index(part) for part in parts]
    assert places == sorted(places)


# --- what is really imported --------------------------------------------------------------------

_TELL = """
import atexit, json, os, sys
@atexit.register
def tell():
    with open(os.environ["ECHELON_TEST_MODULES"], "w") as file:
        json.dump(sorted(sys.modules), file)
from echelon.cli import main
main()
"""


def _loaded_by(words: list[str], folder: Path) -> set[str]:
    """The modules of a process that ran `echelon WORDS`."""
    file = folder / "modules.json"
    done = subprocess.run(
        [sys.executable, "-c", _TELL, *words],
        cwd=folder,
        env=os.environ | {"ECHELON_TEST_MODULES": str(file)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(file.read_text()))


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["train", "--help"],
        ["data", "--help"],
        ["data", "look", "--help"],
        ["explain"],
        ["runs"],
        ["gpus", "--help"],
        ["doctor", "--help"],
        ["doctor", "--no-smoke"],
        ["explain", "--json", "rank=1", "world_size=2"],
        ["env", "show"],
        ["train", "--dry-run"],
        ["train", "--dry-run", "--json", "launch=local", "launch.procs=2"],
    ],
    ids=" ".join,
)
@pytest.mark.slow
def test_verbs_that_start_nothing_do_not_import_torch(tmp_path: Path, words: list[str]) -> None:
    loaded = _loaded_by(words, tmp_path)
    assert "echelon.cli" in loaded
    assert not loaded & {"torch", "torchmetrics", "wandb", "numpy", "matplotlib"}
    if "--dry-run" not in words:
        assert not loaded & {"hydra", "omegaconf"}


_LOG_IMPORTS = """
import os, sys
log = os.open(os.environ["ECHELON_TEST_MODULES"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
class ImportLog:  # forked processes inherit it, and the open file
    def find_spec(self, name, path=None, target=None):
        os.write(log, f"{name}\\n".encode())
sys.meta_path.insert(0, ImportLog())
from echelon.cli import main
main()
"""


@pytest.mark.slow
def test_a_local_launch_imports_no_other_way_to_train(tmp_path: Path) -> None:
    """In any of its processes: agent, fork server and workers."""
    file = tmp_path / "modules.txt"
    words = ["train", "launch=local", "launch.procs=2", "samples=64", "trainer.epochs=1"]
    subprocess.run(
        [sys.executable, "-c", _LOG_IMPORTS, *words],
        cwd=tmp_path,
        env=os.environ | {"ECHELON_TEST_MODULES": str(file), "CUDA_VISIBLE_DEVICES": ""},
        check=True,
        capture_output=True,
        timeout=300,
    )
    loaded = set(file.read_text().split())
    assert {"echelon.launch.local_launcher", "echelon.train.loop"} <= loaded
    others = [
        *("launch.slurm", "launch.ssh", "launch.env", "launch.network_interface", "hosts"),
        *("cudagraph", "parallel.fsdp_replica", "parallel.layer_blocks", "preflight"),
        *("tracking.background", "tracking.wandb_run", "tracking.tensorboard_events"),
        *("notify.watcher", "notify.registry"),
        *("snapshot.distributed_writer", "train.wandb_trial", "monitoring.out_of_memory"),
    ]
    assert loaded & {f"echelon.{module}" for module in others} == set()
    assert not [module for module in loaded if module.startswith("torch._dynamo.")]


def test_submitting_does_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "experiment_configurations.txt").write_text("/bin/echo here\n")
    loaded = _loaded_by(["submit", "--dry-run"], tmp_path)
    assert "echelon.submission.plan" in loaded
    assert not loaded & {"torch", "torchmetrics", "wandb", "numpy"}


_TRAIN_TWICE = """
import json, sys
from echelon.cli import run_command
loaded = []
for samples in (0, 8):
    words = ["train", "samples=64", "trainer.epochs=1", f"eval_samples={samples}"]
    assert run_command([*words, f"run.name=of-{samples}"]) == 0
    loaded.append(sorted(sys.modules))
with open("modules.json", "w") as file:
    json.dump(loaded, file)
"""


@pytest.mark.slow
def test_a_worker_imports_what_it_uses(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _TRAIN_TWICE]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    loaded, evaluated = map(set, json.loads((tmp_path / "modules.json").read_text()))
    assert "torch" in loaded
    unused = {"torchmetrics", "wandb", "torch.distributed.checkpoint", "lightning", "matplotlib"}
    assert not loaded & unused
    assert "torchmetrics" in evaluated, "else the check above sees nothing"


def test_nobody_draws_from_the_random_numbers_of_the_user() -> None:
    """Those of `random` and numpy are part of a run's state: a number that Echelon drew at some
    moment would change those of the user, and differ from run to run."""
    modules = ("random", "np.random", "numpy.random")
    kept = ("getstate", "setstate", "get_state", "set_state", "seed", "Random", "SystemRandom")
    drawn = [
        f"{path.relative_to(SOURCE)}:{call.lineno}"
        for path in sorted(SOURCE.rglob("*.py"))
        for call in ast.walk(_parse(path))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        if ast.unparse(call.func.value) in modules
        and call.func.attr not in (*kept, "default_rng", "Generator", "PCG64", "SeedSequence")
    ]
    assert drawn == []

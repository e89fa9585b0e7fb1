"""Every setting, with its type, its default and what it does, each documented under itself.

Plain dataclasses and nothing else: workers read a resolved configuration with this file alone and
never import Hydra.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing
from dataclasses import dataclass, field
from typing import Any

SCHEDULES = ("constant", "linear", "cosine")
PROGRESS_STYLES = ("auto", "bar", "lines", "none")
LAUNCHERS = ("inline", "local", "env", "ssh", "slurm")
MODES = ("torchrun", "srun", "lightning", "plain", "wandb")
GPU_REQUESTS = ("gpus-per-node", "gpus-per-task", "gres")
PRECISIONS = ("float32", "tf32", "bf16", "fp16")
CAPTURE_MODES = ("auto", "always", "never")
REPLICA_KINDS = ("ddp", "fsdp")
WANDB_MODES = ("online", "offline", "disabled")


@dataclass(frozen=True)
class RunConfig:
    name: str | None = None
    """A named run typed again goes on where it was; without a name every start is a new run."""
    dir: str = "runs"
    """The folder that holds all runs."""


@dataclass(frozen=True)
class LaunchConfig:
    kind: str = "inline"
    """Where the run happens: `inline` (this process), `local` (processes of this machine), `ssh`
    (plain hosts), `slurm`, or `env` (this is one node of a cluster that sets MASTER_ADDR,
    MASTER_PORT, WORLD_SIZE, the number of nodes, and NODE_RANK)."""
    procs: int | None = None
    """Processes to start on each machine; default: one per visible device, or per
    replica.devices of them; 1 without."""
    max_restarts: int = 0
    """How often a failed world is started again from its newest snapshot."""
    threads: int | None = None
    """CPU threads of a process; default: torch's own for one process, 1 for several."""
    share_devices: bool = False
    """Allow several processes on one device."""
    join_timeout_s: float = 120.0
    """How long processes wait for each other at the start."""
    hang_s: float = 60.0
    """A rank that makes no progress for so long is reported and the world stopped; 0: never."""
    preflight: bool = False
    """local, ssh, slurm: look at the nodes first, as `echelon preflight` does, and train only if
    nothing fails."""
    interface: str | None = None
    """Network interface for NCCL and gloo; default: that of the route to the first node."""
    hosts: list[str] = field(default_factory=list)
    """ssh: the machines, as `ssh` knows them; the first hosts the meeting point."""
    hostfile: str | None = None
    """ssh: a file with a line per machine, `HOST` or `HOST slots=PROCESSES`."""
    ssh: str = "ssh"
    """ssh: the command, with options of your own: `ssh -F my_config`."""
    carry: list[str] = field(default_factory=list)
    """ssh: more variables to carry over, beside PATH, PYTHONPATH and those of torch, NCCL, CUDA."""
    nodes: int = 1
    """slurm: how many."""
    gpus_per_node: int | None = None
    """slurm: GPUs to ask for on each node; as many processes, or as many as there are replicas of
    replica.devices, unless launch.procs says otherwise."""
    gpu_request: str = "gpus-per-node"
    """slurm: how this cluster wants them asked for: gpus-per-node, gpus-per-task or gres."""
    cpus_per_node: int | None = None
    """slurm: CPUs to ask for on each node."""
    partition: str | None = None
    """slurm: where to queue; default: the cluster's own."""
    account: str | None = None
    """slurm: who pays."""
    time: str | None = None
    """slurm: time limit of one job, e.g. '4:00:00'; a run goes on over as many as it needs."""
    signal_lead_s: int = 120
    """slurm: how long before the end of its time a job is told to save and queue again."""
    max_requeues: int = 100
    """slurm: how often a run that ran out of time or was preempted queues again."""
    sbatch: list[str] = field(default_factory=list)
    """slurm: more options of sbatch, e.g. ['--mem=64G','--constraint=a100']."""
    setup: list[str] = field(default_factory=list)
    """slurm: lines of the batch script before the training: modules, conda, venv."""
    max_parallel: int | None = None
    """slurm: of the runs of an array, how many at a time."""
    secrets: str | None = None
    """local, slurm: a file of KEY=VALUE lines that is yours alone (mode 0600); where the run
    happens they become variables, and are written nowhere."""
    nodes_flag: str | None = None
    """run: append this flag with the number of nodes to the program, e.g. --num_nodes."""
    gpus_flag: str | None = None
    """run: append this flag with the GPUs per node to the program, e.g. --gpus."""


@dataclass(frozen=True)
class Interval:
    """A cadence; the units may be combined, and what comes first counts."""

    steps: int | None = None
    epochs: int | None = None
    minutes: float | None = None


@dataclass(frozen=True)
class TrainerConfig:
    epochs: int | None = 3
    """Passes over the data; ignored when `steps` is set."""
    steps: int | None = None
    """Optimizer steps in all."""
    batch_size: int = 32
    """Samples of one optimizer step over all processes together: the global batch."""
    accumulate: int = 1
    """Pieces a process computes its share of a batch in, to fit memory; the numbers stay (but for
    batch norms, which see one piece)."""
    clip: float | None = None
    """Largest norm of the gradient of all trained parameters together."""
    schedule: str = "constant"
    """How the learning rate falls from its peak: constant, linear or cosine (to zero)."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from zero."""
    evaluate: Interval = field(default_factory=lambda: Interval(epochs=1))
    """When to evaluate; the end of the run is always evaluated."""
    save: Interval = field(default_factory=lambda: Interval(epochs=1))
    """When to save a snapshot; the end of the run and a stop always save one."""
    keep_last: int = 3
    """Snapshots kept, beside the best one."""
    best: str = "loss"
    """The evaluated number that says which snapshot is best."""
    best_is: str = "min"
    """Whether the best is the `min` or the `max`."""
    log_steps: int = 10
    """Steps between two lines of metrics."""
    resume: str = "auto"
    """`auto`: go on with this run's newest valid snapshot; `never`; or a snapshot of any run, such
    as runs/NAME/snapshots/best."""
    eval_batch_size: int | None = None
    """Samples one process evaluates at a time; default: the batch size."""
    unused_parameters: bool = False
    """Set it when some parameters take no part in some steps, at a small cost per step."""
    loader_workers: int = 0
    """Processes per rank that fetch samples of a Dataset; tensors need none."""
    precision: str = "float32"
    """Of the computation: float32, tf32 (faster matrix products of a GPU), bf16, or on a GPU fp16
    (with a scaler); weights and the optimizer stay float32."""
    compile: bool = False
    """Compile the forward and backward pass with torch.compile; what torch cannot compile is
    computed without, and the reason said."""
    capture: str = "auto"
    """The whole step as one CUDA graph: `auto` where it can be, `always` (an error where it cannot)
    or `never`."""
    profile: int | None = None
    """Steps to record for a trace in the run's folder, after some to warm up."""


@dataclass(frozen=True)
class ReplicaConfig:
    """What one copy of the model is made of."""

    kind: str = "ddp"
    """`ddp`: every process holds the whole model; `fsdp`: the processes hold it together, each a
    shard of every layer."""
    devices: int = 1
    """Devices of one process, for a model whose layers lie on several: the experiment places them
    (`def experiment(cfg, devices)`), or its layers are cut into stages that are even in memory."""
    checkpoint: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, a
    third more computation."""
    blocks: list[str] = field(default_factory=list)
    """Classes of the layers that are sharded, compiled (fsdp) and recomputed one by one, e.g.
    [Block]; default: the layers of the longest ModuleList or Sequential."""


@dataclass(frozen=True)
class WandbConfig:
    use: bool = False
    """Set by track=wandb."""
    mode: str | None = None
    """`online`, `offline` (files to send later with `wandb sync`) or `disabled`; default:
    WANDB_MODE, else online. Out of reach, a run goes on offline by itself."""
    project: str | None = None
    """Default: WANDB_PROJECT, else echelon."""
    entity: str | None = None
    """The user or team it belongs to; default: WANDB_ENTITY, else your own."""
    group: str | None = None
    """Shown together with the runs of the same group."""
    name: str | None = None
    """Default: WANDB_NAME, else the run's name."""
    tags: list[str] = field(default_factory=list)
    """For example [baseline,small]."""
    notes: str | None = None
    """A longer description."""
    id: str | None = None
    """The run of wandb's to be; default: WANDB_RUN_ID, else one that is made once and kept."""
    sweep: str | None = None
    """ENTITY/PROJECT/SWEEP that this is a trial of; `wandb agent` and `echelon sweep` set it."""
    swept: list[str] = field(default_factory=list)
    """The settings that the sweep has set."""


@dataclass(frozen=True)
class TensorBoardConfig:
    use: bool = False
    """Set by track=tensorboard."""
    folder: str | None = None
    """Its event files go into a folder of the run's name in there; default: `tensorboard` in the
    run's folder."""


@dataclass(frozen=True)
class TrackConfig:
    """`track=wandb`, `track=tensorboard`, `track=[wandb,tensorboard]` choose what there is beside
    metrics.jsonl."""

    progress: str = "auto"
    """`bar`, `lines`, `none`; `auto` is a bar on a terminal and lines elsewhere."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)


@dataclass(frozen=True)
class Config:
    """A whole, resolved configuration. Composed once; ranks never compose it again."""

    experiment: dict[str, Any] = field(default_factory=dict)
    """`entry` (MODULE:FUNCTION or FILE.py:FUNCTION) and the experiment's own settings."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    replica: ReplicaConfig = field(default_factory=ReplicaConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    run: RunConfig = field(default_factory=RunConfig)
    seed: int = 0
    rank: int | None = None
    """This process's rank, when ranks are started by hand."""
    world_size: int | None = None
    """The number of processes, when ranks are started by hand."""
    master: str | None = None
    """HOST:PORT where rank 0 listens, when ranks are started by hand; default: this machine."""
    program: list[str] = field(default_factory=list)
    """`echelon run`: somebody else's program and its arguments."""
    mode: str = "torchrun"
    """`echelon run`: how it is started: `torchrun` (an agent and its variables), `srun` (one task
    per process), `lightning` (srun, as Lightning expects it), `plain` (once per node), `wandb` (an
    agent of wandb's on the first node, its trials on all)."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def experiment_settings(self) -> dict[str, Any]:
        """The experiment's own settings."""
        return {k: v for k, v in self.experiment.items() if k != "entry"}

    def numerics_settings(self) -> dict[str, Any]:
        """The flat settings that decide the numbers of a run, as opposed to where, how long and
        how often it runs. A resumed run must agree on these."""
        flat = flatten(self.to_dict())
        return {
            k: v
            for k, v in flat.items()
            if k.startswith(_NUMERICS_KEYS) and _IMPLIED_BEFORE.get(k) != v
        }

    def numerics_fingerprint(self) -> str:
        text = json.dumps(self.numerics_settings(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_NUMERICS_KEYS = (
    "experiment.",
    "seed",
    "trainer.batch_size",
    "trainer.clip",
    "trainer.schedule",
    "trainer.warmup_steps",
    "trainer.precision",
)
_IMPLIED_BEFORE = {"trainer.precision": "float32"}
"""Settings that older snapshots do not name, with what was meant."""


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} → {'a.b': 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def find_differences(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Flat keys whose values differ, with both values; a missing one is what was meant, or None."""
    implied = {k: _IMPLIED_BEFORE.get(k) for k in sorted(a.keys() | b.keys())}
    both = {k: (a.get(k, value), b.get(k, value)) for k, value in implied.items()}
    return {k: (then, now) for k, (then, now) in both.items() if then != now}


def build_config(data: dict[str, Any]) -> Config:
    """A Config from plain data such as a run folder's config.json."""
    built: Config = _build_dataclass(Config, data)
    return built


def _build_dataclass(cls: Any, data: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    values = {
        key: _build_dataclass(hints[key], value) if dataclasses.is_dataclass(hints[key]) else value
        for key, value in data.items()
        if key in known  # a folder written by a later version may say more
    }
    return cls(**values)

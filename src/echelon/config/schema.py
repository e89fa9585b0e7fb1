"""Every setting with its type, default and explanation; the string under a setting is its help.

This module has plain dataclasses and imports nothing but the standard library: ranks read a
resolved configuration with it and never import Hydra.
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
LAUNCHERS = ("inline", "local", "env", "ssh", "slurm", "k8s")
MODES = ("torchrun", "srun", "lightning", "plain", "wandb")
K8S_RESOURCES = ("job", "jobset")
GPU_REQUESTS = ("gpus-per-node", "gpus-per-task", "gres")
AFTER_TYPES = ("afterok", "afterany", "afternotok")
CONTAINER_RUNTIMES = ("auto", "apptainer", "pyxis", "enroot", "podman", "charliecloud")
PRECISIONS = ("float32", "tf32", "bf16", "fp16")
CAPTURE_MODES = ("auto", "always", "never")
BAD_SAMPLE_CHOICES = ("raise", "skip")
REPLICA_KINDS = ("ddp", "fsdp")
BEST_DIRECTIONS = ("auto", "min", "max")
WANDB_MODES = ("online", "offline", "disabled")
NEWS_CHANNELS = ("webhook", "mail", "desktop", "slack")
NEWS_EVENTS = (
    *("started", "finished", "failed", "stopped", "nan", "stalled"),
    *("requeued", "queued", "lost", "best"),
)
CHOICES = {
    "launch.kind": LAUNCHERS,
    "launch.gpu_request": GPU_REQUESTS,
    "launch.container_runtime": CONTAINER_RUNTIMES,
    "launch.k8s.resource": K8S_RESOURCES,
    "mode": MODES,
    "trainer.schedule": SCHEDULES,
    "trainer.best_is": BEST_DIRECTIONS,
    "trainer.precision": PRECISIONS,
    "trainer.capture": CAPTURE_MODES,
    "trainer.bad_samples": BAD_SAMPLE_CHOICES,
    "replica.kind": REPLICA_KINDS,
    "track.progress": PROGRESS_STYLES,
}
"""Settings that have one of a few values, by their flat keys."""


@dataclass(frozen=True)
class RunConfig:
    """The run's name and folder."""

    name: str | None = None
    """A run with the same name resumes; without a name every start is a new run."""
    dir: str = "runs"
    """The folder of all runs, on a file system. For object stores see trainer.mirror."""


@dataclass(frozen=True)
class KubernetesConfig:
    """The pods of launch=k8s."""

    resource: str = "job"
    """`job`: an Indexed Job and a headless Service, which every cluster has; `jobset`: a JobSet,
    whose pods all start again together when one fails."""
    namespace: str | None = None
    """Default: the one of kubectl's context."""
    context: str | None = None
    """kubectl's context; default: its current one."""
    workdir: str | None = None
    """Where the code of this folder is in the image, or in a volume; default: at the same path as
    here."""
    volumes: list[str] = field(default_factory=list)
    """Claims to mount, each CLAIM:/PATH or CLAIM:/PATH:ro. The folder of runs (run.dir) has to be
    in one."""
    memory: str | None = None
    """Memory of each pod, requested and not exceeded, e.g. 64Gi."""
    shared_memory: str | None = None
    """Limit of /dev/shm, e.g. 16Gi; default: the memory of the pod, of which it is a part."""
    gpu_resource: str = "nvidia.com/gpu"
    """The resource by which this cluster counts GPUs, e.g. amd.com/gpu."""
    node_selector: list[str] = field(default_factory=list)
    """Labels of the nodes to run on, each KEY=VALUE."""
    tolerations: list[str] = field(default_factory=list)
    """Taints of nodes to run on all the same, each KEY[=VALUE][:EFFECT], as in `kubectl taint`."""
    service_account: str | None = None
    """Default: that of the namespace, whose token the pods do not get."""
    priority_class: str | None = None
    """The PriorityClass of the pods."""
    pull_secrets: list[str] = field(default_factory=list)
    """Secrets by which the image is pulled."""
    grace_s: int = 120
    """How long a pod that is asked to end may take to save."""
    backoff_limit: int = 6
    """job: how many pods may be killed, or not find the others, before the run has failed. Pods
    that ended with everything saved are not counted."""
    ttl_s: int = 604_800
    """How long what has ended is kept, with its logs."""


@dataclass(frozen=True)
class LaunchConfig:
    """Where the processes run, and how they are started and supervised."""

    kind: str = "inline"
    """Where the run executes: `inline` (this process), `local` (processes on this machine), `ssh`
    (plain hosts), `slurm`, `k8s` (pods of Kubernetes), or `env` (this is one node of a cluster that
    sets MASTER_ADDR, MASTER_PORT, WORLD_SIZE, the number of nodes, and NODE_RANK)."""
    procs: int | None = None
    """Processes on each machine; default: one per visible device, or per replica.devices of them; 1
    without devices."""
    max_restarts: int = 0
    """How often a failed run is restarted from its newest snapshot."""
    max_replacements: int = 3
    """How often in a row, without a step between, a rank that was killed or hangs is replaced while
    the others go on with their state; 0: never. It is so of a node as well, where there are
    several."""
    spares: int = 0
    """ssh, slurm, env: nodes beyond those that train. A spare takes the place of a node that is
    lost. slurm: so many nodes are asked for beside `nodes`; ssh: the last hosts are the spares;
    env: the last node ranks are."""
    min_nodes: int | None = None
    """ssh, slurm, env: with fewer nodes left the run saves and ends as preempted, so that it can be
    queued again; default: it goes on with any number that is a majority of the nodes before the
    loss, or half of them and the one that leads."""
    max_node_faults: int = 2
    """ssh, slurm, env: a machine whose ranks were killed or hung, computed wrong numbers, or which
    was lost, so many times more than any other, is left out for the rest of the job once a spare
    takes its place; 0: never. A GPU that counts an uncorrectable error is enough at once, also
    without a spare, if launch.min_nodes allows it."""
    replace_slow_s: float = 300.0
    """ssh, slurm, env: a machine that takes `slow_factor` times as long as the median of the others
    for so long without a break is replaced by a spare, if there is one; 0: never."""
    silence_s: float = 14.0
    """A node that sends nothing for so many seconds counts as lost; at least 5."""
    threads: int | None = None
    """CPU threads of each process; default: torch's own for one process, 1 for several."""
    share_devices: bool = False
    """Allow several processes on one device."""
    join_timeout_s: float = 120.0
    """How long processes wait for each other at the rendezvous."""
    hang_s: float = 60.0
    """When no rank has made progress for so long, the run is stopped and the rank that the others
    wait for is reported; 0: never. It is 8 times as long where one rank may take its time: in the
    first steps, until the first batch of an evaluation, while a snapshot is saved, while torch
    compiles. A process that is alone may take any time there."""
    slow_factor: float = 1.5
    """A rank whose data and computation take so many times the median of the others is slow: it is
    named on the screen and by `echelon show`."""
    slow_s: float = 1.0
    """How long it must be so before it is named."""
    preflight: bool = False
    """local, ssh, slurm: check the nodes first, as `echelon preflight` does, and train only if no
    check fails."""
    interface: str | None = None
    """Network interface for NCCL and gloo; default: the one with the route to the first node."""
    hosts: list[str] = field(default_factory=list)
    """ssh: the machines, as `ssh` knows them; the rendezvous is on the first."""
    hostfile: str | None = None
    """ssh: a file with a line per machine, `HOST` or `HOST slots=PROCESSES`."""
    ssh: str = "ssh"
    """ssh, and slurm with login: the command, with your own options: `ssh -F my_config`."""
    carry: list[str] = field(default_factory=list)
    """ssh: more environment variables to pass on, beside PATH, PYTHONPATH and those of torch, NCCL,
    CUDA."""
    nodes: int = 1
    """slurm, k8s: the number of nodes."""
    gpus_per_node: int | str | None = None
    """slurm, k8s: GPUs to request on each node, as 4, or (slurm) with their type as a100:4; one
    process each, or one per replica.devices of them, unless launch.procs is set."""
    gpu_request: str = "gpus-per-node"
    """slurm: the sbatch option by which this cluster takes GPU requests: gpus-per-node,
    gpus-per-task or gres."""
    cpus_per_node: int | None = None
    """slurm, k8s: CPUs to request on each node."""
    exclusive: bool = False
    """slurm: no other job runs on the nodes. Of GPUs the job still gets those that it asks for."""
    partition: str | None = None
    """slurm: the partition; default: the cluster's own. Of several, as in a,b, the job runs in the
    one where it can start first."""
    constraint: str | None = None
    """slurm: features that the nodes must have, as `a100`, `'a100&ib'` or `'a100|h100'`."""
    reservation: str | None = None
    """slurm: the reservation to run in."""
    licenses: str | None = None
    """slurm: licences that the job takes, as matlab or matlab:2,fluent."""
    account: str | None = None
    """slurm: the account to charge."""
    qos: str | None = None
    """slurm: the quality of service; default: that of the account."""
    after: str | None = None
    """slurm: start when this run has finished: its name, its folder or a job id; of several, as in
    a,b, all of them. afterany:RUN starts however it has ended, afternotok:RUN if it has failed."""
    deadline: str | None = None
    """slurm: do not start a job that cannot end before this time, as '2026-01-31T12:00' or
    now+2days. What still runs then is ended."""
    time: str | None = None
    """slurm: time limit of one job, e.g. '4:00:00'; a run continues over as many jobs as it needs.
    """
    signal_lead_s: int = 120
    """slurm: how long before its time limit a job gets the signal to save and requeue."""
    max_requeues: int = 100
    """slurm: how often a run is requeued after a time limit or a preemption."""
    sbatch: list[str] = field(default_factory=list)
    """slurm: more options of sbatch, e.g. ['--mem=64G','--constraint=a100']."""
    setup: list[str] = field(default_factory=list)
    """slurm: lines of the batch script before the training: modules, conda, venv."""
    login: str | None = None
    """slurm: the login node of the cluster, as `launch.ssh` knows it, where this machine has no
    Slurm. Code goes there, the job is submitted there, and what the run writes comes back."""
    remote_dir: str | None = None
    """slurm with login: the folder of this project on the cluster. Runs go to its `runs`, and what
    else is in it, such as data, is seen in the working folder of the jobs; default: ~/echelon/ and
    the name of the source folder."""
    python: str | None = None
    """slurm with login: the Python of the jobs on the cluster, which has torch; default: that of
    the environment which the source folder asks for, else that on the PATH after `setup`."""
    max_parallel: int | None = None
    """slurm: how many runs of an array run at the same time."""
    secrets: str | None = None
    """local, slurm, k8s: a file of KEY=VALUE lines that only you can read (mode 0600). They become
    environment variables of the run and are written nowhere; k8s: into a Secret alone."""
    container: str | None = None
    """local, ssh, slurm, k8s: the image in which the processes run: a file (.sif, .sqsh), a folder,
    or a reference to a registry; k8s: always the last. docs/containers.md says more."""
    container_runtime: str = "auto"
    """What starts the container: apptainer, pyxis (slurm), enroot (local, ssh), podman,
    charliecloud; auto: what the image looks like and what is on the PATH decide."""
    container_mounts: list[str] = field(default_factory=list)
    """More folders and files to mount, as SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro. run.dir, the
    current folder and that of the experiment are mounted anyway, at the same paths."""
    container_args: list[str] = field(default_factory=list)
    """More options of the runtime, e.g. ['--shm-size=64g']; of srun, with pyxis."""
    container_python: str = "python3"
    """The Python in the image. It needs torch and what Echelon depends on; Echelon itself is
    mounted."""
    k8s: KubernetesConfig = field(default_factory=KubernetesConfig)
    """What the pods of launch=k8s are like."""
    nodes_flag: str | None = None
    """run: append this flag with the number of nodes to the program, e.g. --num_nodes."""
    gpus_flag: str | None = None
    """run: append this flag with the GPUs per node to the program, e.g. --gpus."""

    @property
    def gpu_count(self) -> int:
        """How many GPUs `gpus_per_node` asks for on each node, whatever their type."""
        count = str(self.gpus_per_node or 0).rpartition(":")[2]
        return int(count) if count.removeprefix("-").isdecimal() else 0

    @property
    def gpu_type(self) -> str | None:
        """The type of GPU that `gpus_per_node` asks for, as Slurm calls it; None for any."""
        return str(self.gpus_per_node or "").rpartition(":")[0] or None


@dataclass(frozen=True)
class Interval:
    """How often something happens; units may be combined, and the first that is due counts."""

    steps: int | None = None
    epochs: int | None = None
    minutes: float | None = None


@dataclass(frozen=True)
class EarlyStopConfig:
    """Ends a training whose evaluated number has stopped getting better."""

    metric: str | None = None
    """The number to look at; default: the one that `trainer.best` names."""
    patience: int | None = None
    """Evaluations in a row that may be no better than the best one before the run is finished;
    default: it never ends early."""


@dataclass(frozen=True)
class TrainerConfig:
    """The training loop: how long, with which batch, and how often to log, evaluate and save."""

    epochs: int | None = 3
    """Passes over the data; ignored when `steps` is set."""
    steps: int | None = None
    """Optimizer steps in total."""
    batch_size: int = 32
    """Samples of one optimizer step over all processes: the global batch size."""
    accumulate: int = 1
    """Micro-batches into which a process splits its share of a batch, to fit memory; results stay
    the same (except batch norms, which see one micro-batch)."""
    clip: float | None = None
    """Largest norm of the gradient of all trained parameters together."""
    schedule: str = "constant"
    """How the learning rate decays from its peak: constant, linear or cosine (to zero)."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from zero."""
    evaluate: Interval = field(default_factory=lambda: Interval(epochs=1))
    """How often to evaluate; the end of the run is always evaluated."""
    save: Interval = field(default_factory=lambda: Interval(epochs=1))
    """How often to save a snapshot; the end of the run and a stop always save one."""
    keep_last: int = 3
    """Snapshots to keep, besides the best one."""
    mirror: str | None = None
    """Where copies of the kept snapshots go in the background, such as s3://BUCKET/PREFIX: into
    RUN.NAME/ there. A run of the same name that has no newer snapshot of its own, on another
    machine, continues from them."""
    best: str = "loss"
    """The evaluated metric that determines the best snapshot."""
    best_is: str = "auto"
    """Whether the best value is the `min` or the `max`; `auto` knows it of the loss, of the metrics
    of torchmetrics, and of common names such as accuracy or rmse."""
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    """When the run is finished before its last step."""
    ema: float | None = None
    """Keep an exponential moving average of the weights with this decay, such as 0.999. The average
    is evaluated, and `echelon.load` gives it; the training goes on with the weights themselves."""
    log_steps: int = 10
    """Steps between two lines of metrics."""
    resume: str = "auto"
    """`auto`: resume from this run's newest valid snapshot; `never`; or the path of a snapshot of
    any run, such as runs/NAME/snapshots/best, or of one in a mirror: s3://BUCKET/PREFIX/NAME (the
    newest), s3://BUCKET/PREFIX/NAME/best."""
    sanity_steps: int = 2
    """Batches that every process evaluates before the first step, so that a metric that fails costs
    seconds and not an epoch; 0: none."""
    eval_batch_size: int | None = None
    """Samples one process evaluates at a time; default: the batch size."""
    unused_parameters: bool = False
    """Set it if some parameters take no part in some steps; costs a little per step."""
    loader_workers: int = 0
    """Processes per rank that load samples of a Dataset; tensors need none."""
    bad_samples: str = "raise"
    """What becomes of a sample that cannot be read or decoded: `raise` ends the training and names
    it; `skip` lists it in the run's folder and takes the next readable sample in its place."""
    max_bad_samples: int = 100
    """How many samples may be skipped before the training ends."""
    precision: str = "float32"
    """Precision of the computation: float32, tf32 (faster matrix products on a GPU), bf16, or on a
    GPU fp16 (with a loss scaler); weights and optimizer state stay float32."""
    channels_last: bool = False
    """Keep the filters of convolutions, and so the pictures between them, with the channels last in
    memory: on a GPU in bf16 or fp16 a ResNet takes about half the time. Results stay the same to
    rounding. A model that takes pictures apart with `view` needs `reshape` there."""
    compile: bool = False
    """Compile the forward and backward pass with torch.compile; if torch cannot compile it, it runs
    without, and the reason is printed."""
    capture: str = "auto"
    """Run the whole step as one CUDA graph: `auto` if possible, `always` (an error if not) or
    `never`. A step of your own is captured on one process alone."""
    verify_steps: int | None = None
    """Every so many steps, compute the share of a process on two and compare them to the bit, to
    find a device that computes wrong numbers without an error; a third process settles which one is
    wrong. Costs one forward and backward pass each time, and memory for the gradients. One process
    alone computes twice, which finds errors that come and go. Default: never."""
    profile: int | None = None
    """Number of steps to record, after a warm-up, for a trace in the run's folder."""


@dataclass(frozen=True)
class ReplicaConfig:
    """How one copy of the model is laid out over processes and devices."""

    kind: str = "ddp"
    """`ddp`: every process holds the whole model; `fsdp`: the processes share it, each with a shard
    of every layer (replica.shards: how many of them share one)."""
    shards: int | None = None
    """Processes that hold one copy of the model together, each with a shard of every layer (FSDP2's
    hybrid sharding). It must divide the number of processes. Neighbouring ranks hold a copy, so
    with 8 GPUs per machine replica.shards=8 shards within each machine and reduces gradients
    between them. Default: all processes with replica.kind=fsdp, otherwise 1."""
    devices: int = 1
    """Devices of one process, for a model whose layers are on several: the experiment places them
    (`def experiment(cfg, devices)`), or its layers are split into stages of equal memory."""
    checkpoint: bool = False
    """Activation checkpointing: recompute activations in the backward pass. Less memory, a third
    more computation."""
    blocks: list[str] = field(default_factory=list)
    """Classes of the layers that are sharded, compiled (fsdp) and checkpointed one by one, e.g.
    [Block]; default: the layers of the longest ModuleList or Sequential."""

    @property
    def is_sharded(self) -> bool:
        """Whether several processes hold one copy of the model together."""
        return self.kind == "fsdp" or (self.shards or 1) > 1

    @property
    def sharding(self) -> str:
        """The setting that shards the model, for messages."""
        return "replica.kind=fsdp" if self.shards is None else f"replica.shards={self.shards}"

    def count_shards(self, world_size: int) -> int:
        """Return how many ranks hold one copy of the model together; 1: each holds it whole.

        At the start `shards` divides the world (`validate.find_size_faults`). In a later round of
        another size it is the next larger number that does: a shard then needs no more memory.
        """
        if not self.is_sharded:
            return 1
        wanted = min(self.shards or world_size, world_size)
        return next(n for n in range(wanted, world_size + 1) if world_size % n == 0)


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases as a tracker."""

    use: bool = False
    """Set by track=wandb."""
    mode: str | None = None
    """`online`, `offline` (files to upload later with `wandb sync`) or `disabled`; default:
    WANDB_MODE, else online. If the server cannot be reached, a run continues offline."""
    project: str | None = None
    """Default: WANDB_PROJECT, else echelon."""
    entity: str | None = None
    """The user or team it belongs to; default: WANDB_ENTITY, else your own."""
    group: str | None = None
    """Runs of the same group are shown together."""
    name: str | None = None
    """Default: WANDB_NAME, else the run's name."""
    tags: list[str] = field(default_factory=list)
    """For example [baseline,small]."""
    notes: str | None = None
    """A longer description."""
    id: str | None = None
    """The id of the run on wandb; default: WANDB_RUN_ID, else one that is generated once and
    stored."""
    sweep: str | None = None
    """ENTITY/PROJECT/SWEEP that this run is a trial of; set by `wandb agent` and `echelon sweep`.
    """
    swept: list[str] = field(default_factory=list)
    """The settings that the sweep has set."""


@dataclass(frozen=True)
class TensorBoardConfig:
    """TensorBoard as a tracker."""

    use: bool = False
    """Set by track=tensorboard."""
    folder: str | None = None
    """Event files go into a subfolder named after the run; default: `tensorboard` in the run's
    folder."""


@dataclass(frozen=True)
class TrackConfig:
    """Trackers beside metrics.jsonl: `track=wandb`, `track=tensorboard` or
    `track=[wandb,tensorboard]`."""

    progress: str = "auto"
    """`bar`, `lines`, `none`; `auto` is a bar on a terminal and lines elsewhere."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)


@dataclass(frozen=True)
class MailConfig:
    """Mail with news of a run. A password is the variable ECHELON_SMTP_PASSWORD."""

    to: list[str] = field(default_factory=list)
    """Who gets it, such as [me@example.org]; default: you on this machine, by its sendmail."""
    sender: str | None = None
    """From whom it is; default: notify.mail.user if that is an address, else you at this host."""
    server: str | None = None
    """HOST or HOST:PORT of an SMTP server; default: the program `sendmail` of the machine. With
    port 465 it is encrypted from the start, else as soon as the server offers it (STARTTLS)."""
    user: str | None = None
    """With whose name to log in there; default: without logging in."""


@dataclass(frozen=True)
class NotifyConfig:
    """News of a run, for your phone; see `echelon notify --help`. Addresses that are secret, and
    passwords, are variables or in the file of launch.secrets, never settings."""

    to: list[str] = field(default_factory=list)
    """Where news goes: webhook, mail, desktop, slack, or several; notify=[mail,slack] is short for
    it, and notify=[] sends none."""
    events: list[str] = field(default_factory=list)
    """What is told, by default all but best: started, finished, failed, stopped, nan (a number that
    is not finite), stalled (no progress), requeued (too often), queued (for long), lost (ranks or
    machines), best (a better value, at most once an hour)."""
    stalled_minutes: float = 30.0
    """stalled: so long without a new step."""
    requeues: int = 3
    """requeued: so many times within 24 hours, restarts of the workers included."""
    queued_minutes: float = 60.0
    """queued: so long in Slurm's queue."""
    mail: MailConfig = field(default_factory=MailConfig)

    @property
    def enabled_events(self) -> list[str]:
        """What is told, of NEWS_EVENTS."""
        return self.events or [event for event in NEWS_EVENTS if event != "best"]


@dataclass(frozen=True)
class Config:
    """A whole, resolved configuration. It is composed once; ranks receive it and never compose it
    again."""

    experiment: dict[str, Any] = field(default_factory=dict)
    """`entry` (MODULE:FUNCTION or FILE.py:FUNCTION; FILE.py: for a script with a session of its
    own) and the experiment's own settings."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    replica: ReplicaConfig = field(default_factory=ReplicaConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    run: RunConfig = field(default_factory=RunConfig)
    seed: int = 0
    """Seeds the weights, the order of samples and what is drawn in training."""
    rank: int | None = None
    """This process's rank, when ranks are started by hand."""
    world_size: int | None = None
    """The number of processes, when ranks are started by hand."""
    master: str | None = None
    """HOST:PORT where rank 0 listens, when ranks are started by hand; default: this machine."""
    program: list[str] = field(default_factory=list)
    """`echelon run`: the user's program and its arguments."""
    mode: str = "torchrun"
    """`echelon run`: how the program is started: `torchrun` (an agent with torchrun's variables),
    `srun` (one task per process), `lightning` (srun, as Lightning expects it), `plain` (once per
    node), `wandb` (one wandb agent on the first node, its trials on all nodes)."""

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain nested data, as it is stored in config.json."""
        return dataclasses.asdict(self)

    @property
    def experiment_settings(self) -> dict[str, Any]:
        """The experiment's own settings, without its entry."""
        return {k: v for k, v in self.experiment.items() if k != "entry"}

    @property
    def script(self) -> str | None:
        """The script that trains with `echelon.session`, and alone can start this run again; None
        for a function."""
        return find_script(str(self.experiment.get("entry") or ""))

    def select_numerics_settings(self) -> dict[str, Any]:
        """Return the settings, as flat keys, that change the results of a run rather than where,
        how long or how often it runs. A resumed run must agree on these."""
        flat = flatten(self.to_dict())
        return {
            k: v
            for k, v in flat.items()
            if k.startswith(_NUMERICS_KEYS) and _IMPLIED_BEFORE.get(k) != v
        }

    def compute_numerics_fingerprint(self) -> str:
        """Return a short digest of the settings that change results."""
        text = json.dumps(self.select_numerics_settings(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_NUMERICS_KEYS = (
    "experiment.",
    "seed",
    "trainer.batch_size",
    "trainer.clip",
    "trainer.ema",
    "trainer.schedule",
    "trainer.warmup_steps",
    "trainer.precision",
)
"""Keys, or prefixes of keys, that change results."""
_IMPLIED_BEFORE = {"trainer.precision": "float32"}
"""Settings that older snapshots do not contain, with the value they were trained with."""


def find_script(entry: str) -> str | None:
    """Return the script of an entry that names no function; None of any other entry."""
    return entry.removesuffix(":") if entry.endswith(":") else None


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'a': {'b': 1}} → {'a.b': 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def find_differences(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the flat keys whose values differ, with both values; a missing one counts as what was
    implied, or None."""
    implied = {k: _IMPLIED_BEFORE.get(k) for k in sorted(a.keys() | b.keys())}
    both = {k: (a.get(k, value), b.get(k, value)) for k, value in implied.items()}
    return {k: (then, now) for k, (then, now) in both.items() if then != now}


def build_config(data: dict[str, Any]) -> Config:
    """Return a Config from plain data such as a run's config.json."""
    built: Config = _build_dataclass(Config, data)
    return built


def _build_dataclass(cls: Any, data: dict[str, Any]) -> Any:
    """Return an instance of a dataclass from plain data, with nested dataclasses."""
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    values = {
        key: _build_dataclass(hints[key], value) if dataclasses.is_dataclass(hints[key]) else value
        for key, value in data.items()
        if key in known  # a folder of a later version may contain more
    }
    return cls(**values)

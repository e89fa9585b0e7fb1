"""Validation that types cannot express: ranges, choices, and settings that contradict each other.

Every function returns or yields faults instead of raising, so that all are reported together.
"""

from __future__ import annotations

import dataclasses
import math
import re
import string
from collections.abc import Iterator

from echelon.config import bundled_experiments
from echelon.config.kubernetes_checks import find_kubernetes_faults
from echelon.config.schema import (
    AFTER_TYPES,
    CHOICES,
    NEWS_CHANNELS,
    NEWS_EVENTS,
    WANDB_MODES,
    Config,
    Interval,
    LaunchConfig,
    TensorBoardConfig,
    WandbConfig,
    flatten,
)
from echelon.errors import EchelonError, Fault, suggest_nearest
from echelon.object_store.urls import is_url, parse_url
from echelon.world.device_fit import find_device_count_mismatch

NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "._-")
"""Characters that a run's name may contain."""


def find_faults(config: Config) -> list[Fault]:
    """Return all faults of a configuration that its types do not already exclude."""
    return [
        *_check_ranges(config),
        *_check_finite(config),
        *_check_choices(config),
        *_check_addresses(config),
        *_check_sharding(config),
        *_check_verification(config),
        *_check_launch(config),
        *_check_container(config),
        *_check_replica(config),
        *_check_manual_ranks(config),
        *_check_track(config),
        *_check_notify(config),
    ]


def find_size_faults(config: Config, world_size: int) -> list[Fault]:
    """Return the faults of settings that so many processes cannot have: a global batch with fewer
    samples, a number of shards that does not divide them."""
    if config.program:
        return []
    batch_size = config.trainer.batch_size
    checks = (check_min_batch_size(batch_size, world_size), _check_shards(config, world_size))
    return [fault for fault in checks if fault]


def check_min_batch_size(batch_size: int, world_size: int) -> Fault | None:
    """Return a fault if there are more processes than samples in the global batch."""
    if batch_size >= world_size:
        return None
    return Fault(
        f"trainer.batch_size={batch_size} is smaller than the world of {world_size} processes, "
        "so some would have nothing to do",
        f"set trainer.batch_size to {world_size} or more (it is the global batch), "
        f"or start at most {batch_size} processes",
    )


def _check_shards(config: Config, world_size: int) -> Fault | None:
    """Return a fault if the model cannot be sharded over so many processes."""
    replica = config.replica
    if not replica.is_sharded:
        return None
    shards = replica.shards or world_size
    if world_size == 1:
        count = replica.shards or 2
        local = "launch=local " if config.launch.kind == "inline" else ""
        return Fault(
            f"{replica.sharding} shards one model over processes, but there is only one process",
            f"start {'two' if count == 2 else count} or more: {local}launch.procs={count}; or "
            f"leave {replica.sharding} out",
        )
    if world_size % shards == 0:
        return None
    fitting = [str(n) for n in range(2, world_size + 1) if world_size % n == 0]
    fewer, more = world_size - world_size % shards, world_size + shards - world_size % shards
    return Fault(
        f"replica.shards={shards} does not divide {world_size} processes, and each copy of the "
        f"model takes {shards} of them",
        f"set replica.shards to {' or '.join(fitting)}, or start "
        f"{' or '.join(str(n) for n in (fewer, more) if n)} processes",
    )


def check_cpu_support(config: Config) -> list[Fault]:
    """Return a fault for each setting that a run on a CPU cannot use."""
    faults = []
    if config.trainer.precision == "fp16":
        faults.append(
            Fault(
                "trainer.precision=fp16, but this run is on a CPU, which cannot compute in it",
                "set trainer.precision=bf16, or run on a GPU",
            )
        )
    if config.trainer.capture == "always":
        faults.append(
            Fault(
                "trainer.capture=always, but the step cannot be a CUDA graph: this run is on a CPU",
                "set trainer.capture=auto, which trains without one",
            )
        )
    return faults


def _check_sharding(config: Config) -> Iterator[Fault]:
    """Yield faults of settings that a sharded model does not support."""
    replica, sharding = config.replica, config.replica.sharding
    if replica.kind == "fsdp" and replica.shards == 1:
        yield Fault(
            "replica.kind=fsdp with replica.shards=1 shards nothing",
            "leave one of the two out",
        )
    if not replica.is_sharded:
        return
    if config.trainer.ema is not None:
        yield Fault(
            f"trainer.ema={config.trainer.ema}, but {sharding} keeps shards of the weights, "
            "which are not averaged",
            "leave one of the two out",
        )
    if config.trainer.capture == "always":
        yield Fault(
            f"trainer.capture=always, but {sharding} has no step that can be captured",
            "leave one of the two out",
        )
    if config.trainer.channels_last:
        yield Fault(
            f"trainer.channels_last=true, but {sharding} cuts filters in the order in which "
            "the experiment makes them",
            "leave one of the two out",
        )
    if config.trainer.unused_parameters and config.trainer.accumulate > 1:
        yield Fault(
            "trainer.unused_parameters=true and trainer.accumulate="
            f"{config.trainer.accumulate}, but with {sharding} torch finds unused "
            "parameters only over a whole batch",
            "set trainer.accumulate=1 with a smaller batch or replica.checkpoint=true, or leave "
            "one of the others out",
        )


def _check_verification(config: Config) -> Iterator[Fault]:
    """Yield faults of settings with which a process cannot compute the share of another."""
    steps = config.trainer.verify_steps
    if steps is None:
        return
    obstacles = []
    if config.replica.is_sharded:
        obstacles.append(f"{config.replica.sharding} leaves no process with the whole model")
    if config.replica.devices > 1:
        obstacles.append(f"replica.devices={config.replica.devices} spreads the model over devices")
    if config.trainer.capture == "always":
        obstacles.append("trainer.capture=always replays steps, which cannot be compared")
    for obstacle in obstacles:
        yield Fault(f"trainer.verify_steps={steps}, but {obstacle}", "leave one of the two out")


def _check_ranges(config: Config) -> Iterator[Fault]:
    """Yield a fault for each number that is out of its range."""
    t, launch = config.trainer, config.launch
    at_least = {
        "trainer.batch_size": (t.batch_size, 1),
        "trainer.accumulate": (t.accumulate, 1),
        "trainer.eval_batch_size": (t.eval_batch_size, 1),
        "trainer.early_stop.patience": (t.early_stop.patience, 1),
        "trainer.log_steps": (t.log_steps, 1),
        "trainer.keep_last": (t.keep_last, 1),
        "trainer.warmup_steps": (t.warmup_steps, 0),
        "trainer.sanity_steps": (t.sanity_steps, 0),
        "trainer.loader_workers": (t.loader_workers, 0),
        "trainer.max_bad_samples": (t.max_bad_samples, 1),
        "trainer.epochs": (t.epochs, 0),
        "trainer.steps": (t.steps, 1),
        "trainer.profile": (t.profile, 1),
        "trainer.verify_steps": (t.verify_steps, 1),
        "replica.devices": (config.replica.devices, 1),
        "replica.shards": (config.replica.shards, 1),
        "launch.procs": (launch.procs, 1),
        "launch.threads": (launch.threads, 1),
        "launch.max_restarts": (launch.max_restarts, 0),
        "launch.max_replacements": (launch.max_replacements, 0),
        "launch.hang_s": (launch.hang_s, 0),
        "launch.spares": (launch.spares, 0),
        "launch.min_nodes": (launch.min_nodes, 1),
        "launch.max_node_faults": (launch.max_node_faults, 0),
        "launch.replace_slow_s": (launch.replace_slow_s, 0),
        "launch.silence_s": (launch.silence_s, 5),
        "launch.slow_s": (launch.slow_s, 0),
        "launch.nodes": (launch.nodes, 1),
        "launch.gpus_per_node": (_get_plain_count(launch), 1),
        "launch.cpus_per_node": (launch.cpus_per_node, 1),
        "launch.signal_lead_s": (launch.signal_lead_s, 1),
        "launch.max_requeues": (launch.max_requeues, 0),
        "launch.max_parallel": (launch.max_parallel, 1),
        "launch.k8s.grace_s": (launch.k8s.grace_s, 1),
        "launch.k8s.backoff_limit": (launch.k8s.backoff_limit, 0),
        "launch.k8s.ttl_s": (launch.k8s.ttl_s, 0),
        "seed": (config.seed, 0),
    }
    for key, (value, least) in at_least.items():
        if value is not None and value < least:
            yield Fault(f"{key}={value} is below {least}", f"set {key} to {least} or more")
    for key, positive in {
        "trainer.clip": t.clip,
        "launch.join_timeout_s": launch.join_timeout_s,
    }.items():
        if positive is not None and positive <= 0:
            yield Fault(f"{key}={positive} is not above 0", f"set {key} to a positive number")
    if launch.slow_factor <= 1:
        yield Fault(
            f"launch.slow_factor={launch.slow_factor} is not above 1, so some rank is always slow",
            "set a factor such as launch.slow_factor=1.5",
        )
    if t.ema is not None and not 0 < t.ema < 1:
        yield Fault(
            f"trainer.ema={t.ema} is not between 0 and 1", "set a decay such as trainer.ema=0.999"
        )
    for name, every in {"evaluate": t.evaluate, "save": t.save}.items():
        yield from _check_interval(f"trainer.{name}", every)
    if t.epochs is None and t.steps is None:
        yield Fault("trainer.epochs and trainer.steps are both null", "set one of them")


def _check_finite(config: Config) -> Iterator[Fault]:
    """Yield a fault for each infinity or NaN. A user's experiment may have a use for one; ours have
    not."""
    for key, value in flatten(config.to_dict()).items():
        if not isinstance(value, float) or math.isfinite(value):
            continue
        if (
            not key.startswith("experiment.")
            or config.experiment.get("entry") in bundled_experiments.read_names_by_entry()
        ):
            name = key.removeprefix("experiment.")
            yield Fault(f"{name}={value} is not a finite number", f"set {name} to a finite one")


def _check_interval(key: str, every: Interval) -> Iterator[Fault]:
    """Yield a fault for each unit of an interval that is not positive."""
    for unit in ("steps", "epochs", "minutes"):
        value = getattr(every, unit)
        if value is not None and value <= 0:
            yield Fault(f"{key}.{unit}={value} is not above 0", f"set {key}.{unit}=null for never")


_PRECISION_ALIASES = {"fp32": "float32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
"""What others call a precision. By spelling alone, tf32 would be suggested for fp32."""


def _check_choices(config: Config) -> Iterator[Fault]:
    """Yield a fault for each setting that is not one of its choices."""
    values = flatten(config.to_dict())
    for key, known in CHOICES.items():
        value = values[key]
        if value not in known:
            canonical = _PRECISION_ALIASES.get(value.lower(), value)
            yield Fault(
                f"{key}={value}: there is no such choice", suggest_nearest(canonical, known)
            )
    if config.run.name is not None and (fault := check_run_name(config.run.name)):
        yield fault


def _check_addresses(config: Config) -> Iterator[Fault]:
    """Yield a fault for each address of an object store where none can be, and the other way
    round."""
    if is_url(config.run.dir):
        yield Fault(
            f"run.dir={config.run.dir} is not on a file system, which the locks, heartbeats and "
            "logs of a run need",
            "keep run.dir on one, and have snapshots copied to a store: trainer.mirror="
            f"{config.run.dir}",
        )
    mirror, resume = config.trainer.mirror, config.trainer.resume
    if mirror is not None:
        yield from _check_store_address("trainer.mirror", mirror, "s3://BUCKET/PREFIX")
    if is_url(resume):
        yield from _check_store_address("trainer.resume", resume, "s3://BUCKET/PREFIX/RUN")


def _check_store_address(key: str, address: str, example: str) -> Iterator[Fault]:
    """Yield why snapshots cannot be at an address, if they cannot."""
    try:
        if is_url(address) and parse_url(address).can_list:
            return
    except EchelonError as error:  # it may have a secret in it, which is not repeated here
        yield from error.faults
        return
    yield Fault(f"{key}={address} is not the address of an object store", f"give {key}={example}")


def check_run_name(name: str) -> Fault | None:
    """Return a fault if the name is unsafe: it becomes a folder, a job name and a log prefix."""
    if name == "latest":  # the link to the newest run
        return Fault("run.name='latest' always means the newest run", "choose another name")
    if name and set(name) <= NAME_CHARACTERS and name[0] not in ".-" and len(name) <= 100:
        return None
    others = " and ".join(repr(c) for c in dict.fromkeys(name) if c not in NAME_CHARACTERS)
    return Fault(
        f"run.name={name!r} is not a valid name for a run"
        + (f": it has {others}, which the names of folders and jobs cannot have" if others else ""),
        "use 1 to 100 of the letters a to z and A to Z, digits, '.', '_' and '-', not starting "
        "with '.' or '-'",
    )


def _check_launch(config: Config) -> Iterator[Fault]:
    """Yield faults of settings that contradict the launcher."""
    launch = config.launch
    if launch.kind == "inline" and not config.program:
        for key, value in {"procs": launch.procs, "max_restarts": launch.max_restarts}.items():
            if value not in (None, 0):
                yield Fault(
                    f"launch.{key}={value} is set, but launch=inline is this one process",
                    f"add launch=local: launch=local launch.{key}={value}",
                )
    elif config.rank is not None:
        yield Fault(
            f"rank={config.rank} starts one process by hand, but launch={launch.kind} starts "
            "its own",
            "leave one of the two out",
        )
    yield from _check_launcher_only_keys(launch)
    yield from _check_spares(config)
    if launch.kind == "ssh":
        yield from _check_hosts(launch)
        if not launch.hostfile:
            yield from check_node_counts(launch, len(launch.hosts))
    if launch.kind == "slurm":
        yield from _check_sbatch(launch)
        yield from _check_login(launch)
        yield from check_node_counts(launch, launch.nodes + launch.spares)
    if launch.kind == "k8s":
        yield from find_kubernetes_faults(config)
    if config.program:
        if config.mode == "wandb" and launch.kind in ("ssh", "env", "k8s"):
            yield Fault(
                f"mode=wandb, but launch={launch.kind} would start a wandb agent on every node",
                "add launch=slurm or launch=local",
            )
        if config.mode == "srun" and launch.kind != "slurm":
            yield Fault(
                f"mode=srun, but launch={launch.kind} has no srun",
                "add launch=slurm, or leave the mode out: an agent then starts the processes",
            )
    elif launch.procs and launch.kind == "local":
        yield from find_size_faults(config, launch.procs)
    elif launch.procs and (fault := check_min_batch_size(config.trainer.batch_size, launch.procs)):
        yield fault


def _check_replica(config: Config) -> Iterator[Fault]:
    """Yield faults of settings that contradict the layout of the model."""
    replica, launch = config.replica, config.launch
    devices = replica.devices
    if replica.blocks and not replica.is_sharded and not replica.checkpoint:
        yield Fault(
            f"replica.blocks=[{','.join(replica.blocks)}] names the layers to shard or to "
            "checkpoint, but replica.kind=ddp and replica.checkpoint=false do neither",
            "add replica.kind=fsdp, replica.shards or replica.checkpoint=true, or leave "
            "replica.blocks out",
        )
    if devices <= 1:
        return
    if replica.is_sharded:
        yield Fault(
            f"replica.devices={devices}, but {replica.sharding} shards layers over processes of "
            "one device each",
            f"leave replica.devices out, or {replica.sharding}",
        )
    if launch.share_devices:
        yield Fault(
            f"replica.devices={devices} is for models that fill several devices, but "
            "launch.share_devices=true puts several processes on one",
            "leave one of the two out",
        )
    if config.trainer.capture == "always":
        yield Fault(
            f"trainer.capture=always needs one device per process, but replica.devices={devices}",
            "leave one of the two out",
        )
    if launch.gpu_count > 0:
        yield from _check_replicas_per_node(launch.gpu_count, devices, launch.procs)


def _check_replicas_per_node(
    gpus: int, devices_per_replica: int, procs: int | None
) -> Iterator[Fault]:
    """Whether the GPUs that are asked for take the replicas; see `world.device_fit`."""
    if find_device_count_mismatch(gpus, devices_per_replica, procs) is None:
        return
    max_procs = gpus // devices_per_replica
    if procs is not None:
        needed = procs * devices_per_replica
        yield Fault(
            f"launch.procs={procs} with replica.devices={devices_per_replica} take {needed} "
            f"devices, but launch.gpus_per_node={gpus}",
            f"ask for {needed}, or set launch.procs={max_procs}"
            if max_procs
            else f"ask for {devices_per_replica}",
        )
    else:
        fewer = f"{max_procs * devices_per_replica} or " if max_procs else ""
        yield Fault(
            f"launch.gpus_per_node={gpus} does not divide by replica.devices={devices_per_replica}",
            f"ask for {fewer}{(max_procs + 1) * devices_per_replica}",
        )


LAUNCHER_ONLY_KEYS: dict[str, tuple[str, ...]] = {
    "ssh": ("hosts", "hostfile", "carry"),
    "slurm": (
        *("nodes", "gpus_per_node", "cpus_per_node", "partition", "account", "time"),
        *("exclusive", "constraint", "reservation", "licenses", "qos", "after", "deadline"),
        *("sbatch", "setup", "max_parallel", "login", "remote_dir", "python"),
    ),
    "k8s": ("nodes", "gpus_per_node", "cpus_per_node", "k8s"),
}
"""Settings that only some launchers read."""
SEVERAL_NODES_KEYS = ("spares", "min_nodes", "max_node_faults", "replace_slow_s")
"""Settings that launchers of one machine do not read."""


def find_unused_keys(kind: str) -> dict[str, str]:
    """Return the settings of `launch` that this launcher does not read, each with the launcher that
    does, or the first of them."""
    used = LAUNCHER_ONLY_KEYS.get(kind, ())
    by_key: dict[str, str] = {}
    for other, keys in LAUNCHER_ONLY_KEYS.items():
        for key in keys:
            if key not in used:
                by_key.setdefault(key, other)
    return by_key


def _check_launcher_only_keys(launch: LaunchConfig) -> Iterator[Fault]:
    """Yield a fault for each setting that the chosen launcher would silently ignore."""
    given, default = (
        flatten(dataclasses.asdict(launch)),
        flatten(dataclasses.asdict(LaunchConfig())),
    )
    unused = find_unused_keys(launch.kind)
    for key, value in given.items():
        group = key.partition(".")[0]
        if group in unused and value != default[key]:
            yield Fault(
                f"launch.{key}={value} is set, but launch={launch.kind} does not use it",
                f"add launch={unused[group]}, or leave launch.{key} out",
            )


_CONTAINER_KEYS = ("container_runtime", "container_mounts", "container_args", "container_python")
_LAUNCHERS_OF_RUNTIME = {"pyxis": ("slurm",), "enroot": ("local", "ssh")}
"""enroot is started by the plugin of srun, or by itself."""


def _check_container(config: Config) -> Iterator[Fault]:
    """Yield faults of a container where none can be started, and of settings without one."""
    launch, default = config.launch, LaunchConfig()
    if launch.container is None:
        for key in _CONTAINER_KEYS:
            value = getattr(launch, key)
            if value != getattr(default, key):
                yield Fault(
                    f"launch.{key}={value} is set, but there is no container",
                    f"name an image: launch.container=IMAGE, or leave launch.{key} out",
                )
        return
    image = launch.container
    if not image.strip() or image.startswith("-") or not image.isprintable():
        yield Fault(
            f"launch.container={image!r} is not an image",
            "give the path of a file or folder, or a reference to a registry",
        )
    if launch.kind == "inline" and not config.program:
        yield Fault(
            f"launch.container={image}, but launch=inline trains in this process",
            "add launch=local, or start this command in the container yourself",
        )
    elif launch.kind == "env":
        yield Fault(
            f"launch.container={image}, but with launch=env this command is the agent",
            "start the command in the container yourself, on every node",
        )
    if config.program and config.mode == "wandb":
        yield Fault(
            f"launch.container={image}, but `wandb agent` itself starts the trials",
            "use `echelon sweep`, whose trials may be in a container",
        )
    if launch.kind == "k8s":
        for key in ("container_runtime", "container_mounts", "container_args"):
            if getattr(launch, key) != getattr(default, key):
                yield Fault(
                    f"launch.{key}={getattr(launch, key)} is set, but Kubernetes starts the pods "
                    "of launch=k8s",
                    f"leave launch.{key} out; launch.k8s has settings of pods",
                )
        return
    kinds = _LAUNCHERS_OF_RUNTIME.get(launch.container_runtime)
    if kinds and launch.kind not in kinds:
        others = " or ".join(f"launch={kind}" for kind in kinds)
        yield Fault(
            f"launch.container_runtime={launch.container_runtime} works with {others}, not "
            f"launch={launch.kind}",
            "leave it out: what fits is then chosen",
        )


def _check_spares(config: Config) -> Iterator[Fault]:
    """Yield faults of settings for lost nodes where none can be lost or replaced."""
    launch, default = config.launch, LaunchConfig()
    if launch.kind in ("inline", "local"):
        for key in SEVERAL_NODES_KEYS:
            value = getattr(launch, key)
            if value != getattr(default, key):
                yield Fault(
                    f"launch.{key}={value} is set, but launch={launch.kind} is one machine",
                    f"add launch=ssh or launch=slurm, or leave launch.{key} out",
                )
    elif launch.spares and (why := find_replacement_obstacle(config)):
        yield Fault(
            f"launch.spares={launch.spares}, but ranks of {why} are never replaced",
            "leave launch.spares out",
        )


def find_replacement_obstacle(config: Config) -> str:
    """Return why lost ranks and nodes cannot be replaced, as far as the settings tell; empty where
    they can."""
    if config.program:
        return "a program"
    if not config.launch.max_replacements:
        return "launch.max_replacements=0"
    if config.replica.devices > 1:
        return "replica.devices above 1"
    return ""


def check_node_counts(launch: LaunchConfig, total: int) -> Iterator[Fault]:
    """Yield faults of spares and the least number of nodes, of a launch with so many nodes
    altogether."""
    nodes = total - launch.spares
    if launch.spares and nodes < 1 and total:
        yield Fault(
            f"launch.spares={launch.spares} of {total} nodes leaves none to train",
            "name more nodes, or set launch.spares lower",
        )
    elif launch.min_nodes is not None and launch.min_nodes > nodes > 0:
        yield Fault(
            f"launch.min_nodes={launch.min_nodes} is more than the {nodes} node{'s' * (nodes > 1)} "
            "that train",
            f"set launch.min_nodes to {nodes} or less",
        )


def _check_hosts(launch: LaunchConfig) -> Iterator[Fault]:
    """Yield faults of the hosts of launch=ssh."""
    if not launch.hosts and not launch.hostfile:
        yield Fault("launch=ssh without a host", "name the hosts: 'launch.hosts=[a,b]'")
    for host in launch.hosts:
        if not is_safe_host(host):
            yield Fault(
                f"launch.hosts: {host!r} is not the name of a host",
                "give names or addresses as ssh knows them, USER@HOST where needed",
            )
    for host in {h for h in launch.hosts if launch.hosts.count(h) > 1}:
        yield Fault(
            f"launch.hosts names {host} more than once",
            "name each host once; launch.procs says how many processes it gets",
        )


def _check_login(launch: LaunchConfig) -> Iterator[Fault]:
    """Yield faults of the login node of a cluster, and of settings that mean nothing without it."""
    if launch.login is None:
        for key in ("remote_dir", "python"):
            if (value := getattr(launch, key)) is not None:
                yield Fault(
                    f"launch.{key}={value} is set, but there is no launch.login that it belongs to",
                    f"add launch.login=HOST, or leave launch.{key} out",
                )
        return
    if not is_safe_host(launch.login):
        yield Fault(
            f"launch.login={launch.login!r} is not the name of a host",
            "give a name or an address as ssh knows it, USER@HOST where needed",
        )
    folder = launch.remote_dir
    if folder is not None and not (folder.startswith(("/", "~/")) and folder.isprintable()):
        yield Fault(
            f"launch.remote_dir={folder!r} is not the path of a folder on {launch.login}",
            "give one that begins with / or ~/",
        )
    if launch.python is not None and not launch.python.startswith(("/", "~/")):
        yield Fault(
            f"launch.python={launch.python!r} is not the path of a Python on {launch.login}",
            "give one that begins with / or ~/, or leave it out and load a module in launch.setup",
        )


def is_safe_host(host: str) -> bool:
    """Return whether a host may be passed to ssh: one that starts with a dash would be an option,
    and options can run commands."""
    return bool(re.fullmatch(r"([A-Za-z0-9._-]+@)?[A-Za-z0-9\[:][A-Za-z0-9._:\]-]*", host))


_SBATCH_CHARACTERS = {
    **dict.fromkeys(("partition", "account", "time", "qos", "reservation"), "_.,:@+-"),
    "constraint": "_.,:@+-&|*()[]",
    "licenses": "_.,:@+-|()/",
    "deadline": "_.,:@+-/",
    "after": "_.,:@+-/~",
}
"""What the values of options of sbatch may contain beside letters and digits: what Slurm gives a
meaning, and nothing by which a line of the script could end."""
_OWN_SBATCH_OPTIONS = {
    **{"exclusive": "--exclusive", "constraint": "--constraint", "reservation": "--reservation"},
    **{"licenses": "--licenses", "qos": "--qos", "after": "--dependency", "deadline": "--deadline"},
}
"""Options that have a setting of their own."""
_GPU_REQUEST = re.compile(r"([A-Za-z0-9_.+-]*[A-Za-z][A-Za-z0-9_.+-]*:)?[1-9][0-9]*")


def _get_plain_count(launch: LaunchConfig) -> int | None:
    """Return the number of GPUs where it is given without a type."""
    return launch.gpus_per_node if isinstance(launch.gpus_per_node, int) else None


def _check_sbatch(launch: LaunchConfig) -> Iterator[Fault]:
    """Yield faults of what goes into a batch script."""
    for key, others in _SBATCH_CHARACTERS.items():
        value = getattr(launch, key)
        if value is not None and not re.fullmatch(f"[A-Za-z0-9{re.escape(others)}]+", value):
            yield Fault(
                f"launch.{key}={value!r} is not safe as one word in a batch script",
                f"use letters, digits and {' '.join(others)} only",
            )
    gpus = launch.gpus_per_node
    if isinstance(gpus, str) and not _GPU_REQUEST.fullmatch(gpus):
        yield Fault(
            f"launch.gpus_per_node={gpus!r} is not a number of GPUs",
            "write 4, or with their type a100:4; `echelon cluster` lists the types",
        )
    yield from _check_after(launch)
    for key, option in _OWN_SBATCH_OPTIONS.items():
        given = [line for line in launch.sbatch if re.split("[= ]", line)[0] == option]
        if given and getattr(launch, key):
            yield Fault(
                f"launch.{key}={getattr(launch, key)}, but launch.sbatch has {given[0]} too",
                "leave one of the two out",
            )
    limit_s = parse_sbatch_time(launch.time or "")
    early_s = launch.signal_lead_s + _SLURM_SIGNAL_JITTER_S
    if limit_s is not None and limit_s <= early_s:
        yield Fault(
            f"launch.time={launch.time}, but the signal to save may come {early_s} s before its "
            f"end (launch.signal_lead_s={launch.signal_lead_s}; Slurm may send it "
            f"{_SLURM_SIGNAL_JITTER_S} s early)",
            "ask for more time, or set launch.signal_lead_s lower",
        )
    for line in launch.sbatch:
        if not line.startswith("-") or "\n" in line:
            yield Fault(
                f"launch.sbatch: {line!r} is not an option of sbatch", "write ['--mem=64G', …]"
            )
    for line in launch.setup:
        if "\n" in line:
            yield Fault(
                f"launch.setup: {line!r} is more than one line", "give each line its own item"
            )


def _check_after(launch: LaunchConfig) -> Iterator[Fault]:
    """Yield faults of how `launch.after` is written. Which jobs it means is found out later."""
    for item in (launch.after or "").split(",") if launch.after is not None else ():
        kind, colon, run = item.rpartition(":")
        if not run or (colon and kind not in AFTER_TYPES):
            yield Fault(
                f"launch.after={launch.after!r} is not a run to wait for",
                f"write RUN, or TYPE:RUN with one of {', '.join(AFTER_TYPES)}",
            )


def _check_track(config: Config) -> Iterator[Fault]:
    """Yield faults of trackers: settings of one not chosen, and values that wandb refuses."""
    chosen: dict[str, tuple[WandbConfig | TensorBoardConfig, WandbConfig | TensorBoardConfig]] = {
        "wandb": (config.track.wandb, WandbConfig()),
        "tensorboard": (config.track.tensorboard, TensorBoardConfig()),
    }
    for name, (given, default) in chosen.items():
        for key, value in vars(given).items():
            if not given.use and value != getattr(default, key):
                yield Fault(
                    f"track.{name}.{key}={value} is set, but {name} does not track this run",
                    f"add track={name}, or leave track.{name}.{key} out",
                )
    wandb = config.track.wandb
    if wandb.mode is not None and wandb.mode not in WANDB_MODES:
        yield Fault(
            f"track.wandb.mode={wandb.mode}: there is no such choice",
            suggest_nearest(wandb.mode, WANDB_MODES),
        )
    if wandb.project is not None and not re.fullmatch(r"[^/\\#?%:]{1,128}", wandb.project):
        yield Fault(
            f"track.wandb.project={wandb.project!r} is not a name that wandb accepts",
            "use 1 to 128 characters without / \\ # ? % :",
        )
    for tag in wandb.tags:
        if not 1 <= len(tag) <= 64:
            yield Fault(
                f"track.wandb.tags: {tag!r} is not a tag that wandb accepts",
                "use 1 to 64 characters",
            )


_MAIL_ADDRESS = re.compile(r"[^\s@<>,;\"'()\\]+@[^\s@<>,;\"'()\\]+|[A-Za-z0-9_][A-Za-z0-9._-]*")
"""An address, or a user of this machine. Nothing in it can end a line or begin an option."""
_MAIL_SERVER = re.compile(r"([A-Za-z0-9_][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")


def _check_notify(config: Config) -> Iterator[Fault]:
    """Yield faults of the settings of news."""
    notify, mail = config.notify, config.notify.mail
    for key, values, known in (
        ("to", notify.to, NEWS_CHANNELS),
        ("events", notify.events, NEWS_EVENTS),
    ):
        for value in values:
            if "://" in value:  # it is often a secret, and this sentence goes into logs
                yield Fault(
                    f"notify.{key} has an address, where names belong",
                    "write notify=webhook or notify=slack, and put the address into "
                    "ECHELON_WEBHOOK_URL or ECHELON_SLACK_URL",
                )
            elif value not in known:
                yield Fault(
                    f"notify.{key}: {value!r} is not one of its choices",
                    suggest_nearest(value, known),
                )
    for key in ("stalled_minutes", "requeues", "queued_minutes"):
        if not getattr(notify, key) > 0:
            yield Fault(
                f"notify.{key}={getattr(notify, key)} is not above 0",
                "give a number above 0, or leave the event out of notify.events",
            )
    addresses = [*mail.to, *([mail.sender] if mail.sender is not None else [])]
    for address in addresses:
        if not _MAIL_ADDRESS.fullmatch(address):
            yield Fault(f"notify.mail: {address!r} is not an address", "write NAME@HOST")
    if mail.server is not None and not _MAIL_SERVER.fullmatch(mail.server):
        yield Fault(
            f"notify.mail.server={mail.server!r} is not HOST or HOST:PORT",
            "write it like smtp.example.org:587; a password is the variable ECHELON_SMTP_PASSWORD",
        )
    if mail.user is not None and mail.server is None:
        yield Fault(
            f"notify.mail.user={mail.user}, but there is no server to log in to",
            "set notify.mail.server=HOST:PORT",
        )
    if mail.user is not None and not mail.user.isprintable():
        yield Fault(f"notify.mail.user={mail.user!r} is not a name", "leave out what is no text")
    if "desktop" in notify.to and config.launch.kind == "slurm":
        yield Fault(
            "notify has desktop, but a batch job has no desktop",
            "choose others of webhook, mail, slack",
        )


_SLURM_SIGNAL_JITTER_S = 60
"""Slurm may send the signal so much earlier: see --signal in sbatch(1)."""


def parse_sbatch_time(time: str) -> int | None:
    """Return the seconds of M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; None for anything else."""
    days, dash, rest = time.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in [*parts, days or "0"]) or len(parts) > 3:
        return None
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86_400 + sum(int(p) * u for p, u in zip(parts, units, strict=False))


def _check_manual_ranks(config: Config) -> Iterator[Fault]:
    """Yield faults of ranks that are started by hand: rank, world_size and master go together."""
    if (config.rank is None) != (config.world_size is None):
        given, missing = (
            ("rank", "world_size") if config.rank is not None else ("world_size", "rank")
        )
        yield Fault(
            f"{given}={getattr(config, given)} is set without {missing}",
            "give both, for example rank=0 world_size=4",
        )
    elif config.rank is not None and config.world_size is not None:
        if not 0 <= config.rank < config.world_size:
            yield Fault(
                f"rank={config.rank} is outside of a world of {config.world_size} processes",
                f"ranks go from 0 to {config.world_size - 1}",
            )
        else:
            yield from find_size_faults(config, config.world_size)
    elif config.master is not None:
        yield Fault(
            f"master={config.master} is set without rank and world_size",
            "give all three, for example rank=0 world_size=4 master=HOST:PORT",
        )

"""launch=k8s: a Job or a JobSet of Kubernetes, whose pods are the nodes."""

from __future__ import annotations

import secrets
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from echelon.config.schema import Config
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.launch.k8s import kubectl
from echelon.launch.k8s.manifest import PodStart, make_manifests, render_yaml
from echelon.launch.k8s.names import make_resource_name
from echelon.launch.launcher import Launcher, LaunchServices, read_launch_secrets
from echelon.launch.plan import (
    LaunchPlan,
    LocalMachine,
    ProbePlan,
    describe_program_or_experiment,
    place_ranks,
)
from echelon.launch.slurm import requeue
from echelon.launch.slurm.batch_script import count_processes_per_node
from echelon.runs.create import assign_name
from echelon.runs.run_folder import Run
from echelon.world.network_key import KEY_VARIABLE, make_key

_NEW_KEY = "?"
"""What a plan shows in the place of a key. It is too short for one, so that a manifest that is
applied as it was printed is refused by its pods, with how to make a key."""
_NO_START = "planned"
_MAX_WAIT_FAILURES = 30
_WAIT_POLL_S = 10.0


class KubernetesLauncher(Launcher):
    """Runs a training in pods. The command ends when they are queued, unless `--wait` is given."""

    name = "k8s"
    queue = "Kubernetes"
    needs_shared_folder = True
    is_followed_by_folder = False

    def complete_config(self, config: Config, dry_run: bool) -> Config:
        """Name the run, and check that the secrets can be read: they go into the Secret."""
        read_launch_secrets(config, dry_run)
        return assign_name(config)

    def plan(self, config: Config, machine: LocalMachine) -> LaunchPlan:
        launch, k8s = config.launch, config.launch.k8s
        procs, nodes = count_processes_per_node(config), launch.nodes
        name = make_resource_name(str(config.run.name))
        variables = {KEY_VARIABLE: _NEW_KEY}
        manifests = make_manifests(PodStart(_make_pod_config(config), _NO_START, variables))
        create = tuple(kubectl.make_kubectl_words(k8s, "create", "-f", "-"))
        kind = manifests[-1]["kind"]
        secret = "the variables of launch.secrets and " * bool(launch.secrets)
        return LaunchPlan(
            self.name,
            place_ranks(
                [f"pod {index}" for index in range(nodes)],
                [procs] * nodes,
                launch.gpu_count,
                config,
            ),
            steps=(
                "ask the API server whether it would take the objects (kubectl create "
                "--dry-run=server)",
                f"{shlex.join(create)}: {', '.join(m['kind'] for m in manifests)}, all named {name}"
                f"; the Secret gets {secret}a new {KEY_VARIABLE} (by hand: `openssl rand -hex 32`)",
                f"each of {nodes} pod{'s' * (nodes > 1)} starts one agent: "
                + describe_program_or_experiment(config),
                *_describe_claims(config),
                *_describe_ends(config),
                f"on `echelon cancel` or `kubectl delete {kind.lower()} {name}` the run saves, for "
                f"which it has {k8s.grace_s} s",
                "untried: the manifest is checked against the published schemas of Kubernetes and "
                "JobSet, but it has never run on a cluster",
            ),
            commands=(create,),
            manifest=render_yaml(manifests),
        )

    def find_config_faults(
        self, config: Config, plan: LaunchPlan, machine: LocalMachine
    ) -> list[Fault]:
        fault = _find_code_fault(config)
        return [*super().find_config_faults(config, plan, machine), *([fault] if fault else [])]

    def check_trackers(self, config: Config, plan: LaunchPlan, machine: LocalMachine) -> None:
        """Check nothing: what is installed in the image is not known here."""

    def check(self, config: Config, plan: LaunchPlan, services: LaunchServices) -> None:
        """Refuse a run whose pods are there, and ask the API server before anything is made."""
        kubectl.require_kubectl()
        k8s = config.launch.k8s
        name = make_resource_name(str(config.run.name))
        if (state := kubectl.read_state(k8s, name)) is not None:
            if not state.is_over:
                raise EchelonError(
                    Fault(
                        f"run {config.run.name} is queued or running already, as {k8s.resource} "
                        f"{name}",
                        "choose another run.name, or end it with "
                        f"`{shlex.join(_make_delete_words(config))}`",
                    )
                )
            # What is left of a start that is over holds the name; the run itself is in its volume.
            kubectl.delete_objects(k8s, name, waits=True)
        kubectl.require_cluster_accepts(k8s, _make_start_manifests(config))

    def start(self, config: Config, plan: LaunchPlan, services: LaunchServices) -> int:
        k8s, name = config.launch.k8s, make_resource_name(str(config.run.name))
        kubectl.create_objects(k8s, _make_start_manifests(config))
        print(f"{k8s.resource} {name}: run {config.run.name} in {config.run.dir} of its volume")
        return ExitCode.OK

    def follow(self, config: Config, code: int, wait: bool, services: LaunchServices) -> int:
        """Print how to follow the pods or, if asked to wait, wait until they are over."""
        k8s, name = config.launch.k8s, make_resource_name(str(config.run.name))
        label = f"app.kubernetes.io/instance={name}"
        # By default kubectl follows no more than five pods.
        most = f"--max-log-requests={max(5, config.launch.nodes)}"
        logs = kubectl.make_kubectl_words(k8s, "logs", "-f", "--prefix", most, "-l", label)
        print(f"  follow it  {shlex.join(logs)}")
        pods = kubectl.make_kubectl_words(k8s, "get", "pods", "-l", label)
        print(f"  all pods   {shlex.join(pods)}")
        print(f"  end it     {shlex.join(_make_delete_words(config))}", flush=True)
        return _wait_until_over(config, name) if wait else code

    def get_planned_procs(self, config: Config) -> int | None:
        return count_processes_per_node(config)

    def record_node_start(self, run: Run, node_count: int, world_size: int) -> None:
        """Write the size. The state stays that of the pods before, until their end is counted."""
        run.update_status(launcher=self.name, nodes=node_count, world=world_size)

    def get_stop_limit_s(self, config: Config) -> float:
        return config.launch.k8s.grace_s

    def count_restarts_left(self, run: Run, config: Config) -> int:
        """Return the restarts that are left over all pods of the run, made again or not."""
        return requeue.record_start(run, config.launch)

    def plan_probes(
        self, config: Config, env: Mapping[str, str], probe: Sequence[str]
    ) -> ProbePlan:
        launch = config.launch
        doctor = f"{launch.container_python} -m echelon doctor"
        raise EchelonError(
            Fault(
                "launch=k8s starts nothing on its nodes but the run, so they cannot be checked "
                "from here",
                f"`kubectl run check --rm -it --image={launch.container} -- {doctor}` checks the "
                "image on one of them",
            )
        )


# --- from this machine to the pods ---


def _make_start_manifests(config: Config) -> list[dict[str, object]]:
    """Return the objects of a new start, with a key of its own and the secrets."""
    variables = {KEY_VARIABLE: make_key()} | read_launch_secrets(config, dry_run=False)
    return make_manifests(PodStart(_make_pod_config(config), secrets.token_hex(8), variables))


def _make_pod_config(config: Config) -> Config:
    """Return the configuration with the paths of the pods: code of this folder is in
    launch.k8s.workdir there."""
    entry = str(config.experiment.get("entry") or "")
    file, colon, function = entry.rpartition(":")
    moved = _find_path_in_pod(config, file) if file.endswith(".py") else None
    if moved is None:
        return config
    return replace(config, experiment=config.experiment | {"entry": f"{moved}{colon}{function}"})


def _find_path_in_pod(config: Config, file: str) -> str | None:
    """Return where a file of this folder is in a pod; None if that is not known."""
    workdir, path = config.launch.k8s.workdir, Path(file).absolute()
    if workdir is None or PurePosixPath(path).is_relative_to(workdir):
        return str(path)
    if path.is_relative_to(Path.cwd()):
        return str(PurePosixPath(workdir) / path.relative_to(Path.cwd()))
    return None


def _find_code_fault(config: Config) -> Fault | None:
    """Return the fault of an experiment whose file is not below the folder that the image has."""
    file = str(config.experiment.get("entry") or "").rpartition(":")[0]
    if not file.endswith(".py") or _find_path_in_pod(config, file) is not None:
        return None
    return Fault(
        f"the experiment is in {file}, which is not in this folder, so launch.k8s.workdir="
        f"{config.launch.k8s.workdir} does not say where it is in the image",
        "type the command in the folder of the code, or leave launch.k8s.workdir out if it has the "
        "same path there",
    )


def _make_delete_words(config: Config) -> list[str]:
    k8s = config.launch.k8s
    name = make_resource_name(str(config.run.name))
    return kubectl.make_kubectl_words(k8s, "delete", k8s.resource, name)


def _wait_until_over(config: Config, name: str) -> int:
    """Wait for the Job or JobSet; returns 0 if it ended well. Ctrl-C leaves it as it is."""
    try:
        failures = 0
        while True:
            try:
                state = kubectl.read_state(config.launch.k8s, name)
            except EchelonError:  # the API server may be away for a while
                failures += 1
                if failures == _MAX_WAIT_FAILURES:
                    raise
                time.sleep(_WAIT_POLL_S)
                continue
            failures = 0
            if state is None:
                print(f"{config.launch.k8s.resource} {name} was deleted", file=sys.stderr)
                return ExitCode.PREEMPTED
            if state.is_over:
                if not state.has_succeeded:
                    print(f"run {config.run.name} failed: {state.message}", file=sys.stderr)
                return ExitCode.OK if state.has_succeeded else ExitCode.FAILED
            time.sleep(_WAIT_POLL_S)
    except KeyboardInterrupt:
        print(f"\ndetached; run {config.run.name} goes on", file=sys.stderr)
        return ExitCode.OK


def _describe_claims(config: Config) -> tuple[str, ...]:
    """Return the step of a plan that says which claims there have to be, and of which kind."""
    launch = config.launch
    if not launch.k8s.volumes:
        return ()
    claims = ", ".join(dict.fromkeys(text.partition(":")[0] for text in launch.k8s.volumes))
    several = "; it has to be ReadWriteMany, since several nodes mount it" * (launch.nodes > 1)
    return (f"mount the claims {claims}{several}",)


def _describe_ends(config: Config) -> tuple[str, ...]:
    """Return the steps of a plan that say what happens when pods end."""
    launch = config.launch
    lost = "a pod that is lost or evicted" + (
        ": the others save and end, and all start again" if launch.nodes > 1 else " starts again"
    )
    if launch.k8s.resource == "jobset":
        return (
            f"{lost}, without a limit but {launch.max_requeues} and no progress; anything else "
            f"starts all pods again {launch.max_restarts} times at most",
        )
    return (
        f"{lost}; up to {launch.k8s.backoff_limit} pods that were killed or did not find the "
        "others are made again; any other end ends the run",
    )

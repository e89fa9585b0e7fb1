"""The objects of a run, as they are given to kubectl and printed by `--dry-run`.

They are plain values, made from the configuration alone. `job` is an Indexed Job, one pod for each
node; where it has several pods, a headless Service gives them names. `jobset` is a JobSet around
the same Job, which makes that Service itself. A ConfigMap has the resolved configuration, a Secret
the key of the start and the variables of `launch.secrets`.

The exit codes of Echelon decide what follows (`podFailurePolicy`). A run needs all of its pods.
When one is lost, the others save and end, so what was saved always begins again with as many:

    job     a pod that ended with everything saved, or was evicted, is made again and not counted;
            one that was killed, or did not find the others, is made again up to backoff_limit
            times; any other code ends the run
    jobset  what was saved or evicted fails the Job by a rule, after which the JobSet starts all
            pods again without counting; anything else does so launch.max_restarts times
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from echelon.config.kubernetes_checks import parse_toleration, parse_volume
from echelon.config.schema import Config, KubernetesConfig, LaunchConfig
from echelon.errors import ExitCode
from echelon.launch.k8s.names import make_resource_name

CONFIG_FILE = "/etc/echelon/run.json"
CONTAINER = "echelon"
MASTER_PORT = 29_500
"""A pod has a network of its own, where every port is free."""
NAME_LABEL, INSTANCE_LABEL = "app.kubernetes.io/name", "app.kubernetes.io/instance"
RUN_ANNOTATION = "echelon/run"
REPLICATED_JOB = "node"

_CONTINUED_CODES = (ExitCode.NODE_LOST, ExitCode.LEFT, ExitCode.PREEMPTED)
"""Codes after which a run goes on from its newest snapshot."""
_COUNTED_CODES = (ExitCode.RENDEZVOUS, 128 + signal.SIGKILL, 128 + signal.SIGTERM)
"""A pod that is made again may meet one that is about to end, and a kill says nothing of the code
of the user."""

Manifest = dict[str, Any]


class PodStart(NamedTuple):
    """What the pods of one start are given."""

    config: Config
    """As it is in the pods, with their paths."""
    start: str
    """A number of this start, by which a pod that is made again knows that it is not the first."""
    variables: Mapping[str, str]
    """Of the Secret: the key, and launch.secrets."""


def make_manifests(start: PodStart) -> list[Manifest]:
    """Return the objects in the order in which they are created: what pods need comes first."""
    config = start.config
    name = make_resource_name(str(config.run.name))
    objects = [_make_secret(config, name, start.variables), _make_config_map(start, name)]
    is_job_set = config.launch.k8s.resource == "jobset"
    if config.launch.nodes > 1 and not is_job_set:
        objects.append(_make_service(config, name))
    return [*objects, _make_job_set(config, name) if is_job_set else _make_job(config, name)]


def render_yaml(objects: list[Manifest]) -> str:
    """Return the objects as the documents of one YAML file."""
    return "---\n".join(
        yaml.dump(each, Dumper=_BlockDumper, sort_keys=False, width=100) for each in objects
    )


class _BlockDumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes a text of several lines as a block, which people can read."""

    def represent_str(self, text: str) -> yaml.Node:
        style = "|" if "\n" in text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    def ignore_aliases(self, data: object) -> bool:
        """Labels that are in several places are written out in each."""
        return True


_BlockDumper.add_representer(str, _BlockDumper.represent_str)


# --- the objects ---


def _make_metadata(config: Config, name: str) -> Manifest:
    metadata: Manifest = {"name": name}
    if config.launch.k8s.namespace:
        metadata["namespace"] = config.launch.k8s.namespace
    return metadata | _make_labels(config, name)


def _make_labels(config: Config, name: str) -> Manifest:
    """Return labels, by which all objects of a run are found, and its name as it is."""
    return {
        "labels": {NAME_LABEL: "echelon", INSTANCE_LABEL: name},
        "annotations": {RUN_ANNOTATION: str(config.run.name)},
    }


def _make_secret(config: Config, name: str, variables: Mapping[str, str]) -> Manifest:
    metadata = _make_metadata(config, name)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "stringData": dict(variables),
    }


def _make_config_map(start: PodStart, name: str) -> Manifest:
    document = {"start": start.start, "config": start.config.to_dict()}
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _make_metadata(start.config, name),
        "data": {CONFIG_FILE.rpartition("/")[2]: text},
    }


def _make_service(config: Config, name: str) -> Manifest:
    """Return the headless Service by which pods find node 0, also before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _make_metadata(config, name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {INSTANCE_LABEL: name},
        },
    }


def _make_job(config: Config, name: str) -> Manifest:
    k8s = config.launch.k8s
    policy: list[Manifest] = [
        {"action": "Ignore", "onExitCodes": _match_codes("In", _CONTINUED_CODES)},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": _match_codes("NotIn", _COUNTED_CODES)},
    ]
    spec = _make_job_spec(config, name, f"{name}-0.{name}", policy, k8s.backoff_limit)
    spec["ttlSecondsAfterFinished"] = k8s.ttl_s
    if config.launch.nodes > 1:
        spec["template"]["spec"]["subdomain"] = name
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _make_metadata(config, name),
        "spec": spec,
    }


def _make_job_set(config: Config, name: str) -> Manifest:
    policy: list[Manifest] = [
        {"action": "FailJob", "onExitCodes": _match_codes("In", _CONTINUED_CODES)},
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    master = f"{name}-{REPLICATED_JOB}-0-0.{name}"
    job = {"spec": _make_job_spec(config, name, master, policy, backoff_limit=0)}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _make_metadata(config, name),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": config.launch.max_restarts,
                "rules": [
                    {
                        "name": "SavedOrEvicted",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "ttlSecondsAfterFinished": config.launch.k8s.ttl_s,
            "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": job}],
        },
    }


def _match_codes(operator: str, codes: Sequence[int]) -> Manifest:
    """Return what `onExitCodes` matches; the API server wants the codes in their order."""
    values = sorted(map(int, codes))
    return {"containerName": CONTAINER, "operator": operator, "values": values}


def _make_job_spec(
    config: Config, name: str, master: str, policy: list[Manifest], backoff_limit: int
) -> Manifest:
    nodes = config.launch.nodes
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": backoff_limit,
        "podFailurePolicy": {"rules": policy},
        "template": {
            "metadata": _make_labels(config, name),
            "spec": _make_pod_spec(config, name, master),
        },
    }


# --- the pod ---


def _make_pod_spec(config: Config, name: str, master: str) -> Manifest:
    launch, k8s = config.launch, config.launch.k8s
    mounts = [mount for text in k8s.volumes if (mount := parse_volume(text))]
    spec: Manifest = {
        "restartPolicy": "Never",  # the Job decides, and podFailurePolicy asks for it
        "terminationGracePeriodSeconds": k8s.grace_s,
        "enableServiceLinks": False,
        **_make_placement(k8s),
        "containers": [
            {
                "name": CONTAINER,
                "image": launch.container,
                "command": [launch.container_python, "-u", "-m", "echelon", "pod", CONFIG_FILE],
                **({"workingDir": k8s.workdir} if k8s.workdir else {}),
                "env": [
                    {"name": "MASTER_ADDR", "value": master if launch.nodes > 1 else "127.0.0.1"},
                    {"name": "MASTER_PORT", "value": str(MASTER_PORT)},
                    {"name": "WORLD_SIZE", "value": str(launch.nodes)},
                ],
                "envFrom": [{"secretRef": {"name": name}}],
                "resources": _make_resources(launch),
                "volumeMounts": [
                    {
                        "name": "config",
                        "mountPath": CONFIG_FILE.rpartition("/")[0],
                        "readOnly": True,
                    },
                    {"name": "shm", "mountPath": "/dev/shm"},
                    *(
                        {"name": f"volume-{number}", "mountPath": mount.path}
                        | ({"readOnly": True} if mount.is_read_only else {})
                        for number, mount in enumerate(mounts)
                    ),
                ],
            }
        ],
        "volumes": [
            {"name": "config", "configMap": {"name": name}},
            # The default of 64 MiB is too little for loaders and for NCCL.
            {"name": "shm", "emptyDir": _make_shared_memory(k8s)},
            *(
                {
                    "name": f"volume-{number}",
                    "persistentVolumeClaim": {"claimName": mount.claim}
                    | ({"readOnly": True} if mount.is_read_only else {}),
                }
                for number, mount in enumerate(mounts)
            ),
        ],
    }
    return spec


def _make_placement(k8s: KubernetesConfig) -> Manifest:
    """Return what decides where the pods may be and in whose name they run."""
    placement: Manifest = {}
    if k8s.service_account:
        placement["serviceAccountName"] = k8s.service_account
    else:
        placement["automountServiceAccountToken"] = False
    if k8s.priority_class:
        placement["priorityClassName"] = k8s.priority_class
    if k8s.pull_secrets:
        placement["imagePullSecrets"] = [{"name": name} for name in k8s.pull_secrets]
    if k8s.node_selector:
        placement["nodeSelector"] = dict(text.split("=", 1) for text in k8s.node_selector)
    if k8s.tolerations:
        placement["tolerations"] = [_make_toleration(text) for text in k8s.tolerations]
    return placement


def _make_toleration(text: str) -> Manifest:
    parsed = parse_toleration(text)
    assert parsed is not None  # the configuration was checked
    toleration: Manifest = {"key": parsed.key}
    if parsed.value is None:
        toleration["operator"] = "Exists"
    else:
        toleration |= {"operator": "Equal", "value": parsed.value}
    return toleration | ({"effect": parsed.effect} if parsed.effect else {})


def _make_resources(launch: LaunchConfig) -> Manifest:
    """Return what a pod asks for. Memory and GPUs are limits too; CPUs are not: a limit would slow
    the loaders down where the node has idle ones."""
    requests: Manifest = {}
    if launch.cpus_per_node:
        requests["cpu"] = str(launch.cpus_per_node)
    limits: Manifest = {}
    if launch.k8s.memory:
        limits["memory"] = launch.k8s.memory
    if launch.gpus_per_node:
        limits[launch.k8s.gpu_resource] = str(launch.gpus_per_node)
    requests |= limits
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def _make_shared_memory(k8s: KubernetesConfig) -> Manifest:
    limit = {"sizeLimit": k8s.shared_memory} if k8s.shared_memory else {}
    return {"medium": "Memory", **limit}

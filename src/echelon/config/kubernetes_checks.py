"""Validation of launch=k8s: what the API server would refuse, and what a pod could not go on with.

Names and quantities are checked by the rules of Kubernetes, so that a dry run shows every mistake.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from echelon.config.schema import Config, KubernetesConfig
from echelon.errors import Fault

TAINT_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_SUBDOMAIN = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
_QUALIFIED = rf"({_SUBDOMAIN}/)?{_LABEL}"
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_SELECTOR = re.compile(rf"{_QUALIFIED}=({_LABEL})?")
_TOLERATION = re.compile(
    rf"(?P<key>{_QUALIFIED})(=(?P<value>{_LABEL}))?(:(?P<effect>{'|'.join(TAINT_EFFECTS)}))?"
)
_VOLUME = re.compile(rf"(?P<claim>{_SUBDOMAIN}):(?P<path>/[^:,]*)(?P<read_only>:ro)?")


class VolumeMount(NamedTuple):
    """One item of `launch.k8s.volumes`."""

    claim: str
    path: str
    is_read_only: bool


class Toleration(NamedTuple):
    """One item of `launch.k8s.tolerations`."""

    key: str
    value: str | None
    effect: str | None


def parse_volume(text: str) -> VolumeMount | None:
    """Return the claim and the path of CLAIM:/PATH or CLAIM:/PATH:ro; None of anything else."""
    found = _VOLUME.fullmatch(text)
    if not found or ".." in PurePosixPath(found["path"]).parts or found["path"] == "/":
        return None
    return VolumeMount(found["claim"], str(PurePosixPath(found["path"])), bool(found["read_only"]))


def parse_toleration(text: str) -> Toleration | None:
    """Return the parts of KEY[=VALUE][:EFFECT]; None of anything else."""
    found = _TOLERATION.fullmatch(text)
    return Toleration(found["key"], found["value"], found["effect"]) if found else None


def find_kubernetes_faults(config: Config) -> Iterator[Fault]:
    """Yield every fault of the settings of launch=k8s."""
    launch, k8s = config.launch, config.launch.k8s
    yield from _check_image(launch.container)
    yield from _check_names(k8s)
    yield from _check_quantities(k8s)
    yield from _check_placement(k8s)
    yield from _check_volumes(config)
    for key, value in {"spares": launch.spares or None, "min_nodes": launch.min_nodes}.items():
        if value is not None:
            yield Fault(
                f"launch.{key}={value}, but with launch=k8s a run needs all of its pods: when one "
                "is lost the others save, and Kubernetes starts them again",
                f"leave launch.{key} out",
            )
    if isinstance(launch.gpus_per_node, str):
        yield Fault(
            f"launch.gpus_per_node={launch.gpus_per_node}, but launch=k8s knows no types of GPUs",
            "give their number, and choose nodes by launch.k8s.node_selector, as in "
            "[nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3]",
        )
    if launch.preflight:
        yield Fault(
            "launch.preflight=true, but launch=k8s starts nothing on its nodes before the run",
            "leave launch.preflight out, and see `echelon doctor` in a pod of the image",
        )


def _check_image(image: str | None) -> Iterator[Fault]:
    if image is None:
        yield Fault(
            "launch=k8s without an image for its pods",
            "name one that has echelon and your code: launch.container=REGISTRY/NAME:TAG",
        )
    elif not re.fullmatch(r"[a-z0-9][A-Za-z0-9._:/@-]*", image) or image.endswith(".sif"):
        yield Fault(
            f"launch.container={image!r} is not an image that a node of Kubernetes can pull",
            "give REGISTRY/NAME:TAG, as in `docker pull REGISTRY/NAME:TAG`",
        )


def _check_names(k8s: KubernetesConfig) -> Iterator[Fault]:
    """Yield a fault for each name of something that cannot exist by that name."""
    names: dict[str, list[str | None]] = {
        "namespace": [k8s.namespace],
        "service_account": [k8s.service_account],
        "priority_class": [k8s.priority_class],
        "pull_secrets": [*k8s.pull_secrets],
    }
    for key, given in names.items():
        for name in given:
            if name is not None and not (re.fullmatch(_SUBDOMAIN, name) and len(name) <= 253):
                yield Fault(
                    f"launch.k8s.{key}: {name!r} is not a name in Kubernetes",
                    "use lower-case letters, digits and '-', with a letter or digit at both ends",
                )
    if k8s.context is not None and (not k8s.context or k8s.context.startswith("-")):
        yield Fault(
            f"launch.k8s.context={k8s.context!r} is not a context of kubectl",
            "see `kubectl config get-contexts`",
        )
    if not re.fullmatch(rf"{_SUBDOMAIN}/{_LABEL}", k8s.gpu_resource):
        yield Fault(
            f"launch.k8s.gpu_resource={k8s.gpu_resource!r} is not the name of a resource",
            "give one such as nvidia.com/gpu; `kubectl describe node` lists them",
        )


def _check_quantities(k8s: KubernetesConfig) -> Iterator[Fault]:
    for key in ("memory", "shared_memory"):
        value = getattr(k8s, key)
        if value is not None and not _QUANTITY.fullmatch(value):
            yield Fault(
                f"launch.k8s.{key}={value} is not a quantity of Kubernetes",
                "write one such as 64Gi",
            )


def _check_placement(k8s: KubernetesConfig) -> Iterator[Fault]:
    """Yield faults of what decides on which nodes the pods may be."""
    for text in k8s.node_selector:
        if not _SELECTOR.fullmatch(text):
            yield Fault(
                f"launch.k8s.node_selector: {text!r} is not the label of a node",
                "write KEY=VALUE, as `kubectl get nodes --show-labels` shows them",
            )
    for text in k8s.tolerations:
        if parse_toleration(text) is None:
            yield Fault(
                f"launch.k8s.tolerations: {text!r} is not a taint",
                f"write KEY, KEY=VALUE or KEY=VALUE:EFFECT, with one of {', '.join(TAINT_EFFECTS)}",
            )


def _check_volumes(config: Config) -> Iterator[Fault]:
    """Yield faults of volumes, and of a run folder that would be lost with its pod."""
    k8s, mounts = config.launch.k8s, []
    for text in k8s.volumes:
        if (mount := parse_volume(text)) is None:
            yield Fault(
                f"launch.k8s.volumes: {text!r} is not a claim and a path",
                "write CLAIM:/PATH, or CLAIM:/PATH:ro for one that is only read",
            )
        else:
            mounts.append(mount)
    paths = [mount.path for mount in mounts]
    for path in {path for path in paths if paths.count(path) > 1}:
        yield Fault(f"launch.k8s.volumes has {path} more than once", "give each its own path")
    for path in {path for path in paths if path in ("/dev/shm", "/etc/echelon")}:
        yield Fault(f"launch.k8s.volumes: {path} is used by the pods already", "give another path")
    if k8s.workdir is not None and not k8s.workdir.startswith("/"):
        yield Fault(
            f"launch.k8s.workdir={k8s.workdir} is not a path from the root",
            "give one of the image, such as launch.k8s.workdir=/workspace",
        )
    if len(mounts) == len(k8s.volumes):
        yield from _check_run_folder(config, mounts)


def _check_run_folder(config: Config, mounts: list[VolumeMount]) -> Iterator[Fault]:
    folder = PurePosixPath(config.run.dir)
    around = [mount for mount in mounts if folder.is_relative_to(mount.path)]
    example = mounts[0].path if mounts else "/mnt/data"
    volumes = "" if mounts else f"'launch.k8s.volumes=[CLAIM:{example}]' "
    if not around:
        is_mirrored = config.trainer.mirror is not None and config.launch.nodes == 1
        if not (is_mirrored and folder.is_absolute()):
            yield Fault(
                f"run.dir={config.run.dir} is in none of the volumes, so the run would be lost "
                "with its pods",
                f"add {volumes}run.dir={example}/runs",
            )
    elif max(around, key=lambda mount: len(mount.path)).is_read_only:
        yield Fault(
            f"run.dir={config.run.dir} is in a volume that is only read", "mount it without :ro"
        )

"""Pyxis, the plugin by which `srun` starts a step in a container of enroot.

Options as documented in Pyxis' README: --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH,
--container-mounts=SRC:DST[:FLAGS],…, --container-workdir=PATH, --no-container-remap-root. All
exported variables of the host are set in the container. GPUs and InfiniBand devices come by hooks
of enroot, which NVIDIA_VISIBLE_DEVICES and MELLANOX_VISIBLE_DEVICES turn on.
"""

from __future__ import annotations

from echelon.launch.containers.runtime import Container, ContainerRuntime


class PyxisRuntime(ContainerRuntime):
    name = "pyxis"
    programs = ("srun",)
    launchers = ("slurm",)
    installation = "ask for the plugin Pyxis, or use another launch.container_runtime"
    reserved_characters = ContainerRuntime.reserved_characters + " \t"
    """enroot writes mounts into a table with blanks between its columns."""

    def make_prefix(self, container: Container) -> list[str]:
        return []

    def make_srun_options(self, container: Container) -> list[str]:
        mounts = [f"{folder}:{folder}" for folder in container.folders]
        mounts += [":".join([*m[:2], *(["ro"] if m.read_only else [])]) for m in container.mounts]
        return [
            f"--container-image={format_enroot_reference(container)}",
            *([f"--container-mounts={','.join(mounts)}"] if mounts else []),
            # Else the ids of files in the run folder would be others inside.
            "--no-container-remap-root",
            *container.args,
        ]


def format_enroot_reference(container: Container) -> str:
    """Return an image as enroot names it: a registry's host ends with `#`."""
    if container.is_path:
        return container.image
    reference = container.image.removeprefix("docker://")
    host, slash, rest = reference.partition("/")
    is_host = slash and "#" not in reference and ("." in host or ":" in host or host == "localhost")
    return f"{host}#{rest}" if is_host else reference

"""Apptainer, and Singularity, which has the same options.

Options as documented for `apptainer exec`: --bind SRC:DST:OPTS, --pwd, --nv, --rocm. The process
ids, the network and the host name are those of the host by default, /dev with its InfiniBand
devices and the home folder are there, and the variables of the host are passed on.
"""

from __future__ import annotations

from echelon.launch.containers.runtime import (
    Container,
    ContainerRuntime,
    make_folder_loop,
    make_node_script,
)

_START = make_node_script(
    ("apptainer", "singularity"),
    "Apptainer",
    f"""
folders=$1; shift
{make_folder_loop("--bind", "$folder:$folder")}
[ -e /dev/nvidiactl ] && set -- --nv "$@"
[ -e /dev/kfd ] && set -- --rocm "$@"
exec "$program" exec --pwd "$here" "$@"
""",
)
_SCHEMES = ("docker://", "library://", "oras://", "shub://", "docker-archive:", "instance://")


class ApptainerRuntime(ContainerRuntime):
    name = "apptainer"
    programs = ("apptainer", "singularity")
    installation = "install Apptainer, or load its module (launch.setup=['module load apptainer'])"

    def make_prefix(self, container: Container) -> list[str]:
        image = container.image
        if not container.is_path and not image.startswith(_SCHEMES):
            image = f"docker://{image}"
        words = ["sh", "-c", _START, "sh", ":".join(container.folders)]
        for mount in container.mounts:
            words += ["--bind", ":".join([*mount[:2], *(["ro"] if mount.read_only else [])])]
        return [*words, *container.args, image]

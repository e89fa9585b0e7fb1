"""enroot without Slurm: `enroot start`, for launch=local and launch=ssh.

Options as documented for `enroot start`: --env KEY, --mount FSTAB (fields separated by colons), and
the name of a container or the file of an image. It makes no namespace of its own for process ids,
network, IPC and host name unless it is told to.
"""

from __future__ import annotations

from echelon.errors import Fault
from echelon.launch.containers.runtime import (
    PASS_VARIABLES_LINES,
    Container,
    ContainerRuntime,
    make_folder_loop,
    make_node_script,
)

_START = make_node_script(
    ("enroot",),
    "enroot",
    f"""
export ECHELON_START_FOLDER="$here"
folders=$1; shift
{PASS_VARIABLES_LINES}
{make_folder_loop("--mount", "$folder:$folder:none:x-create=dir,rbind,rw")}
exec "$program" start "$@"
""",
)
_ENTER_FOLDER = 'cd "$ECHELON_START_FOLDER" && exec "$@"'
"""enroot has no option for the current folder."""


class EnrootRuntime(ContainerRuntime):
    name = "enroot"
    programs = ("enroot",)
    launchers = ("local", "ssh")
    installation = "install enroot, or use another launch.container_runtime"
    reserved_characters = ContainerRuntime.reserved_characters + " \t"

    def make_prefix(self, container: Container) -> list[str]:
        words = ["sh", "-c", _START, "sh", ":".join(container.folders)]
        for source, target, read_only in container.mounts:
            access = "ro" if read_only else "rw"
            words += ["--mount", f"{source}:{target}:none:x-create=auto,rbind,{access}"]
        return [*words, *container.args, "--", container.image, "sh", "-c", _ENTER_FOLDER, "sh"]

    def find_image_fault(self, container: Container) -> Fault | None:
        if container.is_path or "/" not in container.image:
            return None  # a file, or the name of a container that was created
        return Fault(
            f"launch.container={container.image} is in a registry, and enroot starts files",
            f"get the file first: enroot import docker://{container.image}",
        )

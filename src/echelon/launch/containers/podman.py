"""podman: containers of a user without a daemon.

Options as documented for `podman run`. The process ids, network, IPC and host name are those of the
host, as without a container: a run folder records them, ranks meet at the host's addresses, and
loaders share memory in /dev/shm. Without root, `--userns=keep-id` makes the files in the run folder
the user's own. A GPU is given by its CDI name, which the NVIDIA Container Toolkit registers.

A container is not a child of `podman run`, but of its monitor `conmon`. So the agent inside watches
the process on the host that started it (`ECHELON_OUTSIDE_PID`), and ends when that is killed. USR2
ends a conmon, so in a job of Slurm the notice is TERM, which it passes on.
"""

from __future__ import annotations

from echelon.launch.containers.runtime import (
    PASS_VARIABLES_LINES,
    Container,
    ContainerRuntime,
    make_folder_loop,
    make_node_script,
)
from echelon.utils.processes import OUTSIDE_PID_VARIABLE

_START = make_node_script(
    ("podman",),
    "podman",
    f"""
export {OUTSIDE_PID_VARIABLE}=$$
folders=$1; shift
{PASS_VARIABLES_LINES}
{make_folder_loop("--volume", "$folder:$folder")}
if [ -e /dev/infiniband ]; then set -- --device=/dev/infiniband "$@"; fi
if [ -e /dev/nvidiactl ]; then set -- --device=nvidia.com/gpu=all "$@"; fi
if [ "$(id -u)" = 0 ]; then set -- --user=0:0 "$@"; else set -- --userns=keep-id "$@"; fi
exec podman run --rm --interactive --umask="$(umask)" --workdir="$here" \\
  --network=host --pid=host --ipc=host --uts=host --security-opt=label=disable "$@"
""",
)


class PodmanRuntime(ContainerRuntime):
    name = "podman"
    programs = ("podman",)
    installation = "install podman: apt-get install podman, or dnf install podman"
    takes_notice_by_term = True

    def make_prefix(self, container: Container) -> list[str]:
        words = ["sh", "-c", _START, "sh", ":".join(container.folders)]
        for mount in container.mounts:
            words += ["--volume", ":".join([*mount[:2], *(["ro"] if mount.read_only else [])])]
        # The image's own entry point would take the command as its arguments.
        words += [*container.args, "--entrypoint=[]"]
        if not container.is_path:
            return [*words, container.image]
        # With an overlay: what is written, such as places of mounts, is not for the folder.
        return [*words, "--rootfs", f"{container.image}:O"]

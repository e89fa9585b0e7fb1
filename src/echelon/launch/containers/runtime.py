"""What a container runtime is: from an image and mounts to the words that start a command in it.

What has to be decided on the node (which devices it has, who the user is, which variables are set)
is decided there, by a few lines of `sh` that every prefix begins with. So the same words are right
on a login node without a GPU and on the nodes of a job, and `--dry-run` shows them.

No value of a variable is ever a word of a command, which everybody on the machine may see: values
pass through the environment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from echelon.errors import Fault

PROGRAM_MISSING = 127
"""The exit code of a shell that does not find a program, which the words before a command give
where the runtime is not there."""


class Mount(NamedTuple):
    """A folder or file of the host, and where the container sees it."""

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class Container:
    """An image and what is mounted into it."""

    image: str
    mounts: tuple[Mount, ...] = ()
    folders: tuple[str, ...] = ()
    """Mounted at the same paths, on nodes that have them."""
    args: tuple[str, ...] = ()
    """More options of the runtime."""

    @property
    def is_path(self) -> bool:
        """Whether the image is a file or a folder, and no reference to a registry."""
        return is_image_path(self.image)


class ContainerRuntime(ABC):
    """One value of `launch.container_runtime`. Instances have no state."""

    name: ClassVar[str]
    programs: ClassVar[tuple[str, ...]]
    """One of them has to be on the PATH of every node."""
    launchers: ClassVar[tuple[str, ...]] = ("local", "ssh", "slurm")
    """The values of `launch.kind` with which it works."""
    installation: ClassVar[str]
    """What to do where it is not there."""
    reserved_characters: ClassVar[str] = ":,\"'\\$`\n"
    """What no path of a mount may contain, because the runtime gives it a meaning."""
    takes_notice_by_term: ClassVar[bool] = False
    """Whether Slurm has to announce the end of a job's time with TERM, since a process of the
    runtime in the job would die of USR2."""

    @abstractmethod
    def make_prefix(self, container: Container) -> list[str]:
        """Return the words before a command that has to run in the container, in the current folder
        of the process that starts them."""

    def make_srun_options(self, container: Container) -> list[str]:
        """Return options of `srun` for a step in the container; see `pyxis.py`."""
        return []

    def find_image_fault(self, container: Container) -> Fault | None:
        """Return why the runtime cannot start this kind of image, if it cannot."""
        return None


def is_image_path(image: str) -> bool:
    """Return whether an image is named by its path, as a file or a folder."""
    if "://" in image:
        return False
    return image.startswith(("/", "./", "../", "~")) or image.endswith(
        (".sif", ".sqsh", ".sqfs", ".squashfs", ".img")
    )


def make_node_script(programs: Sequence[str], name: str, lines: str) -> str:
    """Return the lines of `sh` that run on a node before the container.

    In `lines`, `$program` is the first of the programs that is there and `$here` the current
    folder. The arguments are the words of the prefix behind `sh`, and then the command.
    """
    return f"""set -f
for program in {" ".join(programs)} ""; do
  command -v "$program" > /dev/null && break
done
if [ -z "$program" ]; then
  echo "error: {name} is not on the PATH of $(uname -n)" >&2
  exit {PROGRAM_MISSING}
fi
here=$(pwd -P)
{lines.strip()}"""


def make_folder_loop(option: str, value: str) -> str:
    """Return the lines that mount the folders in `$folders` which the node has, by an option before
    the arguments."""
    return f"""IFS=:
for folder in $folders; do
  if [ -d "$folder" ]; then set -- {option} "{value}" "$@"; fi
done
unset IFS"""


PASS_VARIABLES_LINES = r"""for name in $(awk 'BEGIN { for (n in ENVIRON) print n }' < /dev/null); do
  case $name in
    *[!A-Za-z0-9_]* | [0-9]* | AWK*) ;;
    PATH | HOME | PWD | OLDPWD | SHLVL | SHELL | TMPDIR | TERM | HOSTNAME | _ | MANPATH) ;;
    LD_* | PYTHONPATH | PYTHONHOME | PYTHONSTARTUP | PYTHONUSERBASE | VIRTUAL_ENV | PIP_*) ;;
    CONDA_* | XDG_* | DBUS_* | MODULE* | LOADEDMODULES | LMOD_*) ;;
    *) set -- --env "$name" "$@" ;;
  esac
done"""
"""Pass on all variables but those that are about the files of the host, by options `--env NAME`.
The values are taken from the environment."""


def expand_path(path: str) -> str:
    """Return a path as it is on this machine, absolute and without `~`."""
    return str(Path(path).expanduser().absolute())

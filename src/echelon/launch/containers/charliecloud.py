"""Charliecloud: `ch-run`, which needs neither root nor a daemon.

Options as documented for `ch-run`: --bind=SRC:DST, --cd, --set-env, --unset-env. An image is a
folder, a SquashFS file, or a name in the storage of `ch-image`. Only the files are the image's:
process ids, network and devices are those of the host, and variables are passed on. What a GPU
needs is put into the image once: `ch-fromhost --nvidia IMAGE`.
"""

from __future__ import annotations

from echelon.launch.containers.runtime import (
    Container,
    ContainerRuntime,
    make_folder_loop,
    make_node_script,
)

_START = make_node_script(
    ("ch-run",),
    "Charliecloud (ch-run)",
    f"""
export USER="${{USER:-$(id -un)}}"
image=$1 folders=$2; shift 2
{make_folder_loop("--bind", "$folder:$folder")}
# An image may lack the places of mounts, and ch-run makes none.
is_place=
for word; do
  case $is_place$word in
    --) break ;;
    1*) place=$image/${{word#*:}}
      if [ -d "$image" ] && [ ! -e "$place" ]; then
        if [ -d "${{word%%:*}}" ]; then mkdir -p "$place"
        else mkdir -p "${{place%/*}}" && : > "$place"; fi 2> /dev/null
      fi ;;
  esac
  if [ "$word" = --bind ]; then is_place=1; else is_place=; fi
done
if [ -f "$image/ch/environment" ]; then set -- --set-env "$@"; fi
exec ch-run --unset-env="LD_*" --unset-env="CONDA_*" \\
  --set-env=PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \\
  --cd="$here" "$@"
""",
)


class CharliecloudRuntime(ContainerRuntime):
    name = "charliecloud"
    programs = ("ch-run",)
    installation = "install Charliecloud: apt-get install charliecloud"

    def make_prefix(self, container: Container) -> list[str]:
        words = ["sh", "-c", _START, "sh", container.image, ":".join(container.folders)]
        for mount in container.mounts:
            words += ["--bind", f"{mount.source}:{mount.target}"]
        return [*words, *container.args, container.image, "--"]

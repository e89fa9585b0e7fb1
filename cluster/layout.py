"""Every name, address and path of one cluster."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template

from shell import CannotBeMade

TEMPLATES = Path(__file__).parent / "templates"
NODES = 3
CPUS = 4
GPUS = 4


def default_folder() -> Path:
    """Return the folder for all state of a cluster, unless another is given."""
    return Path(os.environ.get("ECHELON_CLUSTER", "/tmp/echelon-cluster"))


def boot_id() -> str:
    """Return what identifies this boot: namespaces do not survive the next."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True)
class Layout:
    """Host 0 runs the controller, hosts 1 to 3 are the nodes; each is a network namespace."""

    folder: Path
    prefix: str = "n"
    net: str = "10.213.37"
    accounting: bool = False
    boot: str = ""

    @property
    def controller(self) -> str:
        return f"{self.prefix}0"

    @property
    def nodes(self) -> list[str]:
        return [f"{self.prefix}{i}" for i in range(1, NODES + 1)]

    @property
    def hosts(self) -> list[str]:
        return [self.controller, *self.nodes]

    @property
    def bridge(self) -> str:
        return f"ech-{self.prefix}"

    def port(self, host: str) -> str:
        """Return the bridge's end of a host's cable (a veth pair)."""
        return f"ech-{host}"

    def address(self, host: str) -> str:
        return f"{self.net}.{10 + self.hosts.index(host)}"

    @property
    def slurm_conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def ssh_config(self) -> Path:
        return self.folder / "ssh" / "config"

    def log(self, daemon: str) -> Path:
        return self.folder / "log" / f"{daemon}.log"

    def pid_file(self, daemon: str) -> Path:
        return self.folder / "run" / f"{daemon}.pid"

    @property
    def slurm_env(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.slurm_conf)}

    def render(self, template: str, **more: str) -> str:
        """A configuration file's text."""
        last = self.address(self.nodes[-1]).rpartition(".")[2]
        return Template((TEMPLATES / template).read_text()).substitute(
            cluster=f"echelon_{self.prefix}",
            folder=self.folder,
            controller=self.controller,
            controller_address=self.address(self.controller),
            first_node=self.nodes[0],
            first_address=self.address(self.nodes[0]),
            other_nodes=f"{self.prefix}[2-{NODES}]",
            other_addresses=f"{self.net}.[12-{last}]",
            cpus=CPUS,
            gpus=GPUS,
            last_gpu=GPUS - 1,
            accounting_type="accounting_storage/" + ("slurmdbd" if self.accounting else "none"),
            accounting_host=self._accounting_host() if self.accounting else "",
            **more,
        )

    def _accounting_host(self) -> str:
        """Return the lines of slurm.conf for slurmdbd; with munge the password is its socket."""
        socket = f"{self.folder}/munge/socket"
        return "\n".join(
            [
                f"AccountingStorageHost={self.controller}",
                f"AccountingStoragePass={socket}",
                "AccountingStorageTRES=gres/gpu",  # beside cores and memory
            ]
        )

    def check(self) -> None:
        """Raise one sentence if no cluster can be made with these settings."""
        if not re.fullmatch(r"[a-z]{1,8}", self.prefix):
            raise CannotBeMade(f"--prefix has to be 1 to 8 lower-case letters, not {self.prefix!r}")
        if not re.fullmatch(r"(\d{1,3}\.){2}\d{1,3}", self.net):
            raise CannotBeMade(f"--net has to be three numbers like 10.213.37, not {self.net!r}")
        if re.search(r"[\s\[\]$#%\"\\]", str(self.folder)):
            raise CannotBeMade(f"slurm.conf cannot name the folder {str(self.folder)!r}")
        if len(str(self.folder)) > 60:
            raise CannotBeMade(f"{self.folder} is too long: sockets in it need a shorter path")
        if not load(self.folder) and self.folder.exists() and any(self.folder.iterdir()):
            raise CannotBeMade(f"{self.folder} holds something else, which `down` would remove")

    def save(self) -> None:
        """Write the settings to the folder, so that later commands find them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self.folder / "layout.new"
        new.write_text(json.dumps(asdict(self), default=str))
        new.replace(self.folder / "layout.json")


def load(folder: Path) -> Layout | None:
    """Return the settings that `up` left in the folder; None if there are none."""
    try:
        saved = json.loads((folder / "layout.json").read_text())
        return Layout(**{**saved, "folder": folder})
    except (OSError, ValueError, TypeError):
        return None

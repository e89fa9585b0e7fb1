"""The one list of launchers. Their modules are imported when they are chosen."""

from __future__ import annotations

from importlib import import_module

from echelon.config.schema import Config
from echelon.launch.launcher import Launcher

LAUNCHER_CLASSES = {
    "inline": "echelon.launch.inline_launcher:InlineLauncher",
    "local": "echelon.launch.local_launcher:LocalLauncher",
    "env": "echelon.launch.env_launcher:EnvLauncher",
    "ssh": "echelon.launch.ssh.launcher:SshLauncher",
    "slurm": "echelon.launch.slurm.launcher:SlurmLauncher",
    "k8s": "echelon.launch.k8s.launcher:KubernetesLauncher",
}
"""`launch.kind` → MODULE:CLASS."""


def make_launcher(config: Config) -> Launcher:
    """Return the launcher of this configuration.

    A program takes the place of the process that runs it, so with launch=inline it is given one of
    its own, as with launch=local.
    """
    kind = config.launch.kind
    name = "local" if config.program and kind == "inline" else kind
    module, _, class_name = LAUNCHER_CLASSES[name].partition(":")
    launcher: Launcher = getattr(import_module(module), class_name)()
    return launcher

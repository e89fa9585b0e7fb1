"""`echelon cluster`."""

from __future__ import annotations

from echelon.commands.arguments import make_parser, parse_with_overrides
from echelon.errors import EchelonError, Fault

_SECTIONS = ("launch.", "replica.")


def cluster(words: list[str]) -> int:
    """`echelon cluster`: what is free on a Slurm cluster, and when a job would start."""
    parser = make_parser(
        "cluster",
        "Show what is free on a Slurm cluster now and, given settings of launch, when a job like "
        "this would start and what to change to start sooner.",
        """\
  echelon cluster                                      on a login node
  echelon cluster login.uni.edu                        from a laptop, over ssh
  echelon cluster login launch.nodes=2 launch.gpus_per_node=a100:4

Settings are those of `echelon train launch=slurm`, and defaults of echelon.yaml count. Nothing is
submitted: `sbatch --test-only` is asked about the job and, if it would have to wait, about at most
six changes: half the time, half the nodes, another type of GPU, other partitions that you may use.
The times are Slurm's estimates; jobs that end early start others earlier.

GPUS FREE are those on nodes where jobs start and a CPU is free. WAITING are jobs that wait for
resources or their turn, not for other jobs, a time or a person. FULL nodes have no free CPU; DOWN
are also those that are drained, reserved or in maintenance.

--json prints {version: 1, host, cluster, slurm, user, time, partitions: [{name, default, usable,
obstacle, max_time_s, nodes: {total, idle, mixed, full, down}, cpus: {free, total}, memory_mb,
gpus: [{type, free, total}], waiting}], job: {settings, defaults, start, wait_s, nodes, partition,
reason, tried, sooner: [{settings, start, wait_s, …}]}}.

exit codes: 3 there is no Slurm, or it does not answer; 8 the host cannot be reached""",
    )
    parser.add_argument(
        "host",
        nargs="?",
        metavar="HOST",
        help="a login node, as ssh knows it (default: launch.login, where no Slurm is)",
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="e.g. launch.nodes=2")
    parser.add_argument("--ssh", metavar="COMMAND", help="e.g. 'ssh -F FILE' (default: ssh)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    given = parse_with_overrides(parser, words, _list_settings)
    typed = [word for word in [given.host, *given.settings] if word is not None]
    settings = [word for word in typed if "=" in word]
    hosts = [word for word in typed if "=" not in word]
    if len(hosts) > 1:
        raise EchelonError(
            Fault(f"{' and '.join(hosts)} are {len(hosts)} hosts", "name one login node")
        )
    if faults := [_make_fault(word) for word in settings if not word.startswith(_SECTIONS)]:
        raise EchelonError(*faults)
    from echelon.cluster_info.login_probe import make_login_node
    from echelon.cluster_info.show_command import show_cluster

    node = make_login_node(hosts[0] if hosts else None, given.ssh)
    config, from_files = None, []
    if settings:
        from echelon.config.compose import compose
        from echelon.entrypoint import load_project_defaults

        defaults = load_project_defaults()
        config = compose(["launch=slurm", *settings], defaults=defaults)
        chosen = {word.partition("=")[0] for word in settings}
        found = defaults.select_for_launcher("slurm").items()
        from_files = [f"{key}={default.value}" for key, default in found if key not in chosen]
    return show_cluster(node, config, settings, from_files, given.json)


def _list_settings() -> list[str]:
    from echelon.config.settings_help import list_settings

    return [s.name for s in list_settings() if s.name.startswith(_SECTIONS)]


def _make_fault(word: str) -> Fault:
    if word == "launch=slurm":
        return Fault("launch=slurm is what this command is about", "leave it out")
    return Fault(
        f"{word} does not change when a job starts",
        "give settings of launch and replica, such as launch.nodes=2 launch.time=4:00:00",
    )

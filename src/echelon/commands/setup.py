"""`echelon setup ssh` and `echelon setup cluster`."""

from __future__ import annotations

import os

from echelon.commands.arguments import make_parser


def setup(words: list[str]) -> int:
    """`echelon setup ssh`: make a machine a host of launch=ssh; `echelon setup cluster`: write a
    file of defaults for a Slurm cluster."""
    if words[:1] == ["cluster"]:
        return _setup_cluster(words[1:])
    parser = make_parser(
        "setup",
        "Make a machine a host of launch=ssh: a key if there is none, an entry in ssh's "
        "configuration, and a check of its Python, torch and GPUs. For a Slurm cluster see "
        "`echelon setup cluster --help`.",
        """\
Nothing that exists is touched: not a key, not an entry. What will be written is shown first; at a
terminal it asks, elsewhere it needs --yes and else stops with code 2. The exit code is 8 if the
host cannot be reached or is not ready yet; then fix what it reports and type the same again.""",
    )
    parser.add_argument("what", choices=["ssh"])
    parser.add_argument("host", metavar="HOST", help="a name or address; USER@HOST, HOST:PORT")
    parser.add_argument("--user")
    parser.add_argument("--port", type=int)
    parser.add_argument("--name", metavar="ALIAS", help="what to call it (default: HOST)")
    parser.add_argument("--key", metavar="FILE", help="(default: ~/.ssh/id_ed25519)")
    parser.add_argument("--config", metavar="FILE", help="ssh's (default: ~/.ssh/config)")
    parser.add_argument(
        "--install", action="store_true", help="put the public key on the host, by a password, say"
    )
    parser.add_argument("--yes", action="store_true", help="ask nothing")
    given = parser.parse_args(words)
    from echelon.ssh_setup.command import SshSetupOptions, setup_ssh

    wanted = SshSetupOptions(
        given.host,
        given.user,
        given.port,
        given.name,
        given.key,
        given.config,
        given.install,
        given.yes,
    )
    return setup_ssh(wanted)


def _setup_cluster(words: list[str]) -> int:
    parser = make_parser(
        "setup cluster",
        "Look at a Slurm cluster, and write an echelon.yaml with defaults of launch=slurm in which "
        "a comment explains every line.",
        """\
  echelon setup cluster                     on a login node
  echelon setup cluster login.uni.edu       from a laptop, over ssh; a shell there is enough
  echelon setup cluster login --dry-run     only show the file

It looks at partitions, accounts, QoS and their limits, GPUs, reservations, licences, modules,
folders that nodes share, Pythons and programs for containers. Nothing is written there, and no
secret is read. A file that exists is not replaced before you have seen the difference: at a
terminal it asks, elsewhere it needs --force and else stops with code 2.

--json prints {version: 1, host, cluster, slurm, user, partitions, accounting, accounts, qos,
reservations, licenses, modules, pythons, containers, folders, settings, file, written, text}.

exit codes: 3 there is no Slurm, or it does not answer; 8 the host cannot be reached""",
    )
    parser.add_argument(
        "host",
        nargs="?",
        metavar="HOST",
        help="a login node, as ssh knows it (default: launch.login, where no Slurm is)",
    )
    parser.add_argument("--ssh", metavar="COMMAND", help="e.g. 'ssh -F FILE' (default: ssh)")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--file", metavar="FILE", help="(default: echelon.yaml in this folder)")
    place.add_argument(
        "--user", action="store_true", help="for all your projects: ~/.config/echelon/echelon.yaml"
    )
    parser.add_argument("--force", action="store_true", help="replace a file that exists")
    parser.add_argument("--dry-run", action="store_true", help="show the file and write nothing")
    parser.add_argument("--json", action="store_true", help="what was found, as JSON")
    given = parser.parse_args(words)
    from echelon.cluster_info.login_probe import make_login_node
    from echelon.cluster_info.setup_command import SetupOptions, choose_file, setup_cluster

    file = choose_file(given.file, given.user, os.environ)
    options = SetupOptions(file, given.force, given.dry_run, given.json)
    return setup_cluster(make_login_node(given.host, given.ssh), options)

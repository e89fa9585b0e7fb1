"""`echelon setup ssh`."""

from __future__ import annotations

from echelon.commands.arguments import make_parser


def setup(words: list[str]) -> int:
    """`echelon setup ssh`: make a machine a host of launch=ssh."""
    parser = make_parser(
        "setup",
        "Make a machine a host of launch=ssh: a key if there is none, an entry in ssh's "
        "configuration, and a check of its Python, torch and GPUs.",
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

"""Looking at machines. `gpus` is typed often: it is to start in a blink."""

from __future__ import annotations

from echelon.commands.arguments import (
    add_dir_argument,
    make_parser,
    parse_gpu_count,
    parse_interval_s,
    parse_seconds,
)


def gpus(words: list[str]) -> int:
    parser = make_parser(
        "gpus",
        "Show the GPUs of this machine, or of others, and every process on them.",
        """\
A terminal gets a table; a pipe a line per GPU and per process, whole:
  echelon gpus | grep NAME
  free=$(echelon gpus --free 2) &&
  CUDA_VISIBLE_DEVICES=$free echelon train launch=local

– is a value that this GPU does not tell, ? somebody who cannot be seen from here, such as a process
of another container. A process whose run is over is marked as an orphan. JOB is Slurm's, RUN is
Echelon's; both are known of your own processes, a job also of others' where Slurm uses cgroups.

--free prints what CUDA_VISIBLE_DEVICES takes: indices; UUIDs where GPUs of several models are
mixed, which CUDA numbers in its own order, and UUIDs of MIG's slices. What CUDA_VISIBLE_DEVICES
hides is left out.

--json prints {version: 1, time, nodes: [{host, fault, driver, cuda, stale_s, gpus: [{index, uuid,
name, fault, use_percent, memory_used_bytes, memory_total_bytes, temperature_c, power_w,
power_limit_w, fan_percent, idle, mig, processes_told, processes: [{pid, user, memory_bytes, age_s,
command, job, run, run_folder, orphan}], slices: [{index, uuid, name, memory_used_bytes,
memory_total_bytes, idle, processes}]}]}]}; with --free {version: 1, free: [...]}. What is not
known is null. With --watch, one object on each line.

exit codes: 6 there is no GPU, 7 fewer are free than asked for""",
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=parse_interval_s,
        const=0.5,
        metavar="SECONDS",
        help="again and again, until Ctrl-C (default: every 0.5 s)",
    )
    parser.add_argument(
        "--user", action="append", default=[], metavar="NAME", help="only theirs; `me`; repeatable"
    )
    parser.add_argument("--gpu", metavar="0,2", help="only these; also 4-7")
    parser.add_argument(
        "--free",
        nargs="?",
        type=parse_gpu_count,
        const=0,
        metavar="N",
        help="print N that are idle, or all",
    )
    parser.add_argument("--hosts", metavar="A,B", help="other machines, over ssh")
    parser.add_argument(
        "--slurm",
        nargs="?",
        const="",
        metavar="PARTITION",
        help="the machines of my running jobs, or of a partition",
    )
    parser.add_argument("--ssh", default="ssh", metavar="COMMAND", help="e.g. 'ssh -F FILE'")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    is_remote = given.hosts is not None or given.slurm is not None
    if given.free is not None and (is_remote or given.watch or given.user):
        parser.error("--free is about all GPUs of this machine, once")
    from echelon.gpus import command, selection

    wanted = command.GpusOptions(
        tuple(selection.get_current_user() if name == "me" else name for name in given.user),
        () if given.gpu is None else tuple(selection.parse_gpu_indices(given.gpu)),
        given.json,
        given.watch,
        () if given.hosts is None else tuple(selection.parse_host_names(given.hosts)),
        given.slurm,
        given.ssh,
    )
    return (
        command.show_gpus(wanted)
        if given.free is None
        else command.show_idle_gpus(given.free or None, wanted)
    )


def doctor(words: list[str]) -> int:
    from pathlib import Path

    parser = make_parser(
        "doctor",
        "Look at this machine: Python, torch, driver, GPUs, disks, limits, network, clients. Then "
        "train a step on every device and all-reduce across them (without one, on two processes of "
        "the CPU).",
        """\
Each check is ok, warn (a training runs, but not as it could), fail (it does not run) or – (nothing
to check here), with the command that mends it. The exit code is 8 if any check fails, else 0.
Piped: state, check, what was found and what to do, between tabs.

--json prints {version: 1, host, echelon, python, worst: ok, warn or fail,
checks: [{check, state: ok, warn, fail or none, found, do}]}.""",
    )
    parser.add_argument("--no-smoke", action="store_true", help="only look, train nothing")
    parser.add_argument("--json", action="store_true")
    add_dir_argument(parser)
    given = parser.parse_args(words)
    from echelon.doctor.command import run_doctor

    return run_doctor(Path(given.dir), given.json, not given.no_smoke)


def preflight(words: list[str]) -> int:
    parser = make_parser(
        "preflight",
        "Look at the very nodes that a job will use, before it does: echelon preflight launch=ssh "
        "'launch.hosts=[a,b]', or launch=slurm launch.nodes=2. launch.preflight=true does the same "
        "before a training.",
        """\
On every node: does it start, versions, code, names both ways, TCP to every other node, interface,
clock, shared folder, disk, GPUs free and healthy, speed of each link, an all-reduce whose sum is
checked. With Slurm inside an allocation on its nodes, else srun asks for them as the job would.

The exit code is 8 if any check fails, else 0.
Piped: state, node, check, what was found and what to do, between tabs.

--json prints {version: 1, launcher, ready, nodes: [{node, host, address}],
checks: [{node, host, check, state: ok, warn, fail or none, found, do}],
links: [{from, to, bytes_per_s}], slowest: host or null}.""",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as of `echelon train`")
    parser.add_argument("--run", help="of a run: its name or folder, with its settings")
    parser.add_argument(
        "--limit",
        type=parse_seconds,
        default=60.0,
        metavar="S",
        help="for all checks (default: 60)",
    )
    parser.add_argument(
        "--wait", type=parse_seconds, default=600.0, metavar="S", help="slurm: in the queue (600)"
    )
    parser.add_argument("--json", action="store_true")
    add_dir_argument(parser)
    given = parser.parse_intermixed_args(words)
    if given.run and given.overrides:
        parser.error("a run has its own settings: give --run or KEY=VALUE")
    from echelon.entrypoint import run_preflight

    return run_preflight(given.overrides, given.run, given.dir, given.json, given.limit, given.wait)


def setup(words: list[str]) -> int:
    parser = make_parser(
        "setup",
        "Make a machine a host of launch=ssh: a key if there is none, an entry in ssh's "
        "configuration, and a look at its Python, torch and GPUs.",
        """\
Nothing that exists is touched: not a key, not an entry. What will be written is shown first; at a
terminal it asks, elsewhere it needs --yes and else stops with code 2. The exit code is 8 if the
host cannot be reached or is not ready yet; then mend what it says and type the same again.""",
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

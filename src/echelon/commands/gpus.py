"""`echelon gpus`. It is typed often, so it imports next to nothing before it is called."""

from __future__ import annotations

from echelon.commands.arguments import make_parser, parse_gpu_count, parse_interval_s


def gpus(words: list[str]) -> int:
    """`echelon gpus`: who uses the GPUs, here or on other machines."""
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
power_limit_w, fan_percent, idle, mig, has_process_list, processes: [{pid, user, memory_bytes,
age_s, command, job, run, run_folder, orphan}], slices: [{index, uuid, name, memory_used_bytes,
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
    from echelon.gpus import command

    wanted = command.GpusOptions(
        tuple(command.get_current_user() if name == "me" else name for name in given.user),
        () if given.gpu is None else tuple(command.parse_gpu_indices(given.gpu)),
        given.json,
        given.watch,
        () if given.hosts is None else tuple(command.parse_host_names(given.hosts)),
        given.slurm,
        given.ssh,
    )
    return (
        command.show_gpus(wanted)
        if given.free is None
        else command.show_idle_gpus(given.free or None, wanted)
    )

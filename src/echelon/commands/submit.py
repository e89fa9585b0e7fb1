"""Commands as jobs, and their environments."""

from __future__ import annotations

import sys
from pathlib import Path

from echelon.commands.arguments import make_parser, parse_days, split_at_double_dash


def submit(words: list[str]) -> int:
    parser = make_parser(
        "submit",
        "Run the commands of a file as Slurm jobs: one run for each, several as an array, in the "
        "environment that the source folder asks for, from a copy of the code as it is now.",
        "A command file has a command a line, as typed into a shell: # comments, quotes,\n"
        "\\ at the end of a line to go on in the next, NAME=value before a command. Variables\n"
        "are left to the job only after a line `# echelon: expand`; pipes and the like belong\n"
        "in a script.\n\n"
        "How a command is run is seen from it, and shown by --dry-run; mode=plain, torchrun,\n"
        "lightning, srun or wandb decides for all. Defaults stand in echelon.yaml.\n"
        "`echelon train --help` lists the settings of launch.",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="e.g. launch.nodes=2")
    parser.add_argument(
        "--configs", type=Path, metavar="FILE", help="default: experiment_configurations.txt"
    )
    parser.add_argument(
        "--source", type=Path, metavar="DIR", help="the folder the commands run in; default: this"
    )
    parser.add_argument("--name", help="of the run, or of all together; default: a new one")
    parser.add_argument(
        "--build", choices=("login", "job"), default="login", help="where the environment is made"
    )
    parser.add_argument(
        "--env",
        choices=("cache", "source", "none"),
        default="cache",
        help="where it is kept: by what decides it, in DIR/.venv, or none is used",
    )
    parser.add_argument(
        "--link",
        action="append",
        default=[],
        metavar="PATH",
        help="link to this in DIR instead of copying it, such as data; may be repeated",
    )
    parser.add_argument("--max-parallel", type=int, metavar="N", help="so many runs at a time")
    parser.add_argument(
        "--requeue",
        action="store_true",
        help="commands that are out of time are told so (USR2), and queued again: they can resume",
    )
    parser.add_argument("--wait", action="store_true", help="until all are over")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--json", action="store_true", help="print what is planned or done as JSON")
    given = parser.parse_intermixed_args(words)
    from echelon.entrypoint import submit_commands
    from echelon.submit.plan import SubmitRequest

    at_once = (
        [f"launch.max_parallel={given.max_parallel}"] if given.max_parallel is not None else []
    )
    request = SubmitRequest(
        [*given.overrides, *at_once],
        given.configs,
        given.source,
        given.name,
        given.build,
        given.env,
        tuple(given.link),
        given.requeue,
    )
    return submit_commands(request, given.dry_run, given.json, given.wait)


def env(words: list[str]) -> int:
    parser = make_parser(
        "env",
        "The environment that a source folder asks for: build it, show it, clean the cache.",
        "The first of these files decides, and it is said: Pipfile (with its lock),\n"
        "requirements.txt, uv.lock, pyproject.toml, environment.yml. It is built with uv where\n"
        "there is one (ECHELON_ENV_BUILDER=pip asks for pip), once, and kept in ~/.cache/echelon\n"
        "(ECHELON_CACHE) by what decides it.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="build|show|clean")
    build = actions.add_parser("build", help="build it if it is not there, and print its folder")
    show = actions.add_parser("show", help="which file decides, where it is, what the cache holds")
    for action in (build, show):
        action.add_argument("--source", default=".", help="the folder with the files (default: .)")
        action.add_argument("--where", default="cache", help="cache, or source: its .venv")
        action.add_argument("--python", default=sys.executable, help="the interpreter to use")
        action.add_argument("--json", action="store_true")
    build.add_argument("--shell", action="store_true", help="print the lines that enter it")
    clean = actions.add_parser("clean", help="remove from the cache what was not used for long")
    clean.add_argument("--older", type=parse_days, default=30.0, metavar="DAYS", help="default: 30")
    clean.add_argument("--all", action="store_true", help="all that no job runs in")
    clean.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    given = parser.parse_args(words)
    from echelon.environments import env_command as env

    if given.action == "clean":
        return env.clean_environments(given.older, given.all, given.dry_run)
    source = Path(given.source)
    if given.action == "show":
        return env.show_environment(source, given.where, given.python, given.json)
    return env.make_environment(source, given.where, given.python, given.json, given.shell)


def wandb_job(words: list[str]) -> int:
    parser = make_parser(
        "wandb-job",
        "Run a command that calls `wandb agent` as a job. Batch scripts call this; nobody types it.",
    )
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--master", metavar="HOST:PORT", required=True)
    parser.add_argument("--agent", action="store_true", help="be the `wandb` of that job")
    parser.add_argument("words", nargs="*", metavar="-- WORDS")
    options, rest = split_at_double_dash(words)
    given = parser.parse_args(options)
    from echelon.runs.run_folder import Run
    from echelon.submit import wandb_agent

    job = wandb_agent.WandbAgentJob(Run(Path(given.run)), given.master)
    return wandb_agent.run_agent(job, rest) if given.agent else wandb_agent.run_command(job, rest)

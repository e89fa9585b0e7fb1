"""`echelon submit`, and `echelon wandb-job`, which batch scripts call."""

from __future__ import annotations

from pathlib import Path

from echelon.commands.arguments import make_parser, split_at_double_dash


def submit(words: list[str]) -> int:
    """`echelon submit`: run the commands of a file as jobs."""
    parser = make_parser(
        "submit",
        "Run the commands of a file as Slurm jobs: one run for each, several as an array, in the "
        "environment that the source folder asks for, from a copy of the code as it is now. "
        "Each works in runs/RUN/work, which is kept.",
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
    parser.add_argument("--name", help="of the run, or of all together; one in use gets a number")
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
        help="commands that run out of time get USR2 and are queued again: they can resume",
    )
    parser.add_argument("--wait", action="store_true", help="until all are over")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--json", action="store_true", help="print what is planned or done as JSON")
    given = parser.parse_intermixed_args(words)
    from echelon.entrypoint import load_project_defaults, start_run
    from echelon.submission.plan import Submission, SubmitRequest
    from echelon.submission.submit_commands import submit_commands

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
    defaults = load_project_defaults(request.source or Path())
    if not given.dry_run:
        from echelon.login.early import begin_connection

        begin_connection(["launch=slurm", *given.overrides], defaults)

    def submit_elsewhere(submission: Submission, request: SubmitRequest) -> int:
        from echelon.login.command_submission import submit_commands_by_login

        return submit_commands_by_login(submission, request, given.dry_run, given.json, given.wait)

    return submit_commands(
        request, defaults, given.dry_run, given.json, given.wait, start_run, submit_elsewhere
    )


def wandb_job(words: list[str]) -> int:
    """`echelon wandb-job`: be the job of a wandb agent, or one of its trials."""
    parser = make_parser(
        "wandb-job",
        "Run a command that calls `wandb agent` as a job. Batch scripts call this.",
    )
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--master", metavar="HOST:PORT", required=True)
    parser.add_argument("--agent", action="store_true", help="be the `wandb` of that job")
    parser.add_argument("words", nargs="*", metavar="-- WORDS")
    options, rest = split_at_double_dash(words)
    given = parser.parse_args(options)
    from echelon.runs.run_folder import Run
    from echelon.submission import wandb_agent

    job = wandb_agent.WandbJobContext(Run(Path(given.run)), given.master)
    return (
        wandb_agent.run_wandb_shim(job, rest)
        if given.agent
        else wandb_agent.run_agent_command(job, rest)
    )

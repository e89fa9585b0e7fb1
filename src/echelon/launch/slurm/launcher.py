"""launch=slurm: a batch job of any number of nodes, which queues again until the run is done."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from echelon import runs
from echelon.config.schema import Config
from echelon.errors import EchelonError, Exit, Fault
from echelon.launch import interface
from echelon.launch.node import variables
from echelon.launch.plan import Here, Plan, on_failure, places, what_runs
from echelon.launch.process import launched
from echelon.launch.slurm import script
from echelon.launch.slurm.queue import queued, slurm
from echelon.runs import Run

_LOST_ANSWER_S = 120.0
"""So long a controller that went away is given to come back and tell what it took."""


def plan(config: Config, here: Here) -> Plan:
    launch = config.launch
    assert config.run.name is not None
    run = Run(Path(config.run.dir).absolute() / config.run.name)
    procs = script.processes(config)
    nodes = [f"node {n}" for n in range(launch.nodes)]
    submit = ("sbatch", "--parsable", str(run.script_file))
    each = f"srun starts one agent on each of {launch.nodes} node{'s' * (launch.nodes > 1)}"
    if script.by_srun(config):
        each = f"srun starts {script.tasks_per_node(config, procs)} on each of {launch.nodes} nodes"
    return Plan(
        "slurm",
        places(nodes, [procs] * launch.nodes, launch.gpus_per_node or 0, config.replica.devices),
        _variables(config, procs, here),
        (
            f"write {run.script_file}",
            shlex.join(submit),
            f"{each}: {what_runs(config)}",
            on_failure(config),
            f"{launch.signal_lead_s} s before the end of its time the run saves, and the script "
            "queues it again",
        ),
        (submit,),
        script.render(config, run),
    )


def _variables(config: Config, procs: int, here: Here) -> dict[str, str]:
    """Agents choose the interface; tasks of srun's have none but the one that was set."""
    chosen = config.launch.interface
    if script.by_srun(config):
        return dict.fromkeys(interface.VARIABLES, chosen) if chosen else {}
    return variables(config, procs, here.env) | interface.planned(chosen, here.env)


def carry_out(config: Config, plan: Plan) -> int:
    """Returns as soon as the job is queued."""
    require_sbatch()
    require_accepted(plan.script)
    _require_not_active(config)
    job, run = queue(config, plan.script)
    print(f"job {job}: run {run.name} in {run.folder}")
    return Exit.OK


def require_sbatch(instead: str = "type the command on a login node") -> None:
    if shutil.which("sbatch") is None:
        raise EchelonError(
            Fault(
                "launch=slurm, but there is no sbatch on this machine's PATH",
                f"{instead}; --dry-run shows the script anywhere",
            )
        )


def queue(config: Config, text: str) -> tuple[str, Run]:
    """Submit one run: its job's number, and its folder."""
    run = runs.create(config)
    run.script_file.write_text(text, encoding="utf-8", errors="surrogateescape")
    run.script_file.chmod(0o755)
    note_queued(run, config)
    job = submit(run.name, ("sbatch", "--parsable", str(run.script_file)), [run])
    run.job_file.write_text(f"{job}\n", encoding="utf-8")
    return job, run


def note_queued(run: Run, config: Config) -> None:
    """Before the job is there: once it is, its status is its own to write."""
    world = config.launch.nodes * script.processes(config)
    begun = launched("slurm", config.launch.nodes, world)
    run.update_status(**begun | {"state": "queued", "process": None, "starts": []})


def require_accepted(text: str) -> None:
    """Slurm is asked before anything is written: a partition that is not there, too many nodes."""
    done = slurm("sbatch", "--test-only", input=text)
    if done.returncode:
        raise _refused(done.stderr)


def _refused(words: str) -> EchelonError:
    said = [line.removeprefix("sbatch: ") for line in words.splitlines() if line.strip()]
    reasons = [line for line in said if "error" in line or "failure" in line] or said
    return EchelonError(
        Fault(
            f"Slurm does not take the job: {'; '.join(reasons)}",
            "compare launch.nodes, gpus_per_node, partition, account, time and sbatch with "
            "`sinfo -o '%P %D %c %G %l'`; --dry-run shows the script",
        )
    )


def _require_not_active(config: Config) -> None:
    run = Run.of(config)
    job = run.job()
    word = queued([job] if job else []).words.get(job)
    if word is not None and word.active:
        raise EchelonError(
            Fault(
                f"run {run.name} is queued or running already, as job {job}",
                f"follow it with `echelon logs {run.name} -f`, or end it with "
                f"`echelon cancel {run.name}`",
            )
        )


def submit(name: str, command: tuple[str, ...], made: Sequence[Run]) -> str:
    """Once: when the answer is lost, the queue is asked whether the job is there."""
    before = time.time()
    done = slurm(*command)
    job = done.stdout.strip().partition(";")[0]
    if done.returncode == 0 and job.isdecimal():
        return job
    if found := _found_in_queue(name, before):
        return found
    for run in made:
        run.update_status(state="not submitted")
    raise _refused(done.stderr or done.stdout)


def _found_in_queue(name: str, since: float) -> str | None:
    """Whether the controller took the job before it went away; it is waited for."""
    deadline = time.monotonic() + _LOST_ANSWER_S
    done = slurm("squeue", "-h", "-n", name, "-o", "%A|%V", "--me")
    while done.returncode and time.monotonic() < deadline:
        time.sleep(1)
        done = slurm("squeue", "-h", "-n", name, "-o", "%A|%V", "--me")
    for line in done.stdout.splitlines():
        job, submitted = line.split("|", 1)
        if time.mktime(time.strptime(submitted, "%Y-%m-%dT%H:%M:%S")) >= since - 2:
            return job
    return None

"""The batch script of a run: readable, complete, runnable by hand with `sbatch`."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.config.schema import Config, Launch
from echelon.errors import EchelonError, Exit, Fault
from echelon.launch.interface import VARIABLES
from echelon.launch.plan import processes_for
from echelon.launch.slurm.requeue import REQUEUE
from echelon.runs import Run

FIRST_PORT, PORTS = 20_000, 10_000
"""Below the range from which Linux hands out ports by itself."""
_LAST_S = 10
"""Agents leave together; srun would wait for that of a dead node until Slurm has given it up."""


@dataclass(frozen=True)
class Scene:
    """What a submission adds to a program: the folder it is in, and lines that make and enter its
    environment. They may call `fail CODE`."""

    folder: Path | None = None
    environment: tuple[str, ...] = ()


def render(config: Config, run: Run, scene: Scene | None = None) -> str:
    """Of one run."""
    _require_plain(run.folder)
    where = [f"--job-name={run.name}", f'--output="{run.job_log}"']
    words = shlex.join(program_words(config, *_world(config)))
    return _render(config, where, [f"run={shlex.quote(str(run.folder))}"], words, scene)


def render_array(config: Config, listing: Path, count: int, scene: Scene | None = None) -> str:
    """Of many runs that are alike; each task finds its folder in the listing, and there the words
    of its program."""
    _require_plain(listing.parent)
    at_once = f"%{config.launch.max_parallel}" if config.launch.max_parallel else ""
    where = [
        f"--job-name={config.run.name}",
        f"--array=0-{count - 1}{at_once}",
        "--output=/dev/null",
    ]
    listed = shlex.quote(str(listing))
    begin = [
        f'run=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {listed})',
        'exec >> "$run/logs/job.log" 2>&1',
    ]
    if config.program and config.mode != "torchrun":
        begin.append("mapfile -d '' -t words < \"$run/words\"")
    return _render(config, where, begin, '"${words[@]}"', scene)


def write_words(config: Config, run: Run) -> None:
    """For the script of an array: each ended by the one character that no word can have."""
    words = program_words(config, *_world(config))
    run.words_file.write_bytes(b"".join(os.fsencode(word) + b"\0" for word in words))


def _require_plain(folder: Path) -> None:
    """What Slurm would read as something else in the name of a log."""
    if any(character in str(folder) for character in '"%\\\n'):
        raise EchelonError(
            Fault(
                f"Slurm cannot write its logs to {str(folder)!r}",
                'give a run.dir=PATH without ", %, \\ and line breaks',
            )
        )


def processes(config: Config) -> int:
    """On each node."""
    launch = config.launch
    return launch.procs or processes_for(launch.gpus_per_node or 0, config.replica.devices)


def _world(config: Config) -> tuple[int, int]:
    """Nodes, and GPUs or processes on each, as programs are told."""
    return config.launch.nodes, config.launch.gpus_per_node or processes(config)


def _render(
    config: Config, where: list[str], begin: list[str], words: str, scene: Scene | None
) -> str:
    procs = processes(config)
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in [*where, *_options(config, procs)]),
            "",
            *begin,
            'rm -f "$run/exit" "$run/.code"',
            'fail() { echo "$1" > "$run/exit"; exit "$1"; }',
            *_set_up(config.launch),
            *(_enter(scene) if scene else ()),
            "",
            "# The nodes meet at the first one, at a port of this job's own.",
            'master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f"port=$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))",
            "",
            "# TERM: preempted or cancelled. Whether the run goes on is then for Slurm to say.",
            "trap 'stopped=1' TERM",
            "",
            *_started(config, list(_step(config, procs, words))),
            "# srun gives the code of the worst node, perhaps of a dead one; node 0 knows better.",
            'if [ -s "$run/.code" ]; then code=$(cat "$run/.code"); fi',
            "",
            'if [ ! -e "$run/cancelled" ]; then',
            '  if [ -n "$stopped" ]; then exit "$code"; fi',
            *(_go_on(config) if requeues(config) else ()),
            "fi",
            'echo "$code" > "$run/exit"',
            'exit "$code"',
            "",
        ]
    )


def requeues(config: Config) -> bool:
    """A program that is not asked to go on would be killed by the signal that tells of the end."""
    return not config.program or (config.launch.max_requeues > 0 and config.mode != "wandb")


def _go_on(config: Config) -> Iterator[str]:
    yield "  # Out of time with everything saved, or a node lost: go on in another job."
    yield f"  if {_may_go_on(config)}; then"
    yield f'    rm -f "$run/{REQUEUE}"'
    yield from (f"    {line}" for line in _AGAIN)
    yield "  fi"


_AGAIN = (
    # The last task of an array has the array's own number, by which all of them would be queued.
    "job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}",
    'scontrol requeue "${job:-$SLURM_JOB_ID}" && exit 0',
)


def _started(config: Config, lines: list[str]) -> Iterator[str]:
    if not config.launch.preflight:
        yield from (*lines, "code=$?")
        return
    yield "# launch.preflight: look at these very nodes first."
    yield f'{python(config)} -m echelon preflight --run "$run"'
    yield "code=$?"
    yield 'if [ "$code" -eq 0 ]; then'
    yield from (f"  {line}" for line in (*lines, "code=$?"))
    yield "fi"


def _may_go_on(config: Config) -> str:
    """Agents count how often. Of a program's tasks this script knows only how they ended: as ours
    would, or by the signal that told them of the end."""
    saved = f'[ "$code" -eq {int(Exit.PREEMPTED)} ]'
    if not by_srun(config):
        return f'{saved} || [ -e "$run/{REQUEUE}" ]'
    told = f'[ "$code" -eq {128 + signal.SIGUSR2} ]'
    often = f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {config.launch.max_requeues} ]'
    return f"{{ {saved} || {told}; }} && {often}"


def by_srun(config: Config) -> bool:
    """Whether Slurm itself starts the processes of a program, instead of an agent per node."""
    return bool(config.program) and config.mode not in ("torchrun", "wandb")


def program_words(config: Config, nodes: int, gpus: int) -> list[str]:
    """The program, with the flags appended that it wants to be told the world by."""
    launch = config.launch
    words = list(config.program)
    if launch.nodes_flag:
        words += [launch.nodes_flag, str(nodes)]
    if launch.gpus_flag:
        words += [launch.gpus_flag, str(gpus)]
    return words


def tasks_per_node(config: Config, procs: int) -> int:
    return procs if by_srun(config) and config.mode != "plain" else 1


def _options(config: Config, procs: int) -> Iterator[str]:
    launch = config.launch
    tasks = tasks_per_node(config, procs)
    yield f"--nodes={launch.nodes}"
    yield f"--ntasks-per-node={tasks}"
    if cpus := _cpus(launch, procs):
        yield f"--cpus-per-task={max(1, cpus // tasks)}"
    if launch.gpus_per_node:
        yield _gpu_option(launch, tasks)
    for key in ("partition", "account", "time"):
        if value := getattr(launch, key):
            yield f"--{key}={value}"
    # Lightning listens to USR1, and queues itself again.
    number = "USR1" if config.program and config.mode == "lightning" else "USR2"
    if requeues(config):
        yield f"--signal={number}@{launch.signal_lead_s}"
    yield "--requeue" if requeues(config) else "--no-requeue"
    yield "--open-mode=append"
    yield from launch.sbatch


def srun_options(config: Config) -> list[str]:
    """Those by which srun asks for the same nodes as the batch job would."""
    of_a_job = ("--signal", "--requeue", "--no-requeue", "--open-mode")
    ours = (*of_a_job, "--nodes", "--ntasks-per-node", "--time")
    options = [o for o in _options(config, processes(config)) if not o.startswith(ours)]
    return [*options, "--time=10"]


def _cpus(launch: Launch, procs: int) -> int:
    """Of a node: one for each process, where not GPUs decide by the rules of the cluster."""
    return launch.cpus_per_node or (0 if launch.gpus_per_node else procs)


def _gpu_option(launch: Launch, tasks: int) -> str:
    count = launch.gpus_per_node or 0
    if launch.gpu_request == "gres":
        return f"--gres=gpu:{count}"
    return f"--{launch.gpu_request}={count // tasks if 'task' in launch.gpu_request else count}"


def _set_up(launch: Launch) -> list[str]:
    lines = ["", "# launch.setup", _ON_ERROR, *launch.setup, "trap - ERR"]
    secrets = _read_secrets(launch.secrets) if launch.secrets else ()
    return [*(lines if launch.setup else ()), *secrets]


_ON_ERROR = (
    "trap 'code=$?; if [ ${#BASH_SOURCE[@]} -le 1 ]; then "
    'echo "error: launch.setup fails with $code at: $BASH_COMMAND" >&2; fail "$code"; fi\' ERR'
)
"""Not `set -e`, which would end the job within functions and files of others, such as `module`,
that were never written for it."""


def _read_secrets(file: str) -> Iterator[str]:
    """By the job itself, so that nothing of them is in a script, a log or the queue."""
    where = shlex.quote(str(Path(file).expanduser().absolute()))
    yield from ("", "# launch.secrets: KEY=VALUE lines of a file that is its owner's alone.")
    yield f'case "$(stat -Lc %a:%u {where})" in "600:$(id -u)" | "400:$(id -u)") ;; *)'
    yield f"  echo error: {where} is not yours alone >&2"
    yield "  fail 1 ;;"
    yield "esac"
    yield 'while IFS= read -r line || [ -n "$line" ]; do'
    yield "  if [[ $line =~ ^[A-Za-z_][A-Za-z0-9_]*= ]]; then export \"${line%$'\\r'}\"; fi"
    yield f"done < {where}"
    yield "unset line"


def _enter(scene: Scene) -> Iterator[str]:
    if scene.folder:
        yield ""
        yield "# The code as it was when this was submitted."
        yield f"cd {shlex.quote(str(scene.folder))} || fail 1"
    if scene.environment:
        yield from ("# The environment.", *scene.environment)


def _step(config: Config, procs: int, words: str) -> Iterator[str]:
    if by_srun(config):
        return _tasks(config, procs, words)
    return _sweep_agent(config, words) if config.mode == "wandb" else agents(config)


def python(config: Config) -> str:
    """Ours. A program's folder may hold files named like modules; -P does not look there."""
    safe = " -P" if config.program and sys.version_info >= (3, 11) else ""
    return f"{shlex.quote(sys.executable)}{safe}"


def agents(config: Config) -> Iterator[str]:
    yield "# One agent per node, which starts that node's processes and watches them."
    yield f'{_srun(config, 1)} --wait={_LAST_S} --output="$run/logs/node-%n.log" \\'
    yield f"  {python(config)} -m echelon node \\"
    yield '  --nodes "$SLURM_NNODES" --master "$master:$port" "$run"'


def _sweep_agent(config: Config, words: str) -> Iterator[str]:
    yield "# One wandb agent, on this first node; what its trial runs is started on all of them."
    yield f'{python(config)} -m echelon wandb-job "$run" --master "$master:$port" -- {words}'


def step_words(config: Config, run: Run, master: str) -> list[str]:
    """A step of a job that runs one trial of a sweep after another: the same agents."""
    launch = config.launch
    cpus = _cpus(launch, processes(config))
    return [
        *("srun", "--export=ALL", "--ntasks-per-node=1", "--open-mode=append"),
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        f"--wait={_LAST_S}",
        f"--output={run.logs}/node-%n.log",
        *shlex.split(python(config)),
        *("-m", "echelon", "node", "--nodes", str(launch.nodes)),
        *("--master", master, str(run.folder)),
    ]


def render_workers(
    config: Config, logs: Path, command: Sequence[str], look: Sequence[str], count: int
) -> str:
    """Of an array whose tasks each run one trial of a sweep after another; `look` is the preflight
    of such a job."""
    _require_plain(logs)
    procs = processes(config)
    name = logs.parent.name
    where = [f"--job-name={name}", f"--array=0-{count - 1}", f'--output="{logs}/worker-%a.log"']
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in [*where, *_options(config, procs)]),
            "",
            'fail() { exit "$1"; }',
            *_set_up(config.launch),
            *(_look_first(look) if config.launch.preflight else ()),
            "",
            "# TERM: preempted or cancelled. Whether the worker goes on is then for Slurm to say.",
            "trap 'stopped=1' TERM",
            "",
            "# It takes trials until there are none; each is a step that fills this job.",
            "# Not in the background: where TERM comes as it ends, `wait` may lose its code.",
            shlex.join(command),
            "code=$?",
            "",
            "# Out of time with everything saved, a node lost, or killed: go on in another job.",
            f"saved={int(Exit.PREEMPTED)} killed={128 + signal.SIGKILL}",
            'if [ "$code" -eq "$saved" ] || [ "$code" -eq "$killed" ]; then',
            f'  often="${{SLURM_RESTART_COUNT:-0}}" limit={config.launch.max_requeues}',
            '  if [ -z "$stopped" ] && [ "$often" -lt "$limit" ]; then',
            *(f"    {line}" for line in _AGAIN),
            "  fi",
            "fi",
            'exit "$code"',
            "",
        ]
    )


def _look_first(look: Sequence[str]) -> Iterator[str]:
    yield from ("", "# launch.preflight: look at these very nodes first.")
    yield f'{shlex.join(look)} || fail "$?"'


def _srun(config: Config, tasks: int) -> str:
    # Since 22.05 a step does not inherit it; nor, on some clusters, the environment.
    known = _cpus(config.launch, processes(config))
    cpus = ' --cpus-per-task="$SLURM_CPUS_PER_TASK"' if known else ""
    return f"srun --export=ALL --ntasks-per-node={tasks}{cpus} --open-mode=append"


def _tasks(config: Config, procs: int, words: str) -> Iterator[str]:
    per_node = tasks_per_node(config, procs)
    yield "# One task per process; the program finds its place in Slurm's variables."
    yield 'export MASTER_ADDR="$master" MASTER_PORT="$port" PYTHONUNBUFFERED=1'
    if chosen := config.launch.interface:
        yield f"export {' '.join(f'{name}={shlex.quote(chosen)}' for name in VARIABLES)}"
    srun = _srun(config, per_node)
    yield f'{srun} --kill-on-bad-exit=1 --output="$run/logs/rank-%t.log" \\'
    yield f"  {words}"

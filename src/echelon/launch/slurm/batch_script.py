"""The batch script of a run: readable, complete, and runnable by hand with `sbatch`."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.config.schema import Config, LaunchConfig
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.launch.containers.command import (
    make_runtime,
    make_srun_options,
    wrap_command,
    wrap_python,
)
from echelon.launch.network_interface import INTERFACE_VARIABLES
from echelon.launch.plan import make_program_words, may_replace_ranks
from echelon.launch.slurm.requeue import REQUEUE_FILE
from echelon.runs.run_folder import HISTORY_FILE, Run
from echelon.runs.submitted_run import SUBMITTED_RUN_VARIABLE
from echelon.world.device_fit import get_default_process_count
from echelon.world.network_key import KEY_VARIABLE

FIRST_PORT, PORTS = 20_000, 10_000
"""Below the range from which Linux hands out ports by itself."""
_SRUN_WAIT_S = 10
"""Agents leave together; srun would wait for that of a dead node until Slurm has given it up."""


@dataclass(frozen=True)
class ScriptEnvironment:
    """What a submission adds to a program: the source that its working folder is a copy of, and
    lines that make and enter its environment. The lines may call `fail CODE`."""

    source_copy: Path
    setup_lines: tuple[str, ...] = ()


def render_script(config: Config, run: Run, environment: ScriptEnvironment | None = None) -> str:
    """Return the script of one run."""
    _require_plain_path(run.folder)
    first_options = [f"--job-name={run.name}", f'--output="{run.job_log_file}"']
    words = shlex.join(make_program_words(config, *_get_world_shape(config)))
    return _render_script(
        config, first_options, [f"run={shlex.quote(str(run.folder))}"], words, environment
    )


def render_array_script(
    config: Config, listing: Path, count: int, environment: ScriptEnvironment | None = None
) -> str:
    """Return the script of an array of equal runs. Each task finds its folder in the listing, and
    there the words of its program."""
    _require_plain_path(listing.parent)
    at_once = f"%{config.launch.max_parallel}" if config.launch.max_parallel else ""
    first_options = [
        f"--job-name={config.run.name}",
        f"--array=0-{count - 1}{at_once}",
        "--output=/dev/null",
    ]
    listed = shlex.quote(str(listing))
    first_lines = [
        f'run=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {listed})',
        'exec >> "$run/logs/job.log" 2>&1',
    ]
    if config.program and config.mode != "torchrun":
        first_lines.append("mapfile -d '' -t words < \"$run/words\"")
    return _render_script(config, first_options, first_lines, '"${words[@]}"', environment)


def write_program_argv(config: Config, run: Run) -> None:
    """Write the words of a program for the script of an array, each ended by NUL, which no word can
    contain."""
    words = make_program_words(config, *_get_world_shape(config))
    run.arguments_file.write_bytes(b"".join(os.fsencode(word) + b"\0" for word in words))


def _require_plain_path(folder: Path) -> None:
    """Refuse characters that Slurm would interpret in the name of a log."""
    if any(character in str(folder) for character in '"%\\\n'):
        raise EchelonError(
            Fault(
                f"Slurm cannot write its logs to {str(folder)!r}",
                'give a run.dir=PATH without ", %, \\ and line breaks',
            )
        )


def count_processes_per_node(config: Config) -> int:
    """Return how many processes run on each node."""
    launch = config.launch
    return launch.procs or get_default_process_count(launch.gpu_count, config.replica.devices)


def _get_world_shape(config: Config) -> tuple[int, int]:
    """Nodes, and GPUs or processes on each, as programs get them by `launch.nodes_flag` and
    `gpus_flag`."""
    return config.launch.nodes, config.launch.gpu_count or count_processes_per_node(config)


def _render_script(
    config: Config,
    first_options: list[str],
    first_lines: list[str],
    words: str,
    environment: ScriptEnvironment | None,
) -> str:
    """Return the script, from its first lines and its step."""
    procs = count_processes_per_node(config)
    return "\n".join(
        [
            "#!/bin/bash",
            *(
                f"#SBATCH {option}"
                for option in [*first_options, *make_sbatch_options(config, procs)]
            ),
            "",
            *first_lines,
            "",
            *_render_folder_guard(),
            'fail() { echo "$1" > "$run/exit"; exit "$1"; }',
            *render_setup(config.launch),
            *(_render_environment(environment) if environment else ()),
            *render_container(config),
            "",
            "# The nodes meet at the first one, at a port of this job's own.",
            'master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f"port=$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))",
            "",
            "# TERM: preempted or cancelled. Slurm decides whether the run continues.",
            "trap 'stopped=1' TERM",
            "",
            *_render_step_after_preflight(config, list(_render_step(config, procs, words))),
            "# srun gives the code of the worst node, perhaps of a dead one; node 0 knows better.",
            'if [ -s "$run/.code" ]; then code=$(cat "$run/.code"); fi',
            "",
            'if [ ! -e "$run/cancelled" ]; then',
            '  if [ -n "$stopped" ]; then exit "$code"; fi',
            *(_render_requeue(config) if may_requeue(config) else ()),
            "fi",
            'echo "$code" > "$run/exit"',
            'exit "$code"',
            "",
        ]
    )


def _render_folder_guard() -> Iterator[str]:
    """The lines that end a second job in the same folder before it changes anything there.

    Whatever `echelon` queues has a folder of its own, but a person may give the script to sbatch
    while a job of it waits or runs. The lock is for two that start at the same moment.
    """
    yield "# Only one job at a time works in this folder."
    yield _JOB_LINE
    yield "{"
    yield "  flock -w 10 9 2> /dev/null"
    yield '  other=$(cat "$run/job")'
    yield '  if [ -n "$other" ] && [ "$other" != "$job" ] && [ ! -e "$run/exit" ] &&'
    yield '    [ -n "$(squeue -h -j "$other" -o %i 2> /dev/null)" ]; then'
    yield '    echo "error: $run is in use by job $other, which is queued or running" >&2'
    yield '    echo "  hint: job $job did nothing; start it again when job $other is over" >&2'
    yield f"    exit {int(ExitCode.USAGE)}"
    yield "  fi"
    yield '  if [ "$other" != "$job" ]; then echo "$job" > "$run/job"; fi'
    yield '  rm -f "$run/exit" "$run/.code" "$run/.nodes"'
    yield '} 9>> "$run/job"'


_JOB_LINE = (
    # The last task of an array has the array's own number, by which Slurm means all of them.
    "job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}; "
    "job=${job:-$SLURM_JOB_ID}"
)
_REQUEUE_LINE = (
    # What it asks for ends the job's processes, perhaps scontrol itself before it can say so: 143.
    'scontrol requeue "$job"; case $? in 0 | 143) exit 0 ;; esac'
)


def may_requeue(config: Config) -> bool:
    """Return whether the job may be queued again. A program that does not ask for it would be
    killed by the signal that announces the end of its time."""
    return not config.program or (config.launch.max_requeues > 0 and config.mode != "wandb")


def _render_requeue(config: Config) -> Iterator[str]:
    """The lines that queue the job again if the run is not done."""
    yield "  # Out of time with everything saved, or a node lost: go on in another job."
    yield f"  if {_render_requeue_condition(config)}; then"
    yield f'    rm -f "$run/{REQUEUE_FILE}"'
    yield f"    {_REQUEUE_LINE}"
    yield "  fi"


def _render_step_after_preflight(config: Config, lines: list[str]) -> Iterator[str]:
    """The lines that run the step, after the preflight if there is one."""
    step = [*lines, "code=$?", *(_render_history_stop() if is_started_by_srun(config) else ())]
    if not config.launch.preflight:
        yield from step
        return
    yield "# launch.preflight: check the nodes of this job first."
    yield f'{make_python_command(config)} -m echelon preflight --run "$run"'
    yield "code=$?"
    yield 'if [ "$code" -eq 0 ]; then'
    yield from (f"  {line}" for line in step)
    yield "fi"


def _render_requeue_condition(config: Config) -> str:
    """Return the shell condition under which the run continues in another job.

    Agents count how often. Of a program's tasks the script knows only how they ended: with our exit
    code, or by the signal that announced the end.
    """
    saved = f'[ "$code" -eq {int(ExitCode.PREEMPTED)} ]'
    if not is_started_by_srun(config):
        return f'{saved} || [ -e "$run/{REQUEUE_FILE}" ]'
    notice = signal.SIGTERM if get_warning_signal(config) == "TERM" else signal.SIGUSR2
    was_signalled = f'[ "$code" -eq {128 + notice} ]'
    often = f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {config.launch.max_requeues} ]'
    return f"{{ {saved} || {was_signalled}; }} && {often}"


def is_started_by_srun(config: Config) -> bool:
    """Return whether Slurm itself starts the processes of a program, instead of an agent per
    node."""
    return bool(config.program) and config.mode not in ("torchrun", "wandb")


def count_tasks_per_node(config: Config, procs: int) -> int:
    """Return how many tasks `srun` starts on each node: an agent, or every process of a program."""
    return procs if is_started_by_srun(config) and config.mode != "plain" else 1


_WORD_OPTIONS = (
    *("partition", "constraint", "reservation", "licenses", "account", "qos", "time", "deadline"),
)
"""Settings of one word that are the values of options of the same name."""


def make_sbatch_options(config: Config, procs: int) -> Iterator[str]:
    """The options in the script's head."""
    launch = config.launch
    tasks = count_tasks_per_node(config, procs)
    yield f"--nodes={launch.nodes + launch.spares}"
    if survives_lost_nodes(config):
        yield "--no-kill"
    yield f"--ntasks-per-node={tasks}"
    if cpus := _count_cpus_per_node(launch, procs):
        yield f"--cpus-per-task={max(1, cpus // tasks)}"
    if launch.gpu_count:
        yield _format_gpu_option(launch, tasks)
    if launch.exclusive:
        yield "--exclusive"
    for key in _WORD_OPTIONS:
        if value := getattr(launch, key):
            yield f"--{key}={value}"
    if launch.after:
        yield f"--dependency={launch.after}"
        # Else a job whose dependency has failed would wait for ever.
        yield "--kill-on-invalid-dep=yes"
    if may_requeue(config):
        yield f"--signal={get_warning_signal(config)}@{launch.signal_lead_s}"
    yield "--requeue" if may_requeue(config) else "--no-requeue"
    yield "--open-mode=append"
    yield from launch.sbatch


def get_warning_signal(config: Config) -> str:
    """Return the signal that announces the end of a job's time, without SIG."""
    if config.launch.container and make_runtime(config.launch).takes_notice_by_term:
        return "TERM"
    # Lightning listens to USR1, and queues itself again.
    return "USR1" if config.program and config.mode == "lightning" else "USR2"


def survives_lost_nodes(config: Config) -> bool:
    """Return whether the agents of a job may go on without one of its nodes. Slurm then must not
    end the job for it."""
    return config.launch.nodes + config.launch.spares > 1 and may_replace_ranks(config)


def make_srun_allocation_options(config: Config) -> list[str]:
    """Return the options by which `srun` asks for the same nodes as the batch job would."""
    of_a_job = (
        *("--signal", "--requeue", "--no-requeue", "--open-mode", "--no-kill"),
        *("--dependency", "--kill-on-invalid-dep", "--deadline"),
    )
    ours = (*of_a_job, "--nodes", "--ntasks-per-node", "--time")
    options = [
        o
        for o in make_sbatch_options(config, count_processes_per_node(config))
        if not o.startswith(ours)
    ]
    return [*options, "--time=10"]


def _count_cpus_per_node(launch: LaunchConfig, procs: int) -> int:
    """CPUs of a node: as set, else one per process. With GPUs the cluster's own rules decide."""
    return launch.cpus_per_node or (0 if launch.gpu_count else procs)


def _format_gpu_option(launch: LaunchConfig, tasks: int) -> str:
    """Return the option that asks for GPUs in the way this cluster wants it
    (`launch.gpu_request`)."""
    count = launch.gpu_count
    typed = f"{launch.gpu_type}:" if launch.gpu_type else ""
    if launch.gpu_request == "gres":
        return f"--gres=gpu:{typed}{count}"
    each = count // tasks if "task" in launch.gpu_request else count
    return f"--{launch.gpu_request}={typed}{each}"


def render_setup(launch: LaunchConfig, has_key: bool = True) -> list[str]:
    """Return the lines of `launch.setup` and `launch.secrets`, and of a key of the job."""
    lines = ["", "# launch.setup", _SETUP_ERROR_TRAP, *launch.setup, "trap - ERR"]
    secrets = _render_secrets(launch.secrets) if launch.secrets else ()
    return [*(lines if launch.setup else ()), *secrets, *(_KEY_LINES if has_key else ())]


_KEY_LINES = (
    "",
    "# By this key the job's processes know each other. It is in their environment alone.",
    f"export {KEY_VARIABLE}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
)


_SETUP_ERROR_TRAP = (
    "trap 'code=$?; if [ ${#BASH_SOURCE[@]} -le 1 ]; then "
    'echo "error: launch.setup fails with $code at: $BASH_COMMAND" >&2; fail "$code"; fi\' ERR'
)
"""Not `set -e`, which would end the job within functions and files of others, such as `module`,
that were never written for it."""


def _render_secrets(file: str) -> Iterator[str]:
    """Lines by which the job reads the secrets itself, so that nothing of them is in a script, a
    log or the queue."""
    quoted_path = shlex.quote(str(Path(file).expanduser().absolute()))
    yield from ("", "# launch.secrets: KEY=VALUE lines of a file that is its owner's alone.")
    yield f'case "$(stat -Lc %a:%u {quoted_path})" in "600:$(id -u)" | "400:$(id -u)") ;; *)'
    yield f"  echo error: {quoted_path} is not yours alone >&2"
    yield "  fail 1 ;;"
    yield "esac"
    yield 'while IFS= read -r line || [ -n "$line" ]; do'
    yield "  if [[ $line =~ ^[A-Za-z_][A-Za-z0-9_]*= ]]; then export \"${line%$'\\r'}\"; fi"
    yield f"done < {quoted_path}"
    yield "unset line"


def _render_environment(environment: ScriptEnvironment) -> Iterator[str]:
    """The lines that make the working folder of a submitted command, and enter it and the
    environment.

    A restarted job finds the folder, with what the command wrote there.
    """
    source = shlex.quote(str(environment.source_copy))
    yield ""
    yield "# The working folder: a copy of the code as it was when this was submitted. It is kept."
    yield 'if [ ! -d "$run/work" ]; then'
    yield '  rm -rf "$run/.work"'
    yield f'  cp -R {source} "$run/.work" && mv "$run/.work" "$run/work" || fail 1'
    yield "fi"
    yield 'cd "$run/work" || fail 1'
    yield "# A training that the command starts becomes this run."
    yield f'export {SUBMITTED_RUN_VARIABLE}="$run"'
    if environment.setup_lines:
        yield from ("# The environment.", *environment.setup_lines)


def render_container(config: Config) -> list[str]:
    """Return the lines that say how a process is started in the container of the run."""
    if config.launch.container is None:
        return []
    lines = [f"container=({shlex.join(wrap_command(config, []))})"]
    if options := make_srun_options(config):
        joined = shlex.join([*options, "--container-workdir="])
        lines.append(f'container_options=({joined}"$(pwd -P)")')
    return [
        "",
        "# launch.container: what starts a process in it, on whichever node.",
        *lines,
    ]


def _render_in_container(config: Config, words: Sequence[str]) -> str:
    """Return a command of Echelon's on the nodes: that of this Python, or of the one in the
    container, whose words are in the script already."""
    if config.launch.container is None:
        return shlex.join(words)
    count = len(wrap_command(config, []))
    return f'"${{container[@]}}" {shlex.join(wrap_python(config, words)[count:])}'


def render_node_command(config: Config) -> str:
    """Return the beginning of the command that is an agent on a node."""
    words = [*shlex.split(make_python_command(config)), "-m", "echelon", "node"]
    return _render_in_container(config, words)


def _render_step(config: Config, procs: int, words: str) -> Iterator[str]:
    """The lines that start the processes."""
    if is_started_by_srun(config):
        return _render_tasks_step(config, procs, words)
    return (
        _render_wandb_agent_step(config, words)
        if config.mode == "wandb"
        else render_agents_step(config)
    )


def make_python_command(config: Config) -> str:
    """Return the interpreter of Echelon. With -P it does not import modules from the program's
    folder, where files may be named like ours."""
    if config.launch.python is not None:  # it may be an older one, which has no -P
        return shlex.quote(config.launch.python)
    safe = " -P" if config.program and sys.version_info >= (3, 11) else ""
    return f"{shlex.quote(sys.executable)}{safe}"


def render_agents_step(config: Config) -> Iterator[str]:
    """The step of one agent per node."""
    yield "# One agent per node, which starts that node's processes and watches them."
    srun = make_srun_command(config, 1)
    if survives := survives_lost_nodes(config):
        yield "# An agent that is lost is started again while Slurm has its node in this job."
        yield f'{make_python_command(config)} -m echelon return-nodes "$run" &'
        yield "returning=$!"
        yield "# The agents go on without a node that is lost. When they have ended, srun would"
        yield "# wait for that of a dead node until Slurm has given it up."
        yield '(until [ -s "$run/.code" ]; do sleep 1; done'
        yield f"  sleep {_SRUN_WAIT_S}; pkill -KILL -P $$ -x srun) > /dev/null 2>&1 &"
        yield "waiting=$!"
    ends = "--no-kill --wait=0 --kill-on-bad-exit=0" if survives else f"--wait={_SRUN_WAIT_S}"
    yield f'{srun} {ends} --output="$run/logs/node-%n.log" \\'
    yield f"  {render_node_command(config)} \\"
    yield '  --nodes "$SLURM_NNODES" --master "$master:$port" "$run"'
    if survives:
        yield 'code=$?; kill "$waiting" 2> /dev/null'
        yield "# Agents that were started again may go on when all first ones are gone. The signal"
        yield "# may come before it is listened to; what bash says of that is not for the log."
        yield '{ kill -USR1 "$returning"; wait "$returning"'
        yield 'while kill -0 "$returning"; do wait "$returning"; done; } 2> /dev/null'
        yield '(exit "$code")'


def _render_wandb_agent_step(config: Config, words: str) -> Iterator[str]:
    """The step of one wandb agent on the first node."""
    yield "# One wandb agent, on this first node; what its trial runs is started on all of them."
    job = f'{make_python_command(config)} -m echelon wandb-job "$run"'
    yield f'{job} --master "$master:$port" -- {words}'


def make_trial_step_command(config: Config, run: Run, master: str) -> list[str]:
    """Return the step that runs one trial in a job that runs one trial of a sweep after another."""
    launch = config.launch
    cpus = _count_cpus_per_node(launch, count_processes_per_node(config))
    return [
        *("srun", "--export=ALL", "--ntasks-per-node=1", "--open-mode=append"),
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        f"--wait={_SRUN_WAIT_S}",
        f"--output={run.logs_folder}/node-%n.log",
        *_make_node_words(config, "--nodes", str(launch.nodes), "--master", master),
        str(run.folder),
    ]


def make_return_command(
    config: Config, run: Run, host: str, node: int, node_count: int, master: str
) -> list[str]:
    """Return the step that starts an agent again on a node of the job this process is in. The step
    of the lost one may have to be waited for until Slurm knows that it has ended: they overlap."""
    cpus = _count_cpus_per_node(config.launch, count_processes_per_node(config))
    return [
        *("srun", "--overlap", "--export=ALL", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1"),
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        f"--nodelist={host}",
        "--open-mode=append",
        f"--output={run.get_node_log_file(node)}",
        *_make_node_words(config, "--nodes", str(node_count), "--master", master),
        *("--node-rank", str(node), str(run.folder)),
    ]


def _make_node_words(config: Config, *options: str) -> list[str]:
    """Return the words behind those of `srun` that are an agent on a node, in the container if
    there is one."""
    python = shlex.split(make_python_command(config))
    in_container = make_srun_options(config)
    if in_container:
        in_container.append(f"--container-workdir={os.getcwd()}")
    return [*in_container, *wrap_python(config, [*python, "-m", "echelon", "node", *options])]


def render_sweep_script(
    config: Config, logs: Path, command: Sequence[str], preflight_command: Sequence[str], count: int
) -> str:
    """Return the script of an array whose tasks each run one trial of a sweep after another.

    `command` is the worker, and `preflight_command` checks the nodes of such a job.
    """
    _require_plain_path(logs)
    procs = count_processes_per_node(config)
    name = logs.parent.name
    first_options = [
        f"--job-name={name}",
        f"--array=0-{count - 1}",
        f'--output="{logs}/worker-%a.log"',
    ]
    return "\n".join(
        [
            "#!/bin/bash",
            *(
                f"#SBATCH {option}"
                for option in [*first_options, *make_sbatch_options(config, procs)]
            ),
            "",
            'fail() { exit "$1"; }',
            *render_setup(config.launch),
            *(_render_preflight(preflight_command) if config.launch.preflight else ()),
            "",
            "# TERM: preempted or cancelled. Slurm decides whether it continues.",
            "trap 'stopped=1' TERM",
            "",
            "# It takes trials until there are none; each is a step that fills this job.",
            "# Not in the background: where TERM comes as it ends, `wait` may lose its code.",
            shlex.join(command),
            "code=$?",
            "",
            "# Out of time with everything saved, a node lost, or killed: go on in another job.",
            f"saved={int(ExitCode.PREEMPTED)} killed={128 + signal.SIGKILL}",
            'if [ "$code" -eq "$saved" ] || [ "$code" -eq "$killed" ]; then',
            f'  often="${{SLURM_RESTART_COUNT:-0}}" limit={config.launch.max_requeues}',
            '  if [ -z "$stopped" ] && [ "$often" -lt "$limit" ]; then',
            f"    {_JOB_LINE}",
            f"    {_REQUEUE_LINE}",
            "  fi",
            "fi",
            'exit "$code"',
            "",
        ]
    )


def _render_preflight(preflight_command: Sequence[str]) -> Iterator[str]:
    """The lines that check the nodes before the worker starts."""
    yield from ("", "# launch.preflight: check the nodes of this job first.")
    yield f'{shlex.join(preflight_command)} || fail "$?"'


def make_srun_command(config: Config, tasks: int) -> str:
    """`srun` with the options that every step has. Since Slurm 22.05 a step does not inherit the
    CPUs per task and, on some clusters, neither the environment."""
    # Since 22.05 a step does not inherit it; nor, on some clusters, the environment.
    cpu_count = _count_cpus_per_node(config.launch, count_processes_per_node(config))
    cpus = ' --cpus-per-task="$SLURM_CPUS_PER_TASK"' if cpu_count else ""
    container = ' "${container_options[@]}"' if make_srun_options(config) else ""
    return f"srun --export=ALL --ntasks-per-node={tasks}{cpus} --open-mode=append{container}"


def _render_tasks_step(config: Config, procs: int, words: str) -> Iterator[str]:
    """The step of one task per process of a program, which reads Slurm's variables."""
    per_node = count_tasks_per_node(config, procs)
    yield "# One task per process; the program finds its place in Slurm's variables."
    yield 'export MASTER_ADDR="$master" MASTER_PORT="$port" PYTHONUNBUFFERED=1'
    if chosen := config.launch.interface:
        yield f"export {' '.join(f'{name}={shlex.quote(chosen)}' for name in INTERFACE_VARIABLES)}"
    srun = make_srun_command(config, per_node)
    yield from _render_history_start(config.launch.nodes, config.launch.nodes * per_node)
    container = '"${container[@]}" ' if config.launch.container else ""
    yield f'{srun} --kill-on-bad-exit=1 --output="$run/logs/rank-%t.log" \\'
    yield f"  {container}{words}"


def _render_history_start(nodes: int, processes: int) -> Iterator[str]:
    """The lines that write the start into the run's history (`runs.history`), as an agent would."""
    size = f'"nodes": {nodes}, "processes": {processes}'
    start = (
        f'{{"event": "start", "time": %s, "launcher": "slurm", {size}, "host": "%s", "job": "%s"}}'
    )
    yield f"printf '{start}\\n' \\"
    yield f'  "$(date +%s.%3N)" "$master" "$SLURM_JOB_ID" >> {_HISTORY}'
    yield f"""printf '{{"event": "train", "time": %s}}\\n' "$(date +%s.%3N)" >> {_HISTORY}"""


def _render_history_stop() -> Iterator[str]:
    """The lines that write the end of the step there."""
    stop = '{"event": "stop", "time": %s, "cause": "exit code %s"}'
    yield f"""printf '{stop}\\n' "$(date +%s.%3N)" "$code" >> {_HISTORY}"""


_HISTORY = f'"$run/{HISTORY_FILE}"'

"""How a command is launched: as the `mode` setting says, else as the command itself shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from echelon.config.schema import Config, LaunchConfig
from echelon.errors import EchelonError, Fault
from echelon.launch.slurm.batch_script import count_processes_per_node
from echelon.submission.shell_syntax import ShellCommand, ShellWord
from echelon.world.device_fit import get_default_process_count

NODES_FLAG, GPUS_FLAG = "--num_nodes", "--gpus"
"""The flags by which programs with Lightning learn their world, unless settings name others."""
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
_LIGHTNING = re.compile(r"^\s*(?:import|from)\s+(?:pytorch_lightning|lightning)\b", re.MULTILINE)
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_SCRIPT_READ_BYTES = 1 << 20
"""So much of a script is searched for imports."""


@dataclass(frozen=True)
class LaunchMode:
    """How one command is launched."""

    mode: str
    """plain, torchrun, lightning, srun or wandb."""
    reason: str
    """For people, with --dry-run."""
    words: tuple[ShellWord, ...]
    """The program alone, without torchrun or srun, whose place Echelon takes."""
    launch: dict[str, int] = field(default_factory=dict)
    """Settings of `launch` that torchrun's options have set."""


def detect_launch_mode(
    command: ShellCommand, config: Config, chosen_mode: str | None, source: Path, visible_gpus: int
) -> LaunchMode:
    """Return how a command is launched.

    `chosen_mode` is the mode that the user set, `source` the folder that scripts are looked for in.
    """
    words = command.words
    name = PurePath(words[0].text).name
    if chosen_mode == "plain":
        return LaunchMode("plain", "mode=plain: once per node, left alone", words)
    if (agent := _match_wandb_agent(words)) is not None:
        reason = "`wandb agent`: one of them; its trial is started on all nodes"
        return LaunchMode("wandb", reason, agent)
    if (torchrun := detect_torchrun(command)) is not None:
        return replace(torchrun, mode=chosen_mode or torchrun.mode)
    if chosen_mode is not None:
        return LaunchMode(chosen_mode, f"mode={chosen_mode}", words)
    if name == "srun":
        return LaunchMode("srun", "`srun`: one task per process", _strip_srun(command))
    world_size = _compute_world_size(config, visible_gpus)
    if world_size == 1:
        return LaunchMode("plain", "one process", words)
    if _uses_lightning(words, source):
        return LaunchMode(
            "lightning", f"its script imports lightning and reads {NODES_FLAG}", words
        )
    return LaunchMode(
        "torchrun", f"{world_size} processes, which find each other by torchrun's variables", words
    )


def build_command_config(config: Config, command: ShellCommand, launch_mode: LaunchMode) -> Config:
    """Return the configuration of the run of one command."""
    launch = _merge_sizes(config.launch, command, launch_mode)
    if launch_mode.mode == "lightning":
        nodes, gpus = launch.nodes_flag, launch.gpus_flag
        launch = replace(
            launch,
            nodes_flag=NODES_FLAG if nodes is None else nodes,
            gpus_flag=GPUS_FLAG if gpus is None else gpus,
        )
    program = build_argv(command, launch_mode)
    return replace(config, mode=launch_mode.mode, launch=launch, program=program, experiment={})


def build_argv(command: ShellCommand, launch_mode: LaunchMode) -> list[str]:
    """Return the words that are executed.

    If there are variables to expand, a shell does it in each process of the job; words that are
    appended later still reach the program.
    """
    variables = command.variables
    if not any(word.shell for word in (*launch_mode.words, *(value for _, value in variables))):
        before = (
            ["env", *(f"{name}={value.text}" for name, value in variables)] if variables else []
        )
        return [*before, *(word.text for word in launch_mode.words)]
    texts = [f"export {name}={_render_for_bash(value)};" for name, value in variables]
    texts += ["exec", *map(_render_for_bash, launch_mode.words), '"$@"']
    return ["bash", "-c", " ".join(texts), "bash"]


def _render_for_bash(word: ShellWord) -> str:
    return word.shell or shlex.quote(word.text)


def _merge_sizes(
    launch: LaunchConfig, command: ShellCommand, launch_mode: LaunchMode
) -> LaunchConfig:
    """Return the settings with what torchrun's options say; EchelonError if the two differ."""
    default = LaunchConfig()
    for key, value in launch_mode.launch.items():
        current = getattr(launch, key)
        if current not in (getattr(default, key), value):
            raise EchelonError(
                Fault(
                    f"{command.location}: torchrun is told {key.replace('_', ' ')} {value}, but "
                    f"launch.{key}={current}",
                    "leave one of the two out",
                )
            )
    changed: dict[str, Any] = dict(launch_mode.launch)
    return replace(launch, **changed)


def _compute_world_size(config: Config, visible_gpus: int) -> int:
    if config.launch.kind == "slurm":
        return config.launch.nodes * count_processes_per_node(config)
    return config.launch.procs or get_default_process_count(visible_gpus, config.replica.devices)


def _get_word_texts(words: Sequence[ShellWord]) -> list[str]:
    return [word.text for word in words]


def _uses_lightning(words: Sequence[ShellWord], source: Path) -> bool:
    """Return whether the script imports Lightning and reads the flag for the number of nodes.

    Without the flag it is launched by torchrun's variables, which Lightning understands too.
    """
    script = next((word.text for word in words if word.text.endswith(".py")), None)
    if script is None:
        return False
    try:
        with (source / script).open(errors="replace", encoding="utf-8") as file:
            text = file.read(_SCRIPT_READ_BYTES)
    except OSError:
        return False
    return bool(_LIGHTNING.search(text)) and NODES_FLAG.lstrip("-") in text


def _match_wandb_agent(words: tuple[ShellWord, ...]) -> tuple[ShellWord, ...] | None:
    """Return the words of `wandb agent …`, or None for another command.

    The first is `wandb` however it was typed, so that the job finds ours: see wandb_agent.py.
    """
    argv = _get_word_texts(words)
    if _PYTHON.fullmatch(PurePath(argv[0]).name) and argv[1:3] == ["-m", "wandb"]:
        words = words[2:]
    name, *arguments = _get_word_texts(words)
    if PurePath(name).name != "wandb" or arguments[:1] != ["agent"]:
        return None
    return (ShellWord("wandb", words[0].line), *words[1:])


def _strip_srun(command: ShellCommand) -> tuple[ShellWord, ...]:
    """Return the program of `srun PROGRAM …`; srun's own options are the job's to give."""
    program = command.words[1:]
    if not program or program[0].text.startswith("-"):
        raise EchelonError(
            Fault(
                f"{command.location}: srun with options of its own",
                "write srun PROGRAM, and what it is to have as launch.nodes=, launch.procs=, "
                "launch.sbatch=",
            )
        )
    return program


# --- torchrun as people write it ---


@dataclass(frozen=True)
class _TorchrunCall:
    python: ShellWord | None
    """The interpreter of `python -m torch.distributed.run`; None for `torchrun`."""
    arguments: tuple[ShellWord, ...]


def detect_torchrun(command: ShellCommand) -> LaunchMode | None:
    """Return how a torchrun command is launched without torchrun; None for another command."""
    call = _match_torchrun(command.words)
    return _translate_torchrun(command, call) if call is not None else None


def _match_torchrun(words: tuple[ShellWord, ...]) -> _TorchrunCall | None:
    argv = _get_word_texts(words)
    if PurePath(argv[0]).name == "torchrun":
        return _TorchrunCall(None, words[1:])
    runs_module = _PYTHON.fullmatch(PurePath(argv[0]).name) and argv[1:2] == ["-m"]
    if runs_module and argv[2:3] and argv[2] in _LAUNCHER_MODULES:
        return _TorchrunCall(words[0], words[3:])
    return None


_IGNORED_OPTIONS = {
    *("standalone", "rdzv-id", "rdzv-backend", "rdzv-endpoint", "rdzv-conf", "master-addr"),
    *("master-port", "node-rank", "local-addr", "monitor-interval", "start-method", "use-env"),
}
"""Options of the rendezvous, which is the job's own."""
_OPTIONS_WITHOUT_VALUE = {"standalone", "use-env", "module", "m", "no-python"}
_SIZE_OPTIONS = {"nproc-per-node": "procs", "nnodes": "nodes", "max-restarts": "max_restarts"}


def _translate_torchrun(command: ShellCommand, call: _TorchrunCall) -> LaunchMode:
    """Translate torchrun's options to settings of `launch`.

    Sizes that are numbers are taken over. A variable in the place of a size is dropped, as the
    job's own settings say it; so are the options of the rendezvous.
    """
    python = call.python or ShellWord("python", command.line)
    launch: dict[str, int] = {}
    is_module = has_no_python = False
    index, arguments = 0, call.arguments
    while index < len(arguments) and arguments[index].text.startswith("-"):
        word = arguments[index]
        flag, equals, value = word.text.partition("=")
        name = flag.lstrip("-").replace("_", "-")
        index += 1
        if name not in _OPTIONS_WITHOUT_VALUE and not equals:
            if index >= len(arguments):
                break
            word = arguments[index]
            value = word.text
            index += 1
        if name in ("m", "module"):
            is_module = True
        elif name == "no-python":
            has_no_python = True
        elif name in _SIZE_OPTIONS:
            _set_launch_size(command, launch, name, value, word)
        elif name not in _IGNORED_OPTIONS:
            raise EchelonError(
                Fault(
                    f"{command.location}: torchrun's option {flag} has no counterpart here",
                    "leave it out, or set mode=plain to have your torchrun started once per node",
                )
            )
    program = arguments[index:]
    if not program:
        raise EchelonError(
            Fault(
                f"{command.location}: torchrun without a script",
                "end the line with \\ if the command continues in the next",
            )
        )
    interpreter = (python, ShellWord("-m", command.line)) if is_module else (python,)
    words = program if has_no_python else (*interpreter, *program)
    reason = "`torchrun`: an agent per node takes its place; endpoint and id are the job's own"
    return LaunchMode("torchrun", reason, words, launch)


def _set_launch_size(
    command: ShellCommand, launch: dict[str, int], name: str, value: str, word: ShellWord
) -> None:
    if value.isdecimal():
        launch[_SIZE_OPTIONS[name]] = int(value)
    elif word.shell is None and value not in ("auto", "gpu", "cpu"):
        raise EchelonError(
            Fault(
                f"{command.location}: torchrun's --{name}={value} is not a number",
                "give a number; worlds that change their size are not supported",
            )
        )

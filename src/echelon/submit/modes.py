"""How each command is run: as the `mode` setting says, else as can be seen from the command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from echelon.config.schema import Config, Launch
from echelon.errors import EchelonError, Fault
from echelon.launch.plan import processes_for
from echelon.launch.slurm.script import processes
from echelon.submit.words import Command, Word

NODES_FLAG, GPUS_FLAG = "--num_nodes", "--gpus"
"""What Lightning's programs are told the world by, unless settings say otherwise."""
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
_LIGHTNING = re.compile(r"^\s*(?:import|from)\s+(?:pytorch_lightning|lightning)\b", re.MULTILINE)
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_READ = 1 << 20
"""So much of a script is looked at."""


@dataclass(frozen=True)
class Way:
    """How one command is run."""

    mode: str
    why: str
    words: tuple[Word, ...]
    """Without what is Echelon's to say, such as torchrun and its options."""
    launch: dict[str, int] = field(default_factory=dict)
    """What torchrun's own options said about the launch."""


def see(command: Command, config: Config, chosen: str | None, source: Path, visible: int) -> Way:
    """`chosen` is the mode that was set; None: it is seen from the command."""
    words = command.words
    name = PurePath(words[0].text).name
    if chosen == "plain":
        return Way("plain", "mode=plain: once per node, left alone", words)
    if (agent := _wandb_agent(words)) is not None:
        why = "`wandb agent`: one of them; its trial is started on all nodes"
        return Way("wandb", why, agent)
    if (ours := without_torchrun(command)) is not None:
        return replace(ours, mode=chosen or ours.mode)
    if chosen is not None:
        return Way(chosen, f"mode={chosen}", words)
    if name == "srun":
        return Way("srun", "`srun`: one task per process", _after_srun(command))
    size = _world(config, visible)
    if size == 1:
        return Way("plain", "one process", words)
    if _is_for_lightning(words, source):
        return Way("lightning", f"its script imports lightning and reads {NODES_FLAG}", words)
    return Way(
        "torchrun", f"{size} processes, which find each other by torchrun's variables", words
    )


def with_way(config: Config, command: Command, way: Way) -> Config:
    """The configuration of one command's run."""
    launch = _with_sizes(config.launch, command, way)
    if way.mode == "lightning":
        nodes, gpus = launch.nodes_flag, launch.gpus_flag
        launch = replace(
            launch,
            nodes_flag=NODES_FLAG if nodes is None else nodes,
            gpus_flag=GPUS_FLAG if gpus is None else gpus,
        )
    program = words_of(command, way)
    return replace(config, mode=way.mode, launch=launch, program=program, experiment={})


def words_of(command: Command, way: Way) -> list[str]:
    """What is executed. Where variables are to be filled in, a shell does it in each process of
    the job, and what is appended to the words still reaches the program."""
    given = [(name, value) for name, value in command.variables]
    if not any(word.shell for word in (*way.words, *(value for _, value in given))):
        before = ["env", *(f"{name}={value.text}" for name, value in given)] if given else []
        return [*before, *(word.text for word in way.words)]
    texts = [f"export {name}={_for_bash(value)};" for name, value in given]
    texts += ["exec", *map(_for_bash, way.words), '"$@"']
    return ["bash", "-c", " ".join(texts), "bash"]


def _for_bash(word: Word) -> str:
    return word.shell or shlex.quote(word.text)


def _with_sizes(launch: Launch, command: Command, way: Way) -> Launch:
    """What was set for the job and what torchrun's options say may not differ."""
    default = Launch()
    for key, value in way.launch.items():
        current = getattr(launch, key)
        if current not in (getattr(default, key), value):
            raise EchelonError(
                Fault(
                    f"{command.where}: torchrun is told {key.replace('_', ' ')} {value}, but "
                    f"launch.{key}={current}",
                    "leave one of the two out",
                )
            )
    changed: dict[str, Any] = dict(way.launch)
    return replace(launch, **changed)


def _world(config: Config, visible: int) -> int:
    if config.launch.kind == "slurm":
        return config.launch.nodes * processes(config)
    return config.launch.procs or processes_for(visible, config.replica.devices)


def _argv(words: Sequence[Word]) -> list[str]:
    return [word.text for word in words]


def _is_for_lightning(words: Sequence[Word], source: Path) -> bool:
    """Only where its flag is known too: Lightning under torchrun's variables needs none."""
    script = next((word.text for word in words if word.text.endswith(".py")), None)
    if script is None:
        return False
    try:
        with (source / script).open(errors="replace", encoding="utf-8") as file:
            text = file.read(_READ)
    except OSError:
        return False
    return bool(_LIGHTNING.search(text)) and NODES_FLAG.lstrip("-") in text


def _wandb_agent(words: tuple[Word, ...]) -> tuple[Word, ...] | None:
    """With signals passed on: else it leaves its trial behind when it is told to end."""
    argv = _argv(words)
    if _PYTHON.fullmatch(PurePath(argv[0]).name) and argv[1:3] == ["-m", "wandb"]:
        words = words[2:]  # the python that we put before the agent must not be what starts it
    name, *arguments = _argv(words)
    if PurePath(name).name != "wandb" or arguments[:1] != ["agent"]:
        return None
    if "--forward-signals" in arguments:
        return words
    return (*words[:2], Word("--forward-signals", words[1].line), *words[2:])


def _after_srun(command: Command) -> tuple[Word, ...]:
    following = command.words[1:]
    if not following or following[0].text.startswith("-"):
        raise EchelonError(
            Fault(
                f"{command.where}: srun with options of its own",
                "write srun PROGRAM, and what it is to have as launch.nodes=, launch.procs=, "
                "launch.sbatch=",
            )
        )
    return following


# --- torchrun as a person types it ---


@dataclass(frozen=True)
class _Python:
    word: Word | None
    """That was typed; None after a bare `torchrun`."""
    rest: tuple[Word, ...]


def without_torchrun(command: Command) -> Way | None:
    """What torchrun would run; None for another command."""
    typed = _after_torchrun(command.words)
    return _translated(command, typed) if typed is not None else None


def _after_torchrun(words: tuple[Word, ...]) -> _Python | None:
    argv = _argv(words)
    if PurePath(argv[0]).name == "torchrun":
        return _Python(None, words[1:])
    runs_module = _PYTHON.fullmatch(PurePath(argv[0]).name) and argv[1:2] == ["-m"]
    if runs_module and argv[2:3] and argv[2] in _LAUNCHER_MODULES:
        return _Python(words[0], words[3:])
    return None


_OURS = {
    *("standalone", "rdzv-id", "rdzv-backend", "rdzv-endpoint", "rdzv-conf", "master-addr"),
    *("master-port", "node-rank", "local-addr", "monitor-interval", "start-method", "use-env"),
}
_FLAGS = {"standalone", "use-env", "module", "m", "no-python"}
_SIZES = {"nproc-per-node": "procs", "nnodes": "nodes", "max-restarts": "max_restarts"}


def _translated(command: Command, typed: _Python) -> Way:
    """Its options say who meets whom where, which is the job's to say; sizes that are numbers are
    taken over, and variables in their place are filled by the job's own."""
    python = typed.word or Word("python", command.line)
    launch: dict[str, int] = {}
    module = bare = False
    at, rest = 0, typed.rest
    while at < len(rest) and rest[at].text.startswith("-"):
        flag, equals, value = rest[at].text.partition("=")
        name = flag.lstrip("-").replace("_", "-")
        word = rest[at]
        at += 1
        if name not in _FLAGS and not equals:
            if at >= len(rest):
                break
            value, word = rest[at].text, rest[at]
            at += 1
        if name in ("m", "module"):
            module = True
        elif name == "no-python":
            bare = True
        elif name in _SIZES:
            _take_size(command, launch, name, value, word)
        elif name not in _OURS:
            raise EchelonError(
                Fault(
                    f"{command.where}: torchrun's option {flag} has no counterpart here",
                    "leave it out, or set mode=plain to have your torchrun started once per node",
                )
            )
    program = rest[at:]
    if not program:
        raise EchelonError(
            Fault(
                f"{command.where}: torchrun without a script",
                "end the line with \\ if the command goes on in the next",
            )
        )
    before = () if bare else (python, Word("-m", command.line)) if module else (python,)
    why = "`torchrun`: an agent per node takes its place; endpoint and id are the job's own"
    return Way("torchrun", why, (*before, *program), launch)


def _take_size(command: Command, launch: dict[str, int], name: str, value: str, word: Word) -> None:
    if value.isdecimal():
        launch[_SIZES[name]] = int(value)
    elif word.shell is None and value not in ("auto", "gpu", "cpu"):
        raise EchelonError(
            Fault(
                f"{command.where}: torchrun's --{name}={value} is no number",
                "give a number; worlds that change their size are not supported",
            )
        )

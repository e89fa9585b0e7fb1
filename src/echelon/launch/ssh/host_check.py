"""Ask every host at once whether it can take part; all faults are reported together."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon import __version__
from echelon.config.schema import Config
from echelon.errors import EchelonError, Fault
from echelon.hosts.ask import HostAnswer, ask_hosts, join_last_lines
from echelon.hosts.ssh import SSH_FAILED, explain_host_key_failure
from echelon.launch.containers.check import PROBE_MODULE, explain_failed_start
from echelon.launch.containers.command import wrap_python
from echelon.launch.ssh import host_probe, remote_command
from echelon.launch.ssh.host_list import SshHost
from echelon.runs.run_folder import Run
from echelon.utils.os_errors import format_os_error_reason
from echelon.world.device_fit import find_visible_fit_fault

_ANSWER_TIMEOUT_S = 40.0
_DOWNLOAD_TIMEOUT_S = 3600.0
"""The image of a container may have to be downloaded."""
_WITH_FOLDER = 'mkdir -p "$0" && exec "$@"'
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
"""Exit codes of the shell."""


@dataclass(frozen=True)
class HostReport:
    """What a host answered; see `host_probe.describe_host`."""

    python: str
    executable: str
    driver: bool
    torch: str | None
    echelon: str | None
    devices: int
    cwd: bool
    entry: bool
    shared: bool
    writable: bool


def check_hosts(
    config: Config, hosts: list[SshHost], run: Run, variables: Mapping[str, str]
) -> list[HostReport]:
    """Return the reports of all hosts. Raises an EchelonError with every fault of every host."""
    with create_shared_folder_token(run.folder.parent) as token:
        words = [
            sys.executable,
            "-",
            os.getcwd(),
            str(run.folder),
            str(token),
            find_experiment_file(config),
        ]
        program = (
            remote_command.encode_variables(variables) + Path(host_probe.__file__).read_bytes()
        )
        folder, timeout_s = words[2], _ANSWER_TIMEOUT_S
        if config.launch.container is not None:
            # Echelon is mounted there, and its first program says what the image lacks.
            words = wrap_for_host(config, [words[0], "-m", PROBE_MODULE, *words[2:]])
            timeout_s = _DOWNLOAD_TIMEOUT_S
        commands = [
            remote_command.make_argv(config.launch, host.name, (folder, "/"), words)
            for host in hosts
        ]
        answers = [
            _read_report(config, host, sys.executable, answer)
            for host, answer in zip(hosts, ask_hosts(commands, program, timeout_s), strict=True)
        ]
    faults = [
        fault
        for host, answer in zip(hosts, answers, strict=True)
        for fault in (
            [answer] if isinstance(answer, Fault) else _find_faults(config, host, answer, run)
        )
    ]
    reports = [answer for answer in answers if isinstance(answer, HostReport)]
    if len(reports) == len(hosts):
        faults += _find_unequal_devices(hosts, reports)
    if faults:
        raise EchelonError(*faults)
    return reports


def wrap_for_host(config: Config, words: Sequence[str]) -> list[str]:
    """Return the words of a command of Echelon's as they run on a host: in the container, if there
    is one. The folder of the runs is made first, since only what is there can be mounted."""
    if config.launch.container is None:
        return list(words)
    runs = str(Path(config.run.dir).absolute())
    return ["sh", "-c", _WITH_FOLDER, runs, *wrap_python(config, words)]


def find_experiment_file(config: Config) -> str:
    """Return the file of the user's experiment; "" if it is a bundled one."""
    file = str(config.experiment.get("entry", "")).rpartition(":")[0]
    return file if file.endswith(".py") else ""


@contextlib.contextmanager
def create_shared_folder_token(folder: Path) -> Iterator[Path]:
    """A file in a folder that nobody else could have: a host that sees it shares the folder."""
    token = folder / f".echelon-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        token.touch()
    except OSError as error:
        raise EchelonError(
            Fault(
                f"run.dir={folder} cannot be written: {format_os_error_reason(error)}",
                "give another place with run.dir=PATH",
            )
        ) from None
    try:
        yield token
    finally:
        token.unlink(missing_ok=True)


def _read_report(
    config: Config, host: SshHost, python: str, answer: HostAnswer
) -> HostReport | Fault:
    if answer.exit_code is None:
        return Fault(
            f"{host.name} {answer.failure}",
            f"look whether `{config.launch.ssh} {host.name} true` ends",
        )
    message = answer.read_message()
    if answer.exit_code == 0 and message is not None:
        return HostReport(**message)
    return explain_ssh_failure(config, host, python, answer.exit_code, answer.stderr)


def explain_ssh_failure(
    config: Config, host: SshHost, python: str, code: int, error_output: str
) -> Fault:
    """Return the fault of a command that failed on a host, by its exit code and its stderr.

    ssh's own failures have the code 255; a shell that does not find Python has 127 or 126.
    """
    launch, words = config.launch, join_last_lines(error_output)
    key_fault = explain_host_key_failure(
        launch.ssh, host.name, error_output, "set it up with `echelon setup ssh`"
    )
    if code == SSH_FAILED and key_fault is not None:
        return key_fault
    if code == SSH_FAILED:
        return Fault(
            f"{host.name} cannot be reached: {words or 'ssh says nothing'}",
            f"`{launch.ssh} {host.name} true` has to work without a question",
        )
    if launch.container is not None:
        return explain_failed_start(config, code, error_output, f" on {host.name}")
    if code in (_NOT_FOUND, _NOT_EXECUTABLE):
        what = "is not there" if code == _NOT_FOUND else "cannot be executed"
        return Fault(
            f"{python} {what} on {host.name}: {words}",
            "install the same environment at the same path on every host, or leave this one out",
        )
    return Fault(
        f"{python} on {host.name} ended with {code}: {words or 'it printed nothing'}",
        f"try it: {launch.ssh} {host.name} {python} -V",
    )


# --- what may be wrong with an answer ---


def _find_faults(config: Config, host: SshHost, report: HostReport, run: Run) -> Iterator[Fault]:
    """What keeps a host that answered from taking part."""
    local_versions = {"torch": importlib.metadata.version("torch"), "echelon": __version__}
    if config.launch.container is not None:
        local_versions = {}  # what is installed here says nothing; agents compare each other
    for package, ours in local_versions.items():
        theirs = getattr(report, package)
        if theirs is None:
            yield Fault(
                f"{package} is not installed for {sys.executable} on {host.name}",
                f"install it there: pip install {package}=={ours}",
            )
        elif theirs != ours:
            yield Fault(
                f"{package} is {theirs} on {host.name}, but {ours} here",
                "install the same version on every host",
            )
    yield from _find_folder_faults(config, host, report, run)
    if fault := find_visible_fit_fault(
        report.devices,
        config.replica.devices,
        host.procs,
        config.launch.share_devices,
        f" on {host.name}",
    ):
        yield fault


def _find_folder_faults(
    config: Config, host: SshHost, report: HostReport, run: Run
) -> Iterator[Fault]:
    """What is missing in the folders of a host."""
    if not report.shared and not report.writable:
        yield Fault(
            f"{host.name} does not share the run folder {run.folder}, and cannot make one there",
            "give a folder that every host can write to with run.dir=PATH",
        )
    if not report.shared:
        return  # it is sent what it lacks
    hint = "share that folder too, or give a run.dir that is not shared: then the code is sent"
    if not report.cwd:
        yield Fault(
            f"the working directory {os.getcwd()} is not on {host.name}, though the run folder is",
            hint,
        )
    if not report.entry:
        yield Fault(
            f"{find_experiment_file(config)} is not on {host.name}, though the run folder is", hint
        )


def _find_unequal_devices(hosts: list[SshHost], reports: list[HostReport]) -> Iterator[Fault]:
    """The fault of hosts that would get different numbers of processes."""
    counts = {h.name: r.devices for h, r in zip(hosts, reports, strict=True) if h.procs is None}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        yield Fault(
            f"the hosts differ in their visible devices: {listed}",
            "set launch.procs to what every host has, or write slots=N for each into a hostfile",
        )

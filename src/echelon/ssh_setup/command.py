"""`echelon setup ssh HOST`: makes a rented machine a host of launch=ssh in one command.

The steps: show what will be written and ask, write key and entry, install the key if wanted, log
in, then check the host. Each step can be repeated: what is done already is left as it is.
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echelon import __version__
from echelon.config.schema import LaunchConfig
from echelon.doctor.report import print_verdicts
from echelon.doctor.verdict import FAIL, OK, WARN, Verdict, find_worst_state
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.hosts.ask import ask_host, join_last_lines
from echelon.hosts.ssh import (
    SSH_FAILED,
    build_ssh_prefix,
    explain_host_key_failure,
    require_ssh,
    split_ssh_command,
)
from echelon.launch.ssh import host_probe, remote_command
from echelon.ssh_setup import ssh_config as entries
from echelon.ssh_setup import ssh_key as keys
from echelon.ssh_setup.ssh_config import SshConfigEntry

_CONNECT_TIMEOUT_S = 60.0
_DOCTOR_TIMEOUT_S = 300.0
# Adds the key on standard input to authorized_keys unless it is there; other keys stay.
_INSTALL_SCRIPT = """umask 077
mkdir -p ~/.ssh && cd ~/.ssh && touch authorized_keys && IFS= read -r key &&
{ grep -qxF "$key" authorized_keys || printf '%s\n' "$key" >> authorized_keys; }
"""
_CHECK_SCRIPT = (
    'if "$0" -c "import echelon.doctor" 2>/dev/null; then exec "$0" -m echelon doctor --json; '
    "else exec python3 -; fi"
)
"""Starts the Python that launch=ssh would start there, else any python3."""


@dataclass(frozen=True)
class SshSetupOptions:
    """The options as they were typed."""

    host: str
    user: str | None
    port: int | None
    alias: str | None
    key: str | None
    config: str | None
    install: bool
    yes: bool


def setup_ssh(options: SshSetupOptions) -> int:
    """Make a host usable for launch=ssh and check it; return the exit code."""
    usual = entries.find_home_folder() / ".ssh"
    config = Path(options.config).expanduser().absolute() if options.config else usual / "config"
    key = Path(options.key).expanduser().absolute() if options.key else usual / "id_ed25519"
    entry = entries.make_entry_from_options(
        options.host, options.user, options.port, options.alias, key
    )
    launch = LaunchConfig(kind="ssh", ssh=_make_ssh_command(options.config, config))
    require_ssh(launch.ssh, "launch.ssh")
    existing = entries.find_entry(config, entry.alias)
    if existing:
        entry = replace(entry, key=_find_entry_key(launch, entry))
        print(
            f"{entry.alias} is known to ssh already, and is used as it is:\n\n{_indent(existing)}"
        )
    elif not _confirm(entry, config, options.yes):
        return ExitCode.USAGE
    else:
        _write_key_and_entry(entry, config)
        _require_effective(launch, entry, config)
    if options.install:
        _install_key(launch, entry)
    _require_login(launch, entry, is_new=not existing)
    return _report_host(launch, entry)


def _make_ssh_command(given: str | None, config: Path) -> str:
    return f"ssh -F {shlex.quote(str(config))}" if given else "ssh"


def _indent(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


# --- what is written on this machine ---


def _confirm(entry: SshConfigEntry, config: Path, yes: bool) -> bool:
    """Show what would be written, and return whether the user agrees or ``--yes`` was given."""
    if not keys.key_exists(entry.key):
        print(f"a new key, ed25519 without a passphrase: {entry.key}")
    print(f"a new entry in {config}:\n\n{_indent(entry.render())}", flush=True)
    if yes:
        return True
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print(
            "error: nothing was written: there is no terminal to ask at\n"
            "  hint: type the same with --yes",
            file=sys.stderr,
        )
        return False
    try:
        answer = input("write it? [y/N] ").strip().lower()
    except EOFError:
        answer = ""
        print()
    if answer not in ("y", "yes"):
        print("nothing was written", file=sys.stderr)
    return answer in ("y", "yes")


def _write_key_and_entry(entry: SshConfigEntry, config: Path) -> None:
    """Make the key if there is none, then append the entry."""
    if not keys.key_exists(entry.key):
        keys.make_key(entry.key)
    keys.read_public_key(entry.key)  # raises before an entry with an unusable key is written
    entries.append_to_config(config, entry.render())


def _read_effective_config(launch: LaunchConfig, alias: str) -> list[tuple[str, str]]:
    """Return the settings that ssh would use for a host, as ``ssh -G`` prints them."""
    words = [*split_ssh_command(launch.ssh, "launch.ssh"), "-G", "--", alias]
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace"
    )
    if done.returncode:
        raise EchelonError(
            Fault(
                f"ssh cannot read its configuration: {join_last_lines(done.stderr)}",
                f"fix what it reports, and try `{launch.ssh} -G {alias}`",
            )
        )
    pairs = (line.partition(" ") for line in done.stdout.splitlines())
    return [(key, value) for key, _, value in pairs]


def _find_entry_key(launch: LaunchConfig, entry: SshConfigEntry) -> Path:
    """Return the key that an existing entry uses: the first that exists."""
    names = [
        value for key, value in _read_effective_config(launch, entry.alias) if key == "identityfile"
    ]
    files = [Path(name.strip('"')).expanduser() for name in names]
    return next((file for file in files if keys.key_exists(file)), entry.key)


def _require_effective(launch: LaunchConfig, entry: SshConfigEntry, config: Path) -> None:
    """Raise a fault if an earlier entry of the configuration overrides ours."""
    # Reversed, because of repeated keys ssh uses the first.
    effective = dict(reversed(_read_effective_config(launch, entry.alias)))
    wanted = {"hostname": entry.host, "user": entry.user, "port": entry.port and str(entry.port)}
    faults = [
        Fault(
            f"{key} of {entry.alias} is {effective.get(key)}, not {value}: an entry further up in "
            f"{config} says so, and ssh takes the first",
            f"move `Host {entry.alias}` above it",
        )
        for key, value in wanted.items()
        if value and effective.get(key, "").lower() != value.lower()
    ]
    if faults:
        raise EchelonError(*faults, exit=ExitCode.NOT_READY)


# --- logging in ---


def _install_key(launch: LaunchConfig, entry: SshConfigEntry) -> None:
    """Put the public key on the host, by any login that works: password, other key, agent."""
    public = keys.read_public_key(entry.key)
    ssh_command = [*split_ssh_command(launch.ssh, "launch.ssh"), "-o", "IdentitiesOnly=no"]
    words = build_ssh_prefix(ssh_command, entry.alias, asks_questions=True)
    words.append(shlex.join(["sh", "-c", _INSTALL_SCRIPT]))
    done = subprocess.run(
        words, input=public + "\n", encoding="utf-8", errors="replace", stderr=subprocess.PIPE
    )
    if done.returncode:
        raise EchelonError(
            Fault(
                f"the key could not be installed on {entry.alias}: "
                f"{join_last_lines(done.stderr) or 'ssh printed nothing'}",
                f"put this line into ~/.ssh/authorized_keys there, or into the provider's page: "
                f"{public}",
            ),
            exit=ExitCode.NOT_READY,
        )
    print(f"the key is installed on {entry.alias}")


def _require_login(launch: LaunchConfig, entry: SshConfigEntry, is_new: bool) -> None:
    """Log in once, with the questions of ssh if there is a terminal.

    ssh may ask whether the key of the host is right. Only a person can know, so there is no
    timeout at a terminal.
    """
    if is_new:
        print(
            f"the public key, for a provider's page:\n\n{_indent(keys.read_public_key(entry.key))}"
        )
    sys.stdout.flush()
    asks = sys.stdin.isatty()
    ssh_command = split_ssh_command(launch.ssh, "launch.ssh")
    words = build_ssh_prefix(ssh_command, entry.alias, asks_questions=asks)
    try:
        done = subprocess.run(
            [*words, "true"],
            stdin=None if asks else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            timeout=None if asks else _CONNECT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise _explain_login_failure(
            launch, entry, f"no answer within {_CONNECT_TIMEOUT_S:g} s"
        ) from None
    if done.returncode:
        raise _explain_login_failure(launch, entry, done.stderr)


def _explain_login_failure(
    launch: LaunchConfig, entry: SshConfigEntry, stderr: str
) -> EchelonError:
    """Return the error for a login that ssh refused, by what ssh printed."""
    reason = join_last_lines(stderr, 1) or "ssh printed nothing"
    key_fault = explain_host_key_failure(
        launch.ssh, entry.alias, stderr, "type the same at a terminal, where ssh asks"
    )
    if key_fault is not None:
        what, hint = key_fault
    elif "permission denied" in stderr.lower():
        hint = "put the public key into the provider's page, or type the same with --install"
        what = f"{entry.alias} does not accept the key yet: {reason}"
    else:
        hint = f"`{launch.ssh} {entry.alias} true` has to work; then type the same again"
        what = f"{entry.alias} cannot be reached: {reason}"
    return EchelonError(Fault(what, hint), exit=ExitCode.NOT_READY)


# --- checking the host ---


def _report_host(launch: LaunchConfig, entry: SshConfigEntry) -> int:
    """Check the host, print the verdicts and the command that trains there."""
    verdicts = _run_doctor_on_host(launch, entry)
    print(f"{entry.alias}:", flush=True)
    print_verdicts(verdicts)
    line = f"echelon train launch=ssh 'launch.hosts=[{entry.alias}]'"
    if launch.ssh != "ssh":
        line += f""" "launch.ssh='{launch.ssh}'\""""
    if find_worst_state(verdicts) == FAIL:
        print(f"\nonce that is fixed:  {line}")
        return ExitCode.NOT_READY
    print(f"\nready:  {line}")
    return ExitCode.OK


def _run_doctor_on_host(launch: LaunchConfig, entry: SshConfigEntry) -> list[Verdict]:
    """Return the verdicts of `echelon doctor` on the host, or fewer if Echelon is missing there."""
    program = Path(host_probe.__file__).read_bytes()
    variables = remote_command.encode_variables(remote_command.select_variables(os.environ, ()))
    words = remote_command.make_argv(
        launch, entry.alias, (".", "/"), ["sh", "-c", _CHECK_SCRIPT, sys.executable]
    )
    reply = ask_host(words, variables + program, _DOCTOR_TIMEOUT_S)
    if reply.exit_code is None:
        hint = f"{launch.ssh} {entry.alias} echelon doctor"
        return [Verdict("doctor", FAIL, reply.failure, hint)]
    answer = reply.read_message()
    if answer is None:
        reason = join_last_lines(reply.stderr, 1) or "it printed nothing"
        if reply.exit_code == SSH_FAILED:  # although the login at the terminal worked
            hint = f"ssh-add {shlex.quote(str(entry.key))}: launch=ssh cannot answer questions"
            return [Verdict("login", FAIL, f"ssh asks a question: {reason}", hint)]
        hint = f"install Python there, at {sys.executable} as here: launch=ssh starts it"
        return [Verdict("python", FAIL, f"no Python answers: {reason}", hint)]
    if "checks" in answer:
        return [Verdict(**check) for check in answer["checks"]]
    return _evaluate_host_without_echelon(answer)


def _evaluate_host_without_echelon(facts: dict[str, Any]) -> list[Verdict]:
    """Return verdicts on what ``host_probe`` reports of a host without Echelon."""
    python, torch = sys.executable, importlib.metadata.version("torch")
    where = Path(python).parent
    new = where.name == "bin" and f"python3 -m venv {where.parent} && "
    install = f"{new or ''}{python} -m pip install echelon-{__version__}-py3-none-any.whl"
    verdicts = [
        Verdict("python", OK, f"{facts['python']}, {facts['executable']}"),
        Verdict(
            "echelon",
            FAIL,
            f"launch=ssh starts {python}, which is not there or has no echelon {__version__}",
            f"on that host: {install}",
        ),
    ]
    if facts["torch"] is None:
        verdicts.append(Verdict("torch", WARN, "none; it comes with echelon", ""))
    elif facts["torch"] != torch:
        do = f"on that host: {python} -m pip install torch=={torch}"
        verdicts.append(Verdict("torch", FAIL, f"{facts['torch']}, but {torch} here", do))
    else:
        verdicts.append(Verdict("torch", OK, facts["torch"]))
    gpus = "an NVIDIA driver is there" if facts["driver"] else "no NVIDIA driver"
    return [*verdicts, Verdict("driver", OK, gpus)]

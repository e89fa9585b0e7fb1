"""`echelon setup ssh HOST`: a rented machine becomes a host of launch=ssh in one command."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echelon import __version__
from echelon.check.show import table
from echelon.check.verdict import FAIL, OK, WARN, Verdict, worst
from echelon.config.schema import Launch
from echelon.errors import EchelonError, Exit, Fault
from echelon.launch.ssh import remote
from echelon.setup import entry as entries
from echelon.setup import key as keys
from echelon.setup.entry import Entry

_OPTIONS = ("-T", "-o", "ConnectTimeout=10", "-o", "ControlMaster=no")
_CONNECT_S = 60.0
_DOCTOR_S = 300.0
_SSH_FAILS = 255
_INSTALL = """umask 077
mkdir -p ~/.ssh && cd ~/.ssh && touch authorized_keys && IFS= read -r key &&
{ grep -qxF "$key" authorized_keys || printf '%s\n' "$key" >> authorized_keys; }
"""
_ASK = (
    'if "$0" -c "import echelon.check" 2>/dev/null; then exec "$0" -m echelon doctor --json; '
    "else exec python3 -; fi"
)
"""The Python that launch=ssh would start there, else whichever is there."""


@dataclass(frozen=True)
class Wanted:
    host: str
    user: str | None
    port: int | None
    alias: str | None
    key: str | None
    config: str | None
    install: bool
    yes: bool


def setup_ssh(wanted: Wanted) -> int:
    usual = entries.home() / ".ssh"
    config = Path(wanted.config).expanduser().absolute() if wanted.config else usual / "config"
    key = Path(wanted.key).expanduser().absolute() if wanted.key else usual / "id_ed25519"
    entry = entries.read(wanted.host, wanted.user, wanted.port, wanted.alias, key)
    launch = Launch(kind="ssh", ssh=_ssh_command(wanted.config, config))
    remote.require_ssh(launch)
    there = entries.existing(config, entry.alias)
    if there:
        entry = replace(entry, key=_key_of(launch, entry))
        print(f"{entry.alias} is known to ssh already, and is used as it is:\n\n{_shown(there)}")
    elif not _agreed(entry, config, wanted.yes):
        return Exit.USAGE
    else:
        _write(entry, config)
        _require_read(launch, entry, config)
    if wanted.install:
        _install(launch, entry)
    _log_in(launch, entry, bool(there))
    return _report(launch, entry)


def _ssh_command(given: str | None, config: Path) -> str:
    return f"ssh -F {shlex.quote(str(config))}" if given else "ssh"


def _shown(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


# --- what is written here ---


def _agreed(entry: Entry, config: Path, yes: bool) -> bool:
    if not keys.is_there(entry.key):
        print(f"a new key, ed25519 without a passphrase: {entry.key}")
    print(f"a new entry in {config}:\n\n{_shown(entry.text())}", flush=True)
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


def _write(entry: Entry, config: Path) -> None:
    if not keys.is_there(entry.key):
        keys.make(entry.key)
    keys.public(entry.key)  # before the entry: one without a usable key is of no use
    entries.append(config, entry.text())


def _as_read(launch: Launch, alias: str) -> list[tuple[str, str]]:
    """What ssh makes of its configuration; a host's words and the first file that has one count."""
    words = [*remote.ssh_words(launch), "-G", "--", alias]
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace"
    )
    if done.returncode:
        raise EchelonError(
            Fault(
                f"ssh cannot read its configuration: {remote.last_words(done.stderr)}",
                f"mend what it says, and try `{launch.ssh} -G {alias}`",
            )
        )
    pairs = (line.partition(" ") for line in done.stdout.splitlines())
    return [(key, value) for key, _, value in pairs]


def _key_of(launch: Launch, entry: Entry) -> Path:
    """The key that an existing entry uses: the first that is there."""
    names = [value for key, value in _as_read(launch, entry.alias) if key == "identityfile"]
    files = [Path(name.strip('"')).expanduser() for name in names]
    return next((file for file in files if keys.is_there(file)), entry.key)


def _require_read(launch: Launch, entry: Entry, config: Path) -> None:
    read = dict(reversed(_as_read(launch, entry.alias)))
    wanted = {"hostname": entry.host, "user": entry.user, "port": entry.port and str(entry.port)}
    faults = [
        Fault(
            f"{key} of {entry.alias} is {read.get(key)}, not {value}: an entry further up in "
            f"{config} says so, and ssh takes the first",
            f"move `Host {entry.alias}` above it",
        )
        for key, value in wanted.items()
        if value and read.get(key, "").lower() != value.lower()
    ]
    if faults:
        raise EchelonError(*faults, exit=Exit.NOT_READY)


# --- getting in ---


def _install(launch: Launch, entry: Entry) -> None:
    """By whatever lets one in now: a password at the terminal, another key, an agent."""
    public = keys.public(entry.key)
    words = [*remote.ssh_words(launch), "-o", "IdentitiesOnly=no", *_OPTIONS]
    words += ["--", entry.alias, shlex.join(["sh", "-c", _INSTALL])]
    done = subprocess.run(
        words, input=public + "\n", encoding="utf-8", errors="replace", stderr=subprocess.PIPE
    )
    if done.returncode:
        raise EchelonError(
            Fault(
                f"the key could not be installed on {entry.alias}: "
                f"{remote.last_words(done.stderr) or 'ssh says nothing'}",
                f"put this line into ~/.ssh/authorized_keys there, or into the provider's page: "
                f"{public}",
            ),
            exit=Exit.NOT_READY,
        )
    print(f"the key is installed on {entry.alias}")


def _log_in(launch: Launch, entry: Entry, was_there: bool) -> None:
    """At a terminal ssh may ask whether the host's key is right; nobody else can know, and to find
    out takes a person as long as it takes."""
    if not was_there:
        print(f"the public key, for a provider's page:\n\n{_shown(keys.public(entry.key))}")
    sys.stdout.flush()
    asks = sys.stdin.isatty()
    ask = [] if asks else ["-o", "BatchMode=yes"]
    words = [*remote.ssh_words(launch), *ask, *_OPTIONS, "--", entry.alias]
    try:
        done = subprocess.run(
            [*words, "true"],
            stdin=None if asks else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            timeout=None if asks else _CONNECT_S,
        )
    except subprocess.TimeoutExpired:
        raise _closed(launch, entry, f"no answer within {_CONNECT_S:g} s") from None
    if done.returncode:
        raise _closed(launch, entry, done.stderr)


def _closed(launch: Launch, entry: Entry, said: str) -> EchelonError:
    words = remote.last_words(said, 1) or "ssh says nothing"
    if "host key" in said.lower():
        hint = f"type `{launch.ssh} {entry.alias}` once, and compare the fingerprint it shows"
        what = f"ssh does not know the key of {entry.alias}: {words}"
    elif "permission denied" in said.lower():
        hint = "put the public key into the provider's page, or type the same with --install"
        what = f"{entry.alias} does not take the key yet: {words}"
    else:
        hint = f"`{launch.ssh} {entry.alias} true` has to work; then type the same again"
        what = f"{entry.alias} cannot be reached: {words}"
    return EchelonError(Fault(what, hint), exit=Exit.NOT_READY)


# --- what is there ---


def _report(launch: Launch, entry: Entry) -> int:
    verdicts = _ask(launch, entry)
    print(f"{entry.alias}:", flush=True)
    table(verdicts)
    line = f"echelon train launch=ssh 'launch.hosts=[{entry.alias}]'"
    if launch.ssh != "ssh":
        line += f""" "launch.ssh='{launch.ssh}'\""""
    if worst(verdicts) == FAIL:
        print(f"\nonce that is mended:  {line}")
        return Exit.NOT_READY
    print(f"\nready:  {line}")
    return Exit.OK


def _ask(launch: Launch, entry: Entry) -> list[Verdict]:
    program = Path(__file__).with_name("there.py").read_bytes()
    first = remote.first_line(remote.carried(os.environ, ()))
    words = remote.argv(launch, entry.alias, (".", "/"), ["sh", "-c", _ASK, sys.executable])
    try:
        done = subprocess.run(words, input=first + program, capture_output=True, timeout=_DOCTOR_S)
    except subprocess.TimeoutExpired:
        trouble = f"did not answer within {_DOCTOR_S:g} s"
        return [Verdict("doctor", FAIL, trouble, f"{launch.ssh} {entry.alias} echelon doctor")]
    text = done.stdout.decode(errors="replace")
    try:  # a login may print words of its own before
        told: dict[str, Any] = json.loads(text[text.index("{") :])
    except ValueError:
        said = remote.last_words(done.stderr.decode(errors="replace"), 1) or "it said nothing"
        if done.returncode == _SSH_FAILS:  # but it let one in before, at a terminal
            hint = f"ssh-add {shlex.quote(str(entry.key))}: launch=ssh cannot answer questions"
            return [Verdict("login", FAIL, f"not without a question: {said}", hint)]
        hint = f"install Python there, at {sys.executable} as here: launch=ssh starts it"
        return [Verdict("python", FAIL, f"no Python answers: {said}", hint)]
    if "checks" in told:
        return [Verdict(**check) for check in told["checks"]]
    return _without_echelon(told)


def _without_echelon(told: dict[str, Any]) -> list[Verdict]:
    """Of `there.py`."""
    python, torch = sys.executable, importlib.metadata.version("torch")
    where = Path(python).parent
    new = where.name == "bin" and f"python3 -m venv {where.parent} && "
    install = f"{new or ''}{python} -m pip install echelon=={__version__}"
    verdicts = [
        Verdict("python", OK, f"{told['python']}, {told['executable']}"),
        Verdict(
            "echelon",
            FAIL,
            f"launch=ssh starts {python}, which is not there or has no echelon {__version__}",
            f"on that host: {install}",
        ),
    ]
    if told["torch"] is None:
        verdicts.append(Verdict("torch", WARN, "none; it comes with echelon", ""))
    elif told["torch"] != torch:
        do = f"on that host: {python} -m pip install torch=={torch}"
        verdicts.append(Verdict("torch", FAIL, f"{told['torch']}, but {torch} here", do))
    else:
        verdicts.append(Verdict("torch", OK, told["torch"]))
    gpus = "an NVIDIA driver is there" if told["gpus"] else "no NVIDIA driver"
    return [*verdicts, Verdict("driver", OK, gpus)]

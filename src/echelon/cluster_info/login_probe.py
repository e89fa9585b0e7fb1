"""One shell script that asks a login node about its cluster, and the sections of its answer.

It needs neither Python nor Echelon there. It reads: no file is written, no job is submitted, and
variables are not shown but for the names of folders, so that no secret travels. The controller is
asked once for each section, and a command that hangs is ended.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from echelon.config.defaults_files import load_defaults
from echelon.config.schema import LaunchConfig
from echelon.config.validate import is_safe_host
from echelon.errors import EchelonError, ExitCode, Fault, escape_controls
from echelon.hosts.ask import HostAnswer, ask_host, join_last_lines
from echelon.hosts.message_protocol import MARK
from echelon.hosts.ssh import (
    SSH_FAILED,
    build_ssh_prefix,
    explain_host_key_failure,
    require_ssh,
    split_ssh_command,
)

_ANSWER_TIMEOUT_S = 180.0
_LOGIN_KEYS = ("launch.login", "launch.ssh")
_OCTAL_MARK = f"\\{ord(MARK):03o}"

_PRELUDE = r"""
export LC_ALL=C SLURM_TIME_FORMAT=standard
unset SINFO_FORMAT SQUEUE_FORMAT SQUEUE_FORMAT2 SQUEUE_PARTITION SQUEUE_USERS SQUEUE_STATES
unset SBATCH_PARTITION SBATCH_ACCOUNT SBATCH_QOS SBATCH_TIMELIMIT SBATCH_RESERVATION
if ! command -v sinfo > /dev/null && command -v bash > /dev/null; then
  # Many clusters put Slurm onto the PATH in files that only a login shell reads.
  PATH=$(bash -lc 'printf "MARK%s\n" "$PATH"' < /dev/null 2> /dev/null | sed -n 's/.*MARK//p')
  PATH=${PATH:-/usr/bin:/bin}; export PATH
fi
limit=; if command -v timeout > /dev/null; then limit='timeout 30'; fi
section() { # NAME COMMAND…
  printf 'MARK%s\n' "$1"; shift
  $limit "$@" < /dev/null 2>&1
  code=$?; printf '\nMARK=%s\n' "$code"
}
""".replace("MARK", _OCTAL_MARK)

_NOW = r"""
section time date +%Y-%m-%dT%H:%M:%S
section user id -un
section groups id -Gn
section hostname hostname
section sbatch sh -c 'command -v sbatch'
section nodes sh -c 'nodes=$(scontrol -o -d show node) || exit 1
  printf "%s\n" "$nodes" | awk "{ for (i = 1; i <= NF; i++) if (\$i ~ \
    /^(NodeName|CPUAlloc|CPUTot|Gres|GresUsed|RealMemory|AllocMem|State|Partitions)=/) \
    printf \"%s \", \$i; print \"\" }"'
test "$code" = 0 || exit 0  # each further question would wait as long for no answer
section config sh -c 'scontrol show config | grep -E "^(ClusterName|SelectType) "'
section version sbatch --version
section partitions scontrol -o show partition
section waiting sh -c 'squeue -h -t PENDING -o "%P|%r" | sort | uniq -c'
section accounts sacctmgr -n -P show assoc user="$(id -un)" \
  format=Account,Partition,QOS,DefaultQOS,MaxJobs,MaxWall
"""
"""What `echelon cluster` needs."""

_MORE = r"""
section user_defaults sacctmgr -n -P show user "$(id -un)" format=User,DefaultAccount
section qos sacctmgr -n -P show qos format=Name,Priority,MaxWall,MaxTRESPU,MaxJobsPU
section reservations scontrol -o show reservation
section licenses scontrol -o show licenses
section modules bash -lc 'module -t avail 2>&1 | grep -iE \
  "^(python|pytorch|anaconda|mini(conda|forge)|mamba|cuda|nvhpc|nccl|apptainer|singularity)" \
  | sort -u | head -n 60'
section pythons sh -c 'for name in python3 python3.10 python3.11 python3.12 python3.13 python3.14
  do found=$(command -v $name) && printf "%s|%s\n" "$found" "$($name -V 2>&1 | head -n 1)"
  done; true'
section containers sh -c 'for name in apptainer singularity enroot podman ch-run
  do command -v $name > /dev/null && printf "%s|%s\n" $name "$($name --version 2>&1 | head -n 1)"
  done; if srun --help 2> /dev/null | grep -q container-image; then echo "pyxis|"; fi; true'
section folders sh -c 'for folder in "$HOME" "$SCRATCH" "$WORK" "$PROJECT" "$SCRATCHDIR" \
  "/scratch/$(id -un)" "/work/$(id -un)" "/scratch" "/work" "/project" "/data"
  do test -n "$folder" && test -d "$folder" || continue
    may=no; test -w "$folder" && may=yes
    printf "%s|%s|%s\n" "$folder" "$may" "$(df -PT "$folder" 2> /dev/null | tail -n 1)"
  done; true'
"""
"""What `echelon setup cluster` needs beside it."""


class Section(NamedTuple):
    """What one command of the script printed, errors included, and how it ended."""

    text: str
    exit_code: int

    @property
    def lines(self) -> list[str]:
        """Its lines; none of a command that failed."""
        found = [line for line in self.text.splitlines() if line.strip()]
        return found if self.exit_code == 0 else []

    @property
    def reason(self) -> str:
        """Why the command failed, in its own words."""
        return join_last_lines(self.text, 1) or f"exit code {self.exit_code}"


NO_SECTION = Section("", 127)


class LoginNode(NamedTuple):
    """The machine that is asked: another one over ssh, or this one."""

    host: str | None
    ssh: str = "ssh"

    @property
    def name(self) -> str:
        """What to call it in a sentence."""
        return self.host or "this machine"

    def ask(self, script: str) -> dict[str, Section]:
        """Run a script there, and return its sections by name. Raises an EchelonError for a
        machine that cannot be asked."""
        argv = ["sh", "-s"]
        if self.host is not None:
            require_ssh(self.ssh, "--ssh")
            argv = [*build_ssh_prefix(split_ssh_command(self.ssh, "--ssh"), self.host), "sh -s"]
        answer = ask_host(argv, script.encode(), _ANSWER_TIMEOUT_S)
        sections = parse_sections(answer.stdout)
        if answer.exit_code != 0 or not sections:
            raise EchelonError(self._explain_failure(answer), exit=ExitCode.NOT_READY)
        return sections

    def _explain_failure(self, answer: HostAnswer) -> Fault:
        try_it = f"`{self.ssh} {self.host} true` has to work without a question"
        if answer.exit_code is None:
            return Fault(
                f"{self.name} {answer.failure}",
                try_it if self.host else "look whether this machine is very busy",
            )
        words = join_last_lines(answer.stderr)
        if answer.exit_code == SSH_FAILED and self.host is not None:
            fault = explain_host_key_failure(
                self.ssh, self.host, answer.stderr, "set it up with `echelon setup ssh`"
            )
            return fault or Fault(
                f"{self.host} cannot be reached: {words or 'ssh says nothing'}", try_it
            )
        return Fault(
            f"the shell of {self.name} ended with {answer.exit_code}: "
            f"{words or 'it printed nothing'}",
            "its start-up files (.bashrc, .profile) may end a shell without a terminal",
        )


def make_login_node(host: str | None, ssh: str | None) -> LoginNode:
    """Return the machine to ask: this one, or HOST; where there is no Slurm here, the default is
    `launch.login` of echelon.yaml. Raises an EchelonError for what is no name of a host."""
    if host is None and shutil.which("sbatch") is None:
        host, default_ssh = _find_default_host(os.environ)
        ssh = ssh or default_ssh
    if host is not None and not is_safe_host(host):
        raise EchelonError(
            Fault(
                f"{host!r} is not the name of a host",
                "give a name or an address as ssh knows it, USER@HOST where needed",
            )
        )
    return LoginNode(host, (ssh or LaunchConfig().ssh).strip())


def _find_default_host(env: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Return `launch.login` and `launch.ssh` of the files of defaults. One that cannot be read is
    for other commands to complain of: this one may be about to write it anew."""
    with contextlib.suppress(EchelonError):
        found = load_defaults(env, [Path()]).launch
        values = [found[key].value if key in found else None for key in _LOGIN_KEYS]
        return values[0], values[1]
    return None, None


def build_probe(*, with_setup: bool = False, jobs: Sequence[str] = ()) -> str:
    """Return the script: what is free, what a file of defaults is made of, and when batch scripts
    would start (sections `job 0`, `job 1` …)."""
    return "".join([_PRELUDE, _NOW, _MORE if with_setup else "", build_job_tests(jobs)])


def build_job_tests(jobs: Sequence[str]) -> str:
    """Return the lines that ask when batch scripts would start; none of them is submitted."""
    end = "ECHELON_JOB_ENDS"
    return "".join(
        f"printf '{_OCTAL_MARK}job {number}\\n'\n"
        f"$limit sbatch --test-only <<'{end}' 2>&1\n{job.rstrip()}\n{end}\n"
        f"printf '\\n{_OCTAL_MARK}=%s\\n' \"$?\"\n"
        for number, job in enumerate(jobs)
    )


def build_tests_alone(jobs: Sequence[str]) -> str:
    """Return a script that asks only when these batch scripts would start."""
    return _PRELUDE + build_job_tests(jobs)


def parse_sections(text: str) -> dict[str, Section]:
    """Return the sections in what the script printed; what a login printed before is left out, and
    no character remains by which a name could command a terminal."""
    sections: dict[str, Section] = {}
    name, start = "", ""
    for part in text.split(MARK)[1:]:
        head, _, body = part.partition("\n")
        if head.startswith("="):
            code = int(head[1:]) if head[1:].isdecimal() else 1
            sections[name] = Section(escape_controls(start, kept="\n\t").strip("\n"), code)
        else:
            name, start = head, body
    return sections


def read_fields(line: str) -> Mapping[str, str]:
    """Return the NAME=VALUE fields of a line of scontrol, as far as they have no blanks."""
    pairs = (word.partition("=") for word in line.split() if "=" in word)
    return {key: value for key, _, value in pairs}


def format_command(node: LoginNode, *words: str) -> str:
    """Return a command line of `echelon` for this login node, as a person would type it."""
    ssh = [] if node.ssh == "ssh" else ["--ssh", node.ssh]
    return shlex.join(["echelon", *words, *([node.host] if node.host else []), *ssh])

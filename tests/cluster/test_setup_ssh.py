"""`echelon setup ssh` against a real sshd: from nothing to a host of launch=ssh."""

from __future__ import annotations

import os
import pty
import select
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ECHELON, CommandLine
from slurm_cluster import LIMIT_S
from sshd import HIDE, start_sshd

from echelon.errors import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def test_a_rented_machine_becomes_a_host(command_line: CommandLine, tmp_path: Path) -> None:
    host, address = (
        command_line.cluster.nodes[0],
        command_line.cluster.addresses[command_line.cluster.nodes[0]],
    )
    keys, home = command_line.cluster.kind.folder / "ssh", tmp_path / "home"
    real = tmp_path / "dotfiles" / "config"
    real.parent.mkdir()
    known = f"[{address}]:2226 {(keys / f'host_{host}.pub').read_text()}"
    (tmp_path / "known").write_text(known)
    common = f"Host *\n  UserKnownHostsFile {tmp_path / 'known'}\n  GlobalKnownHostsFile none\n"
    real.write_text(common + "  IdentityAgent none")  # without an end of line
    real.chmod(0o640)
    config = tmp_path / "config"
    config.symlink_to(real)
    key = tmp_path / "new" / "key"
    words = (
        *("setup", "ssh", f"root@{address}", "--port", "2226", "--name", "pod"),
        *("--key", str(key), "--config", str(config)),
    )
    own = f"AuthorizedKeysFile {home}/.ssh/authorized_keys {keys}/authorized_keys\n"
    with start_sshd(
        command_line.cluster, host, [2226], 'exec "$@"', tmp_path, f"{own}SetEnv HOME={home}\n"
    ):
        home.mkdir()
        asked = command_line.type(*words)
        assert asked.code == ExitCode.USAGE, asked.err
        assert "nothing was written: there is no terminal to ask at" in asked.err
        assert "    HostName" in asked.out
        assert "Host pod" not in real.read_text()
        assert not key.parent.exists()

        closed = command_line.type(*words, "--yes")
        assert closed.code == ExitCode.NOT_READY, closed.out + closed.err
        assert "pod does not accept the key yet" in closed.err
        public = Path(f"{key}.pub").read_text().strip()
        assert public in closed.out
        assert public.startswith("ssh-ed25519 ")
        assert [mode(key.parent), mode(key), mode(real)] == [0o700, 0o600, 0o640]
        assert config.is_symlink()
        written = real.read_text()
        assert written.startswith(common + "  IdentityAgent none\n\nHost pod\n")

        real.write_text(f"{written}IdentityFile {keys / 'client'}\n")  # another way in
        installed = command_line.type(*words, "--install", "--yes")
        assert installed.code == ExitCode.OK, installed.out + installed.err
        authorized = home / ".ssh" / "authorized_keys"
        assert authorized.read_text() == f"{public}\n"
        assert mode(authorized) == 0o600
        assert "pod is known to ssh already" in installed.out
        line = installed.out.strip().splitlines()[-1]
        wanted = f"\"launch.ssh='ssh -F {config}'\""
        assert line == f"ready:  echelon train launch=ssh 'launch.hosts=[pod]' {wanted}"
        assert "\ttorch\t" in installed.out
        assert "\tall-reduce\t" in installed.out, "a step was trained there"

        real.write_text(written)
        by_the_key_alone = ["ssh", "-F", str(config), "-o", "BatchMode=yes", "pod", "true"]
        assert subprocess.run(by_the_key_alone, timeout=300).returncode == 0


def test_a_host_without_echelon_is_told_how_to_get_it(
    command_line: CommandLine, tmp_path: Path
) -> None:
    host = command_line.cluster.nodes[0]
    with start_sshd(command_line.cluster, host, [2227], HIDE, Path(sys.executable).parent):
        config = tmp_path / "config"
        config.write_text(
            f"Host {host}\n    Port 2227\n" + command_line.cluster.ssh_config.read_text()
        )
        done = command_line.type("setup", "ssh", host, "--config", str(config))
    assert done.code == ExitCode.NOT_READY, done.out + done.err
    assert f"{host} is known to ssh already" in done.out
    assert f"fail\techelon\tlaunch=ssh starts {sys.executable}, which is not there" in done.out
    assert f"{sys.executable} -m pip install echelon-" in done.out
    assert "once that is fixed:  echelon train launch=ssh" in done.out


def test_at_a_terminal_it_asks_and_so_does_ssh(command_line: CommandLine, tmp_path: Path) -> None:
    address = command_line.cluster.addresses[command_line.cluster.nodes[0]]
    config, key, known = tmp_path / "config", tmp_path / "key", tmp_path / "known"
    common = f"Host *\n  UserKnownHostsFile {known}\n  GlobalKnownHostsFile none\n"
    config.write_text(common + "  IdentityAgent none\n")
    before = config.read_bytes()
    words = (
        *("setup", "ssh", f"root@{address}:22", "--name", "pod"),
        *("--key", str(key), "--config", str(config)),
    )
    for no in ("n\n", "\n", "\x04"):
        code, said = conversation(words, ("write it? [y/N] ", no))
        assert (code, said.split("\r\n")[-2]) == (ExitCode.USAGE, "nothing was written"), said
        assert (config.read_bytes(), key.exists()) == (before, False)
    agreed = ("write it? [y/N] ", "y\n")
    code, said = conversation(words, agreed, ("(yes/no/[fingerprint])? ", "no\n"))
    assert code == ExitCode.NOT_READY, said
    assert "error: ssh has never seen pod: its host key is in no known_hosts" in said
    assert not known.exists()
    before = (key.read_bytes(), config.read_bytes())  # type: ignore[assignment]
    assert b"Host pod\n" in before[1]  # type: ignore[operator]
    code, said = conversation(words, ("(yes/no/[fingerprint])? ", "yes\n"))
    assert code == ExitCode.NOT_READY, said
    assert "pod is known to ssh already, and is used as it is:" in said
    assert f"error: pod does not accept the key yet: root@{address}: Permission denied" in said
    assert address in known.read_text()
    assert (key.read_bytes(), config.read_bytes()) == before, "what is there is not touched"  # type: ignore[comparison-overlap]


def test_a_key_that_asks_for_its_passphrase_needs_an_agent(
    command_line: CommandLine, tmp_path: Path
) -> None:
    host = command_line.cluster.nodes[0]
    key, config = tmp_path / "key", tmp_path / "config"
    make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(key)]
    subprocess.run(make, check=True, timeout=300)
    with start_sshd(
        command_line.cluster, host, [2228], 'exec "$@"', tmp_path, f"AuthorizedKeysFile {key}.pub\n"
    ):
        own = f"Host {host}\n  Port 2228\n  IdentityFile {key}\n  BatchMode no\n"
        theirs = command_line.cluster.ssh_config.read_text()
        config.write_text(
            own + theirs.replace(str(command_line.cluster.kind.folder / "ssh/client"), "none")
        )
        words = ("setup", "ssh", host, "--config", str(config))
        code, said = conversation(words, (f"Enter passphrase for key '{key}': ", "secret\n"))
    assert code == ExitCode.NOT_READY, said
    assert "login  ssh asks a question: root@" in said
    assert f"ssh-add {key}: launch=ssh cannot answer questions" in said


def conversation(words: tuple[str, ...], *turns: tuple[str, str]) -> tuple[int, str]:
    """At a terminal of its own: each answer once its question is there. The code, and all that
    was to be seen."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(ECHELON[0], [*ECHELON, *words])
    said, heard = b"", 0
    left = list(turns)
    while select.select([terminal], [], [], LIMIT_S)[0]:
        try:
            said += os.read(terminal, 65536)
        except OSError:  # Linux's way to say that it is closed
            break
        if left and left[0][0].encode() in said[heard:]:
            heard = len(said)
            os.write(terminal, left.pop(0)[1].encode())
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said.decode()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_an_entry_further_up_that_wins_is_told(command_line: CommandLine, tmp_path: Path) -> None:
    config, key = tmp_path / "config", tmp_path / "key"
    config.write_text("Host *\n  User somebody\n")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    words = ("setup", "ssh", "u@192.0.2.1", "--key", str(key), "--config", str(config), "--yes")
    done = command_line.type(*words)
    assert done.code == ExitCode.NOT_READY
    assert "user of 192.0.2.1 is somebody, not u: an entry further up" in done.err

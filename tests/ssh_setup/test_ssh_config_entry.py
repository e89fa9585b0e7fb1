"""Keys and entries of ssh's configuration: made when missing, never touched when there."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from echelon.errors import EchelonError, ExitCode
from echelon.ssh_setup import ssh_key as keys
from echelon.ssh_setup.command import SshSetupOptions, setup_ssh
from echelon.ssh_setup.ssh_config import append_to_config, find_entry, make_entry_from_options

KEY = Path("/h/.ssh/id_ed25519")


def test_an_entry_says_what_was_typed() -> None:
    entry = make_entry_from_options("root@203.0.113.9", None, 22022, "pod", KEY)
    assert entry.render() == (
        "Host pod\n    HostName 203.0.113.9\n    User root\n    Port 22022\n"
        '    IdentityFile "/h/.ssh/id_ed25519"\n    IdentitiesOnly yes\n'
    )
    assert make_entry_from_options("[2001:db8::1]", None, None, None, KEY).alias == "2001-db8--1"
    assert "User" not in make_entry_from_options("h", None, None, None, KEY).render()


@pytest.mark.parametrize(
    ("typed", "user", "host", "port"),
    [
        ("root@203.0.113.9:22022", "root", "203.0.113.9", 22022),
        ("pod.example:2222", None, "pod.example", 2222),
        ("[2001:db8::1]:2222", None, "2001:db8::1", 2222),
        ("2001:db8::1", None, "2001:db8::1", None),
    ],
)
def test_a_port_may_stand_after_the_host(
    typed: str, user: str | None, host: str, port: int | None
) -> None:
    entry = make_entry_from_options(typed, None, None, None, KEY)
    assert (entry.user, entry.host, entry.port) == (user, host, port)
    if port:
        with pytest.raises(EchelonError, match="are two ports"):
            make_entry_from_options(typed, None, 22, None, KEY)
        with pytest.raises(EchelonError, match="is not a port"):
            make_entry_from_options(f"{host.replace(':', '')}:70000", None, None, None, KEY)


@pytest.mark.parametrize(
    "host",
    ["-oProxyCommand=touch x", "a\nHost *", "a b", "", "a;b", "a@b@c", "%h", "h$(id)", "-a@b"],
)
def test_weird_hosts_are_refused(host: str) -> None:
    with pytest.raises(EchelonError) as caught:
        make_entry_from_options(host, None, None, None, KEY)
    assert caught.value.exit == ExitCode.USAGE


def test_all_faults_at_once() -> None:
    with pytest.raises(EchelonError) as caught:
        make_entry_from_options("u@h", "a b", 70_000, None, Path('/k"e\ny'))
    assert len(caught.value.faults) == 4
    for alias in ("*", "-x", "a b", "!a", "a\nb"):
        with pytest.raises(EchelonError, match="is not a name for a host"):
            make_entry_from_options("h", None, None, alias, KEY)


def test_an_alias_is_found_wherever_ssh_reads_it(tmp_path: Path) -> None:
    config, more = tmp_path / "config", tmp_path / "conf.d"
    more.mkdir()
    (more / "pods").write_text('Host\tfirst "pod"\n  Port 7\n\nMatch all\n  User u\n')
    (more / "deep").write_text(f"Host=below\n  Port=8\nInclude={tmp_path}/conf*/deep\n")
    rest = "host web *.example\n  User w\nHost *\n  Compression yes\n"
    config.write_text(f"Include {more}/*\n{rest}")
    assert find_entry(config, "pod") == f'# {more / "pods"}\nHost\tfirst "pod"\n  Port 7\n'
    assert find_entry(config, "below") is not None
    assert find_entry(config, "web") == f"# {config}\nhost web *.example\n  User w\n"
    assert find_entry(config, "po") is None
    assert find_entry(config, "other") is None, "a pattern names nobody"
    assert find_entry(tmp_path / "nothing", "pod") is None


def test_what_is_there_stays(tmp_path: Path) -> None:
    config = tmp_path / "new" / "config"
    append_to_config(config, "Host a\n")
    assert [_mode(config.parent), _mode(config)] == [0o700, 0o600]
    config.write_text("Host b")
    config.chmod(0o644)
    link = tmp_path / "link"
    link.symlink_to(config)
    append_to_config(link, "Host a\n")
    assert link.is_symlink()
    assert (config.read_text(), _mode(config)) == ("Host b\n\nHost a\n", 0o644)
    assert [p.name for p in config.parent.iterdir()] == ["config"], "nothing left beside"


def test_a_file_in_another_encoding_stays_as_it_is(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_bytes(b"# caf\xe9\n")
    assert find_entry(config, "a") is None
    append_to_config(config, "Host a\n")
    assert config.read_bytes() == b"# caf\xe9\n\nHost a\n"


def test_a_folder_in_place_of_the_configuration_is_told(tmp_path: Path) -> None:
    with pytest.raises(EchelonError, match="cannot be written"):
        append_to_config(tmp_path, "Host a\n")


def test_a_key_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "ssh" / "key"
    assert not keys.key_exists(path)
    keys.make_key(path)
    assert [_mode(path.parent), _mode(path)] == [0o700, 0o600]
    shown = keys.read_public_key(path)
    assert shown.startswith("ssh-ed25519 ")
    Path(f"{path}.pub").unlink()
    assert keys.read_public_key(path).split()[:2] == shown.split()[:2], "worked out again"
    path.write_text("something else of mine")
    assert keys.key_exists(path)
    with pytest.raises(EchelonError, match="its public key cannot be read"):
        keys.read_public_key(path)
    with pytest.raises(EchelonError, match="no key could be made"):
        keys.make_key(path)
    assert path.read_text() == "something else of mine"


def test_without_a_terminal_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, key = tmp_path / "c", tmp_path / "k"
    wanted = SshSetupOptions("h", "u", None, "pod", str(key), str(config), False, False)
    assert setup_ssh(wanted) == ExitCode.USAGE
    assert "    HostName h" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)

"""pip's settings: read as pip reads them, handed to uv in its words, passwords to nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.environments.package_indexes import (
    PackageIndexes,
    apply_options,
    drop_redirecting_variables,
    hide_passwords,
    read_pip_settings,
)


def read_settings(folder: Path, **files: str) -> dict[str, str]:
    """Variables of a user whose pip.conf files are these: user, own, system."""
    places = {
        "system": folder / "xdg" / "pip" / "pip.conf",
        "user": folder / ".config" / "pip" / "pip.conf",
        "own": folder / "own.conf",
    }
    for name, text in files.items():
        places[name].parent.mkdir(parents=True, exist_ok=True)
        places[name].write_text(text)
    environ = {"HOME": str(folder), "XDG_CONFIG_DIRS": str(folder / "xdg"), "PATH": os.defpath}
    return environ | ({"PIP_CONFIG_FILE": str(places["own"])} if "own" in files else {})


def test_files_and_variables_win_in_pips_order(tmp_path: Path) -> None:
    environ = read_settings(
        tmp_path,
        system="[global]\nindex-url = https://system/\nfind-links = /a\n    /b\n",
        user="[global]\nindex_url = https://user/\n[install]\nextra-index-url = https://i/\n",
        own="[global]\nextra-index-url = https://own/\ntrusted-host = x y\npre = true\n",
    )
    found = read_pip_settings(environ, tmp_path)
    assert (found.url, found.extra) == ("https://system/", ("https://own/",)), "own shuts user out"
    assert found.find_links == ("/a", "/b")
    assert found.trusted_hosts == ("x", "y")
    assert found.pre
    del environ["PIP_CONFIG_FILE"]
    found = read_pip_settings(environ, tmp_path)
    assert (found.url, found.extra) == ("https://user/", ("https://i/",))
    found = read_pip_settings(
        environ | {"PIP_INDEX_URL": "https://v/", "PIP_NO_INDEX": "1"}, tmp_path
    )
    assert (found.url, found.no_index) == ("https://v/", True)
    assert (
        read_pip_settings({"PIP_CONFIG_FILE": os.devnull, "HOME": "/"}, tmp_path)
        == PackageIndexes()
    )


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.slow
def test_pip_itself_reads_the_same(tmp_path: Path, own: bool) -> None:
    files = {
        "system": "[global]\nindex-url = https://system/\ntimeout = 3\nno-index = yes\n",
        "user": "[global]\nindex-url = https://user/\nproxy = http://user:1\n",
    } | ({"own": "[global]\nproxy = http://p:1\n"} if own else {})
    environ = read_settings(tmp_path, **files) | {"PIP_FIND_LINKS": "/w"}
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("no pip here")
    found = read_pip_settings(environ, Path(sys.prefix))
    for line in (
        f"global.index-url={found.url!r}",
        f"global.timeout={found.timeout_s!r}",
        f"global.proxy={found.proxy!r}",
        "global.no-index='yes'",
        f":env:.find-links={found.find_links[0]!r}",
    ):
        assert line in done.stdout
    assert found.no_index


def test_settings_are_translated_for_uv() -> None:
    found = PackageIndexes(
        url="https://u:pw@a/",
        extra=("https://b/", "https://c/"),
        find_links=("/w", "/v"),
        trusted_hosts=("d",),
        cert="/cert",
        proxy="http://p",
        no_index=True,
        pre=True,
        only_binary=("torch",),
    )
    assert found.make_environment_variables("uv") == {
        "UV_INDEX_URL": "https://u:pw@a/",
        "UV_EXTRA_INDEX_URL": "https://b/ https://c/",
        "UV_FIND_LINKS": "/w,/v",
        "UV_INSECURE_HOST": "d",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "SSL_CERT_FILE": "/cert",
        "ALL_PROXY": "http://p",
    }
    assert found.make_install_flags("uv") == [
        "--no-index",
        "--prerelease=allow",
        "--only-binary=torch",
    ]
    assert found.make_install_flags("pip") == ["--no-index", "--pre", "--only-binary=torch"]
    assert "pw" not in repr(found)


def test_uvs_own_index_takes_precedence() -> None:
    found = PackageIndexes(
        url="https://a/", extra=("https://b/",), uv_variables=(("UV_DEFAULT_INDEX", "https://o"),)
    )
    assert found.make_environment_variables("uv") == {"UV_DEFAULT_INDEX": "https://o"}


def test_a_requirements_file_replaces_the_index_and_adds_the_rest() -> None:
    options = [("--index-url", "https://n/"), ("--extra-index-url", "https://m/"), ("--pre", "")]
    found = apply_options(PackageIndexes(url="https://a/", extra=("https://b/",)), options)
    assert (found.url, found.extra, found.pre) == ("https://n/", ("https://b/", "https://m/"), True)
    none = apply_options(found, [("--no-index", "")])
    assert (none.url, none.extra, none.no_index) == ("", (), True)


def test_variables_that_redirect_packages_are_removed() -> None:
    away = {"PIP_TARGET": "/t", "PIP_USER": "1", "PYTHONPATH": "/p", "VIRTUAL_ENV": "/v"}
    assert drop_redirecting_variables(away | {"HOME": "/h"}) == {"HOME": "/h"}
    assert PackageIndexes().make_environment_variables("pip") == {"PIP_USER": "0"}, (
        "clusters have user = true in pip.conf"
    )


def test_passwords_are_not_shown() -> None:
    text = "Looking in https://user:pa$s@host/simple, git+ssh://git@h/r and https://host/a@b"
    assert hide_passwords(text) == (
        "Looking in https://****@host/simple, git+ssh://****@h/r and https://host/a@b"
    )
    assert hide_passwords("https://user:a@b@host/simple") == "https://****@host/simple"

"""Where packages come from: pip's own settings, applied to pip and translated for uv.

uv reads neither pip.conf nor PIP_* variables, so it would bypass a cluster's mirror or proxy. The
files are parsed here because `pip config list` takes half a second.

URLs may contain passwords. They are passed to the builder in environment variables and written
nowhere.
"""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from echelon.errors import Fault

_TRUE_WORDS = {"1", "true", "yes", "y", "on", "t"}
_UV_RESOLUTION_VARIABLES = (
    *("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS"),
    *("UV_INDEX_STRATEGY", "UV_PRERELEASE", "UV_RESOLUTION", "UV_CONSTRAINT", "UV_OVERRIDE"),
    *("UV_EXCLUDE_NEWER", "UV_TORCH_BACKEND", "UV_NO_BINARY", "UV_NO_BUILD"),
)
"""uv's variables that change which packages are installed, and so are part of the cache key."""
_UV_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL")
"""Those that name an index; if one is set, pip's index is not passed to uv."""
_PIP_TARGET_SETTINGS = (
    "TARGET",
    "PREFIX",
    "ROOT",
    "USER",
    "PYTHON",
    "DRY_RUN",
    "REQUIRE_VIRTUALENV",
)
"""Settings of pip that would install the packages somewhere else than into the environment."""


@dataclass(frozen=True)
class PackageIndexes:
    """Indexes and install options, as pip would have them from its files, variables and the
    requirements."""

    url: str = field(default="", repr=False)
    """The index; empty for PyPI."""
    extra: tuple[str, ...] = field(default=(), repr=False)
    find_links: tuple[str, ...] = field(default=(), repr=False)
    no_index: bool = False
    trusted_hosts: tuple[str, ...] = ()
    """HOST or HOST:PORT that may be used without TLS."""
    pre: bool = False
    require_hashes: bool = False
    prefer_binary: bool = False
    no_binary: tuple[str, ...] = ()
    only_binary: tuple[str, ...] = ()
    constraint: tuple[str, ...] = ()
    """Constraints files named by pip's settings, not by the requirements."""
    cert: str = ""
    client_cert: str = ""
    proxy: str = field(default="", repr=False)
    timeout_s: str = ""
    uv_variables: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """uv's own variables that the user has set; they take precedence over pip's settings."""

    def list_cache_key_parts(self) -> list[object]:
        """Return what the cache key depends on. Certificates and proxies do not change what is
        installed."""
        return [
            *(self.url, self.extra, self.find_links, self.no_index, self.pre, self.require_hashes),
            *(
                self.prefer_binary,
                self.no_binary,
                self.only_binary,
                self.constraint,
                self.uv_variables,
            ),
        ]

    def list_urls(self) -> list[str]:
        """Return every address that packages may come from."""
        return [url for url in (self.url, *self.extra, *self.find_links) if url]

    def make_install_flags(self, builder: str) -> list[str]:
        """Return options for `pip install` or `uv pip install`: those that are not secret and that
        no variable can express in both."""
        flags = {
            "--no-index": self.no_index,
            "--pre": self.pre and builder == "pip",
            "--prerelease=allow": self.pre and builder == "uv",
            "--require-hashes": self.require_hashes,
            "--prefer-binary": self.prefer_binary and builder == "pip",  # uv does by itself
        }
        words = [word for word, set_ in flags.items() if set_]
        words += [f"--no-binary={name}" for name in self.no_binary]
        words += [f"--only-binary={name}" for name in self.only_binary]
        return words + [f"--constraint={file}" for file in self.constraint]

    def make_environment_variables(self, builder: str) -> dict[str, str]:
        """Return the variables that carry these settings to `builder` (pip or uv)."""
        return self._make_uv_variables() if builder == "uv" else self._make_pip_variables()

    def _make_pip_variables(self) -> dict[str, str]:
        variables = {
            "PIP_INDEX_URL": self.url,
            "PIP_EXTRA_INDEX_URL": " ".join(self.extra),
            "PIP_FIND_LINKS": " ".join(self.find_links),
            "PIP_TRUSTED_HOST": " ".join(self.trusted_hosts),
            "PIP_CERT": self.cert,
            "PIP_CLIENT_CERT": self.client_cert,
            "PIP_PROXY": self.proxy,
            "PIP_DEFAULT_TIMEOUT": self.timeout_s,
        }
        return {k: v for k, v in variables.items() if v} | {"PIP_USER": "0"}

    def _make_uv_variables(self) -> dict[str, str]:
        variables = {
            "UV_INDEX_URL": self.url,
            "UV_EXTRA_INDEX_URL": " ".join(self.extra),
            "UV_FIND_LINKS": ",".join(self.find_links),
            "UV_INSECURE_HOST": " ".join(self.trusted_hosts),
            "SSL_CERT_FILE": self.cert,
            "SSL_CLIENT_CERT": self.client_cert,
            "ALL_PROXY": self.proxy,
            "UV_HTTP_TIMEOUT": self.timeout_s,
        }
        if any(name in _UV_INDEX_VARIABLES for name, _ in self.uv_variables):
            variables |= {"UV_INDEX_URL": "", "UV_EXTRA_INDEX_URL": ""}
        elif self.extra or self.find_links:
            # pip takes the best version of all indexes, uv the first index that has the package.
            # These settings were written for pip and must lead to the same packages.
            variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
        return {k: v for k, v in variables.items() if v} | dict(self.uv_variables)


def read_pip_settings(environ: Mapping[str, str], prefix: Path) -> PackageIndexes:
    """Return the settings that `pip install` of that prefix would use: pip.conf files, then PIP_*
    variables."""
    values = _read_pip_files(environ, prefix) | _read_pip_variables(environ)

    def words(name: str) -> tuple[str, ...]:
        return tuple(values.get(name, "").split())

    def flag(name: str) -> bool:
        return values.get(name, "").strip().lower() in _TRUE_WORDS

    return PackageIndexes(
        url=(values.get("index-url") or values.get("pypi-url") or "").strip(),
        extra=words("extra-index-url"),
        find_links=words("find-links"),
        no_index=flag("no-index"),
        trusted_hosts=words("trusted-host"),
        pre=flag("pre"),
        require_hashes=flag("require-hashes"),
        prefer_binary=flag("prefer-binary"),
        no_binary=words("no-binary"),
        only_binary=words("only-binary"),
        constraint=words("constraint"),
        cert=values.get("cert", ""),
        client_cert=values.get("client-cert", ""),
        proxy=values.get("proxy", ""),
        timeout_s=values.get("timeout") or values.get("default-timeout", ""),
        uv_variables=tuple(
            (name, environ[name]) for name in _UV_RESOLUTION_VARIABLES if environ.get(name)
        ),
    )


def drop_redirecting_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a builder, without those that would redirect it or its Python."""
    misleading = {f"PIP_{name}" for name in _PIP_TARGET_SETTINGS}
    misleading |= {"VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME", "PYTHONPATH", "UV_PYTHON"}
    misleading |= {"UV_PROJECT_ENVIRONMENT", "__PYVENV_LAUNCHER__", "PIPENV_ACTIVE"}
    return {k: v for k, v in environ.items() if k not in misleading}


def apply_options(indexes: PackageIndexes, options: Iterable[tuple[str, str]]) -> PackageIndexes:
    """Return the settings with the options of a requirements file: its index replaces pip's, other
    options are added."""
    for name, value in options:
        match name:
            case "--index-url":
                indexes = replace(indexes, url=value, no_index=False)
            case "--extra-index-url":
                indexes = replace(indexes, extra=(*indexes.extra, value))
            case "--find-links":
                indexes = replace(indexes, find_links=(*indexes.find_links, value))
            case "--no-index":
                indexes = replace(indexes, url="", extra=(), no_index=True)
            case "--trusted-host":
                indexes = replace(indexes, trusted_hosts=(*indexes.trusted_hosts, value))
            case "--pre":
                indexes = replace(indexes, pre=True)
            case "--require-hashes":
                indexes = replace(indexes, require_hashes=True)
            case "--prefer-binary":
                indexes = replace(indexes, prefer_binary=True)
            case "--no-binary":
                indexes = replace(indexes, no_binary=(*indexes.no_binary, value))
            case "--only-binary":
                indexes = replace(indexes, only_binary=(*indexes.only_binary, value))
    return indexes


def is_insecure(url: str, trusted_hosts: Iterable[str]) -> bool:
    """Return whether packages from this URL could be tampered with: plain http, not to this
    machine, and not trusted."""
    parts = urlsplit(url.partition("+")[2] if re.match(r"\w+\+", url) else url)
    if parts.scheme != "http":
        return False
    host = (parts.hostname or "").lower()
    port = f":{parts.port}" if parts.port else ""
    if host in ("localhost", "::1") or re.fullmatch(r"127(\.\d+){3}", host):
        return False
    return not {host, host + port, f"[{host}]", f"[{host}]{port}"} & {
        t.lower() for t in trusted_hosts
    }


def make_insecure_fault(url: str, location: str) -> Fault:
    """Return the fault for packages over plain http."""
    host = urlsplit(url).hostname or "HOST"
    return Fault(
        f"{location}: packages from {hide_passwords(url)} come over plain http, where "
        "anybody in the network can change them",
        f"use https, or declare that you trust the network with --trusted-host {host} "
        f"(or PIP_TRUSTED_HOST={host})",
    )


def hide_passwords(text: str) -> str:
    """Return the text with the credentials in its URLs replaced; a password may contain an @
    itself."""
    return re.sub(r"(?<=://)[^/\s'\"]+@", "****@", text)


# --- pip's files ---


def _read_pip_files(environ: Mapping[str, str], prefix: Path) -> dict[str, str]:
    """Return the settings of all pip.conf files; later files and [install] win."""
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}}
    for file in _list_pip_files(environ, prefix):
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, configparser.Error):
            continue  # absent, or broken: then pip reports it, as it reads the same file
        for section, merged in sections.items():
            if parser.has_section(section):
                merged.update(
                    (_normalize_option_name(name), value) for name, value in parser.items(section)
                )
    return sections["global"] | sections["install"]


def _list_pip_files(environ: Mapping[str, str], prefix: Path) -> list[Path]:
    """Return pip.conf files in pip's order: system, user, prefix, PIP_CONFIG_FILE."""
    config_file = environ.get("PIP_CONFIG_FILE", "")
    if config_file == os.devnull:
        return []
    home = Path(environ.get("HOME") or Path.home())
    system = [d for d in (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":") if d]
    user = [
        home / ".pip" / "pip.conf",
        Path(environ.get("XDG_CONFIG_HOME") or home / ".config", "pip", "pip.conf"),
    ]
    return [
        *(Path(folder, "pip", "pip.conf") for folder in system),
        Path("/etc/pip.conf"),
        *([] if config_file and Path(config_file).exists() else user),  # as pip does
        prefix / "pip.conf",
        *([Path(config_file)] if config_file else []),
    ]


def _read_pip_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings in PIP_* variables."""
    return {
        _normalize_option_name(k[4:]): v for k, v in environ.items() if k.startswith("PIP_") and v
    }


def _normalize_option_name(name: str) -> str:
    """Return `index-url` for INDEX_URL, index_url and --index-url."""
    return name.lower().replace("_", "-").removeprefix("--")

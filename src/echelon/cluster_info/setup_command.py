"""`echelon setup cluster`: look at a cluster, and write a file of defaults for it."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from echelon.cluster_info.cluster_facts import ClusterFacts, read_facts
from echelon.cluster_info.defaults_draft import collect_values, draft_settings, render_draft
from echelon.cluster_info.free_table import describe_partition
from echelon.cluster_info.login_probe import LoginNode, build_probe, format_command
from echelon.config.defaults_files import FILE_NAME, find_user_folder
from echelon.errors import EchelonError, ExitCode, Fault, suggest_other_folder
from echelon.utils.files import write_text_atomically
from echelon.utils.os_errors import format_os_error_reason


class SetupOptions(NamedTuple):
    """How the file is written."""

    file: Path
    force: bool
    dry_run: bool
    as_json: bool


def choose_file(given: str | None, for_user: bool, env: Mapping[str, str]) -> Path:
    """Return the file to write: that of this project, of the user, or any other."""
    if given is not None:
        return Path(given).expanduser()
    return find_user_folder(env) / FILE_NAME if for_user else Path(FILE_NAME)


def setup_cluster(node: LoginNode, options: SetupOptions) -> int:
    """Ask the login node once, and write the file or show it; returns the exit code."""
    facts = read_facts(node, node.ask(build_probe(with_setup=True)))
    text = render_draft(facts, format_command(node, "setup", "cluster"))
    code = ExitCode.OK
    is_written = False
    if not options.dry_run:
        is_written = _write(options, text)
        code = ExitCode.OK if is_written else ExitCode.USAGE
    elif not options.as_json:
        print(text, end="")
    if options.as_json:
        print(json.dumps(_describe(facts, options.file, text, is_written), indent=2))
    return code


def _write(options: SetupOptions, text: str) -> bool:
    """Write the file, or show how it would change and ask; returns whether the text is there."""
    file = options.file
    try:
        there = file.read_text(encoding="utf-8") if file.exists() else None
        if there is not None and there != text and not options.force:
            _print_difference(file, there, text)
            if not _confirm(file):
                return False
        file.parent.mkdir(parents=True, exist_ok=True)
        if there != text:  # a link to a file among other settings stays one
            write_text_atomically(Path(os.path.realpath(file)), text, names_code=True)
    except UnicodeDecodeError:
        raise EchelonError(
            Fault(f"{file} is not a text in UTF-8", "name another one with --file FILE")
        ) from None
    except OSError as error:
        raise EchelonError(
            Fault(
                f"{file} cannot be written: {format_os_error_reason(error)}",
                suggest_other_folder(error, "--file FILE"),
            )
        ) from error
    if not options.as_json:
        print(f"{file} is written; look at it, and then: echelon train launch=slurm --dry-run")
    return True


def _print_difference(file: Path, there: str, text: str) -> None:
    """Show on stderr what would change."""
    lines = difflib.unified_diff(
        there.splitlines(), text.splitlines(), f"{file} as it is", f"{file} as found", lineterm=""
    )
    print("\n".join(lines), file=sys.stderr)


def _confirm(file: Path) -> bool:
    """Ask whether to replace a file; without a terminal nobody can be asked."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        print(
            f"error: nothing was written: {file} is there and differs\n"
            "  hint: type the same with --force to replace it, or --file FILE for another one",
            file=sys.stderr,
        )
        return False
    print(f"replace {file}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    print("nothing was written", file=sys.stderr)
    return False


def _describe(facts: ClusterFacts, file: Path, text: str, is_written: bool) -> dict[str, Any]:
    """Return what was found and drafted as plain values."""
    return {
        "version": 1,
        "host": facts.host,
        "cluster": facts.cluster or None,
        "slurm": str(facts.version) if facts.version else None,
        "user": facts.user,
        "partitions": [describe_partition(p) for p in facts.partitions],
        "accounting": facts.has_accounting,
        "accounts": [dataclasses.asdict(a) for a in facts.associations],
        "qos": [dataclasses.asdict(q) for q in facts.qos],
        "reservations": list(facts.reservations),
        "licenses": list(facts.licenses),
        "modules": list(facts.modules),
        "pythons": [{"path": path, "version": version} for path, version in facts.pythons],
        "containers": [
            {"name": name, "version": version or None} for name, version in facts.containers
        ],
        "folders": [{**dataclasses.asdict(f), "is_shared": f.is_shared} for f in facts.folders],
        "settings": dict(collect_values(draft_settings(facts))),
        "file": os.fspath(file.absolute()),
        "written": is_written,
        "text": text,
    }

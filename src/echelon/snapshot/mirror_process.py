"""The process that moves snapshots to and from an object store: `python -m` this module.

A process of its own, because the training must not share its interpreter with an upload, because
the client of the store has threads, which do not survive the forks of loader processes, and because
a store that never answers can be left with a kill. It reads requests from stdin, a line of JSON
each, and answers on stdout: `{"bytes": 1048576}` while bytes move, then `{"result": …}`,
`{"failed": "a sentence"}` (with `"do"` if it will not pass by itself), `{"taken": "a sentence"}` or
`{"faults": …}`.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.object_store.limits import read_limits
from echelon.object_store.object_folder import ObjectFolder
from echelon.object_store.store_errors import ObjectStoreError, StoreProblem
from echelon.object_store.urls import parse_url
from echelon.snapshot.layout import (
    BEST_LINK,
    MANIFEST_FILE,
    parse_step,
)
from echelon.snapshot.manifest import InvalidSnapshotError
from echelon.snapshot.mirror_claim import MirrorClaim, read_claim, write_claim
from echelon.snapshot.mirror_objects import MirrorObjects, MirrorTakenError
from echelon.snapshot.retention import delete_path, hide_folder, mark_best
from echelon.utils.files import flush_to_disk
from echelon.utils.os_errors import format_os_error_reason
from echelon.utils.processes import die_with_parent

_NICENESS = 10
"""The training and its loaders have the processors first."""
_REPORT_BYTES = 1 << 20
"""After so many bytes the parent is told that something moves."""


_MISTAKES = (StoreProblem.NO_BUCKET, StoreProblem.DENIED, StoreProblem.NO_CREDENTIALS)
"""Problems that do not pass by themselves."""


def open_objects(url: str, on_bytes: Callable[[int], None] = lambda count: None) -> MirrorObjects:
    """Return the objects below an address. ``on_bytes`` is called while bytes move."""
    return MirrorObjects(ObjectFolder(parse_url(url), read_limits(os.environ)), on_bytes)


def fetch_newer(
    objects: MirrorObjects,
    url: str,
    owner_file: str,
    snapshots: str,
    newest_step: int | None,
    is_adopted: bool,
    is_fetched: bool,
) -> dict[str, Any]:
    """Bring what is newer in the mirror to the folder of a run.

    ``owner_file`` says as whom this folder has written there. ``newest_step`` is that of its newest
    valid snapshot. ``is_adopted``: the folder has none of its own, so it may become that of the run
    which the mirror is of. ``is_fetched``: the run continues from its newest snapshot, wherever
    that is.
    """
    owner, there, names = (
        read_claim(Path(owner_file)),
        objects.read_claim(),
        objects.list_snapshots(),
    )
    is_ours = owner is not None and (there is None or there.run == owner.run)
    if names and not is_ours and not is_adopted:
        raise EchelonError(
            Fault(
                f"{url} holds snapshots of another run of this name, up to step "
                f"{parse_step(names[-1])}",
                "choose another run.name or trainer.mirror, or remove what is there",
            )
        )
    if not is_ours and there is not None:
        write_claim(Path(owner_file), there)  # before the first snapshot of it is here
    warnings: list[str] = []
    fetched = None
    if is_fetched:
        after = -1 if newest_step is None else newest_step
        newer = [name for name in names if (parse_step(name) or 0) > after]
        fetched = fetch_first_valid(objects, url, reversed(newer), Path(snapshots), warnings)
        if fetched is None and newer and newest_step is None:
            raise EchelonError(
                Fault(
                    f"of the snapshots in {url} none is valid: {'; '.join(warnings)}",
                    "bring them back, choose another run.name, or remove what is there",
                ),
                exit=ExitCode.NOT_FOUND,
            )
        if fetched is not None:
            _fetch_best(objects, url, Path(snapshots), warnings)
    return {
        "fetched_step": parse_step(fetched) if fetched is not None else None,
        "mirrored_step": parse_step(names[-1]) if names else None,
        "warnings": warnings,
    }


def take_mirror(objects: MirrorObjects, url: str, owner_file: str) -> dict[str, Any]:
    """Take the mirror for this start of the run: any other one no longer writes."""
    before = read_claim(Path(owner_file))
    owner = MirrorClaim(before.run if before else secrets.token_hex(8), secrets.token_hex(8))
    objects.write_claim(owner)
    write_claim(Path(owner_file), owner)
    return {"owner": list(owner)}


def update_mirror(
    objects: MirrorObjects,
    url: str,
    owner: list[str],
    folders: list[str],
    best: str | None,
    step: int,
    keep_last: int,
) -> dict[str, Any]:
    """Upload snapshots, mark the best one, and remove old ones, in this order."""
    writer = MirrorClaim(*owner)
    objects.require_owner(writer)
    for folder in folders:
        objects.upload(Path(folder), writer)
    objects.mark_best(best)
    objects.remove_old(step, keep_last)
    return {}


def fetch_given(objects: MirrorObjects, url: str, which: str, folder: str) -> dict[str, Any]:
    """Bring a snapshot that `trainer.resume` names to a folder: the newest valid one, ``best``, or
    that of a step."""
    names, warnings = objects.list_snapshots(), list[str]()
    chosen = list(reversed(names))
    if which:
        name = objects.read_best() if which == BEST_LINK else which
        chosen = [name] if name in names else []
    if not chosen:
        what = f"no snapshot {which}" if which else "no snapshot"
        kept = f"kept are {', '.join(names)}" if names else "give s3://BUCKET/PREFIX/RUN"
        raise EchelonError(Fault(f"there is {what} in {url}", kept), exit=ExitCode.NOT_FOUND)
    fetched = fetch_first_valid(objects, url, chosen, Path(folder), warnings)
    if fetched is None:
        raise EchelonError(
            Fault(
                f"there is no valid snapshot in {url}: {'; '.join(warnings)}", "give another one"
            ),
            exit=ExitCode.NOT_FOUND,
        )
    return {"name": fetched, "warnings": warnings}


def fetch_first_valid(
    objects: MirrorObjects, url: str, names: Any, root: Path, warnings: list[str]
) -> str | None:
    """Fetch the first of these snapshots that is valid; return its name. The others are named."""
    for name in names:
        try:
            _fetch_into_place(objects, url, name, root)
        except InvalidSnapshotError as error:
            warnings.append(f"{url}/{name} is damaged ({error})")
        else:
            return str(name)
    return None


def _fetch_best(objects: MirrorObjects, url: str, root: Path, warnings: list[str]) -> None:
    """Fetch the best snapshot too, unless it is here, and mark it as in the mirror."""
    name = objects.read_best()
    if name is None:
        return
    if not (root / name / MANIFEST_FILE).is_file():
        if name not in objects.list_snapshots():
            return
        if fetch_first_valid(objects, url, [name], root, warnings) is None:
            return
    mark_best(root / name)


def _fetch_into_place(objects: MirrorObjects, url: str, name: str, root: Path) -> None:
    """Fetch one snapshot into a hidden folder, then give it its name: before, there is none."""
    step = parse_step(name)
    assert step is not None
    hidden = root / f".writing-{step:09d}-{secrets.token_hex(4)}"
    replaced: Path | None = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        objects.fetch(name, hidden)
        if os.path.lexists(root / name):  # damaged, or the mirror would not have been asked
            replaced = hide_folder(root / name)
        os.rename(hidden, root / name)
        flush_to_disk(root)
    except OSError as error:
        raise EchelonError(
            Fault(
                f"{url}/{name} cannot be brought to {root}: {format_os_error_reason(error)}",
                "free some space there, or give another place with run.dir=PATH",
            ),
            exit=ExitCode.FAILED,
        ) from error
    finally:
        delete_path(hidden)
        if replaced is not None:
            delete_path(replaced)


# --- the process ---


class _Answers:
    """Writes lines to the parent, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0

    def count_bytes(self, count: int) -> None:
        with self._lock:
            self._bytes += count
            if self._bytes >= _REPORT_BYTES:
                self._write({"bytes": self._bytes})
                self._bytes = 0

    def send(self, answer: dict[str, Any]) -> None:
        with self._lock:
            self._write(answer)

    def _write(self, answer: dict[str, Any]) -> None:
        print(json.dumps(answer), flush=True)


_REQUESTS: dict[str, Callable[..., dict[str, Any]]] = {
    "fetch newer": fetch_newer,
    "take": take_mirror,
    "update": update_mirror,
    "fetch given": fetch_given,
}


def main() -> None:
    """Answer requests until the parent closes the pipe, or ends."""
    # A signal to stop is the training's to handle; this process ends after the last upload.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(int(sys.argv[1]))
    os.nice(_NICENESS)
    # Every part is sent with a checksum, and S3 refuses one that does not arrive as it was sent.
    os.environ.setdefault("AWS_CHECKSUM_ALGORITHM", "SHA256")
    answers = _Answers()
    opened: dict[str, MirrorObjects] = {}
    for line in sys.stdin:
        request = json.loads(line)
        answers.send(_answer(request, opened, answers.count_bytes))


def _answer(
    request: dict[str, Any], opened: dict[str, MirrorObjects], on_bytes: Callable[[int], None]
) -> dict[str, Any]:
    work, url = _REQUESTS[request.pop("do")], request["url"]
    try:
        if url not in opened:
            opened[url] = open_objects(url, on_bytes)
        return {"result": work(opened[url], **request)}
    except ObjectStoreError as error:
        what, do = error.faults[0]
        return {"failed": what, "do": do if error.problem in _MISTAKES else None}
    except EchelonError as error:
        return {"faults": [list(fault) for fault in error.faults], "exit": int(error.exit)}
    except MirrorTakenError as error:
        return {"taken": str(error)}
    except InvalidSnapshotError as error:
        return {"failed": str(error)}
    except OSError as error:
        return {"failed": f"{error.filename}: {format_os_error_reason(error)}"}
    except Exception as error:  # a process that dies in silence would look like an outage
        return {"failed": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()

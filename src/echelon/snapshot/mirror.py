"""A mirror of the newest snapshots in an object store, kept by a process beside rank 0.

The training only says that a snapshot is on disk. What is uploaded is decided when an upload
begins: the newest snapshot, and the best one where that is another. So a newer one takes the place
of those that wait. A store that fails costs one warning, is tried again, and never ends a training.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.snapshot.layout import find_best, parse_step

_RETRY_FIRST_S, _RETRY_LAST_S = 5.0, 300.0
_CLOSING_RETRY_S, _CLOSING_ATTEMPTS = 1.0, 3
STALL_S = 60.0
"""When nothing has moved for so long at the end of a run, what is missing is given up."""
_POLL_S = 0.2


class MirrorFailedError(Exception):
    """A request to the store failed, as a sentence. ``do`` is what to do about it, where it will
    not pass by itself."""

    def __init__(self, reason: str, do: str | None = None) -> None:
        super().__init__(reason)
        self.do = do


class MirrorLostError(Exception):
    """Somebody else writes to the mirror, so this start does not any more."""


class MirrorProcess:
    """The process that talks to the store; started when it is asked for the first time, and again
    when it has ended. It ends with the thread that started it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._start_lock = threading.Lock()
        self._is_closed = False
        self.last_moved_s = time.monotonic()
        """When bytes moved."""

    def ask(self, do: str, url: str, **request: Any) -> dict[str, Any]:
        """Have a request of `mirror_process` carried out, and return its result.

        Raises MirrorFailedError, MirrorLostError, or the EchelonError of a user's mistake.
        """
        with self._start_lock:
            process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps({"do": do, "url": url, **request}) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            answer = json.loads(line)
            if "bytes" in answer:
                self.last_moved_s = time.monotonic()
            if "result" in answer:
                result: dict[str, Any] = answer["result"]
                return result
            if "failed" in answer:
                raise MirrorFailedError(answer["failed"], answer.get("do"))
            if "taken" in answer:
                raise MirrorLostError(answer["taken"])
            if "faults" in answer:
                faults = [Fault(*fault) for fault in answer["faults"]]
                raise EchelonError(*faults, exit=ExitCode(answer["exit"]))
        raise MirrorFailedError(f"its process ended with code {process.wait()}")

    def close(self) -> None:
        """End the process, whatever it does. Who waits for an answer gets a MirrorFailedError."""
        with self._start_lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def _start(self) -> subprocess.Popen[str]:
        if self._is_closed:
            raise MirrorFailedError("its process has ended")
        if find_spec("obstore") is None:
            raise EchelonError(
                Fault(
                    "snapshots in object stores need the package obstore, which is not installed",
                    "pip install 'echelon[cloud]'",
                )
            )
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "echelon.snapshot.mirror_process", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
            )
        return self._process


class SnapshotMirror:
    """Keeps the newest snapshots of one run, and the best one, in an object store."""

    def __init__(
        self,
        process: MirrorProcess,
        url: str,
        owner: Sequence[str],
        keep_last: int,
        mirrored_step: int | None = None,
    ) -> None:
        self.url = url
        self.mirrored_step = mirrored_step
        """The newest step that is complete there."""
        self.problem: str | None = None
        """Why newer ones are not."""
        self._process, self._owner, self._keep_last = process, tuple(owner), keep_last
        self._changed = threading.Condition()
        self._waiting: Path | None = None
        """The newest snapshot, if it is not there yet and no upload has begun."""
        self._uploading: tuple[Path, ...] = ()
        """The newest one, and the best one where that is another."""
        self._is_closing = False
        self._closing_attempts = 0
        self._messages: deque[str] = deque()
        self._thread = threading.Thread(target=self._work, daemon=True, name="mirror")
        self._thread.start()

    def add(self, folder: Path) -> None:
        """Note that a snapshot is on disk, or was changed there. It takes the place of one that
        waits."""
        with self._changed:
            self._waiting = folder
            self._changed.notify_all()

    def list_needed(self) -> set[Path]:
        """Return the folders that have to stay on disk until they are uploaded."""
        if not self._thread.is_alive():  # nothing is uploaded any more
            return set()
        with self._changed:
            return {*self._uploading, *([self._waiting] if self._waiting else [])}

    def take_messages(self) -> list[str]:
        """Return what is to be said since the last call."""
        taken = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._messages.popleft())
        return taken

    def close(self, limit_s: float | None, on_wait: Callable[[float], None]) -> None:
        """Wait until the newest snapshot is uploaded: as long as bytes move, and no longer than the
        limit. ``on_wait`` is called several times a second meanwhile, with the seconds so far."""
        begun_s = time.monotonic()
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        while self._thread.is_alive():
            self._thread.join(_POLL_S)
            on_wait(time.monotonic() - begun_s)
            now_s = time.monotonic()
            if limit_s is not None and now_s - begun_s > limit_s:
                self._leave(f"it took longer than {limit_s:.0f} s")
            elif now_s - max(begun_s, self._process.last_moved_s) > STALL_S:
                self._leave(f"nothing moved for {STALL_S:.0f} s")
        self._process.close()

    def _leave(self, reason: str) -> None:
        """Give up what is not there yet. An earlier problem says more than a limit."""
        reason = self.problem or reason
        self._closing_attempts = _CLOSING_ATTEMPTS
        self._process.close()
        self._thread.join()
        self.problem = reason

    # --- in the thread ---

    def _work(self) -> None:
        """Upload what waits until the run ends, and then once more if something is left."""
        retry_s = _RETRY_FIRST_S
        while (taken := self._take_waiting()) is not None:
            newest, best = taken
            try:
                self._update(newest, best)
            except MirrorLostError as error:
                self.problem = str(error)
                self._messages.append(
                    f"warning: snapshots are no longer mirrored to {self.url}: {error}"
                )
                return
            except (MirrorFailedError, EchelonError, OSError) as error:
                reason = error.faults[0].what if isinstance(error, EchelonError) else str(error)
                self._note_failure(newest, reason)
                if self._closing_attempts >= _CLOSING_ATTEMPTS:
                    return
                retry_s = self._wait_before_retry(retry_s)
            else:
                retry_s = _RETRY_FIRST_S

    def _take_waiting(self) -> tuple[Path, Path | None] | None:
        """Return the newest snapshot, once there is one to upload, and the best one; None at the
        end of the run."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._is_closing)
            newest, self._waiting = self._waiting, None
            if newest is None:
                return None
            best = find_best(newest.parent)
            self._uploading = (newest, *([best] if best not in (None, newest) else []))
            self._closing_attempts += self._is_closing
            return newest, best

    def _update(self, newest: Path, best: Path | None) -> None:
        step = parse_step(newest.name)
        assert step is not None
        self._process.ask(
            "update",
            self.url,
            owner=list(self._owner),
            folders=[str(folder) for folder in self._uploading],
            best=best.name if best is not None else None,
            step=step,
            keep_last=self._keep_last,
        )
        with self._changed:
            self._uploading = ()
        if self.problem is not None:
            self._messages.append(f"the mirror {self.url} is reached again: step {step} is there")
        self.mirrored_step, self.problem = step, None

    def _note_failure(self, newest: Path, reason: str) -> None:
        """Have the snapshot, or a newer one, tried again; say it once until it succeeds."""
        with self._changed:
            self._waiting = self._waiting or newest
            self._uploading = ()
        if self.problem is None and not self._is_closing:  # at the end it is said by the caller
            self._messages.append(
                f"warning: step {parse_step(newest.name)} is not mirrored to {self.url} yet: "
                f"{reason}; the training goes on, and it is tried again"
            )
        self.problem = reason

    def _wait_before_retry(self, retry_s: float) -> float:
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_closing, retry_s):
                return min(2 * retry_s, _RETRY_LAST_S)
        if self._closing_attempts:
            time.sleep(_CLOSING_RETRY_S)
        return _RETRY_FIRST_S

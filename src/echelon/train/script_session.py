"""The session of a script that keeps its own main program: it lasts as long as a `with` block."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar

from echelon.config.schema import Config
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.train.prepare import set_up_user_code
from echelon.train.session import Session
from echelon.train.session_engine import SessionEngine
from echelon.train.step_boundary import TrainingStopped
from echelon.train.worker import RankWorker, agree_on_run


class ScriptSession:
    """What `echelon.session` returns: a block in which this process is one rank of a training.

    The block begins as a worker does, and its end is the worker's end. The script goes on after a
    block that ended well; after an error or a stop it exits with the code of that.
    """

    _has_left_world: ClassVar[bool] = False
    """Whether this process was one of several, which cannot meet again."""

    def __init__(self, compose_config: Callable[[], Config]) -> None:
        self._compose_config = compose_config
        self._worker: RankWorker | None = None
        self._engine: SessionEngine | None = None

    def __getattr__(self, name: str) -> Any:
        """Say what is missing where the session is used without its block."""
        if name.startswith("_"):  # Python and notebooks ask for such
            raise AttributeError(name)
        raise EchelonError(
            Fault(
                f"session.{name} is used, but the session has not begun",
                "use it in its block: with echelon.session() as session:",
            )
        )

    def __enter__(self) -> Session:
        if RankWorker.current is not None:
            raise EchelonError(
                Fault(
                    "echelon.session is called within another session",
                    "train one after the other, each in a block of its own",
                )
            )
        try:
            self._require_new_world()
            config = self._compose_config()
        except EchelonError as error:
            for fault in error.faults:
                print(f"error: {fault}", file=sys.stderr)
            raise SystemExit(error.exit) from None
        worker = self._worker = RankWorker(config)
        try:
            # The script's own command line takes the parameters of a `wandb agent`.
            world = worker.begin(lambda group: agree_on_run(config, group), takes_trial=False)
            set_up_user_code(config, world)
            engine = self._engine = worker.open_session()
        except BaseException as error:
            code = worker.handle_failure(error)
            self._close(worker)
            raise SystemExit(code) from None
        return Session(engine)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        worker = self._worker
        assert worker is not None
        if error is None or isinstance(error, TrainingStopped) or _is_plain_exit(error):
            code = self._end(worker, isinstance(error, TrainingStopped))
        else:
            code = worker.handle_failure(error)
        self._close(worker)
        if code != ExitCode.OK:
            raise SystemExit(code) from None
        worker.stop.uninstall()

    def _end(self, worker: RankWorker, is_stopped: bool) -> int:
        """End the training, and return the exit code."""
        assert self._engine is not None
        try:
            if not is_stopped:
                self._engine.finish("the block of the session ended")
            outcome = ExitCode.PREEMPTED if is_stopped else ExitCode.OK
            worker.end(outcome)
            return outcome
        except BaseException as error:
            return worker.handle_failure(error)

    def _require_new_world(self) -> None:
        if self._has_left_world:
            raise EchelonError(
                Fault(
                    "echelon.session is called a second time, but the processes of a world meet "
                    "once",
                    "start the script once for each training",
                )
            )

    def _close(self, worker: RankWorker) -> None:
        """Release the run, and leave the process to the script."""
        worker.close()
        if self._engine is not None:
            self._engine.is_over = True
        if worker.group is not None:
            worker.group.keep_group_until_exit()
            type(self)._has_left_world = worker.group.world.size > 1


def _is_plain_exit(error: BaseException) -> bool:
    """Return whether a script ends itself without an error: sys.exit(0)."""
    return isinstance(error, SystemExit) and not error.code

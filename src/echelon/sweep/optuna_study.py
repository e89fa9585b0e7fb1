"""Optuna's study of a sweep: in a journal in the sweep's folder, or in a database."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from echelon.errors import EchelonError, ExitCode, Fault
from echelon.sweep.sweep_folder import SweepFolder, SweepLock

if TYPE_CHECKING:
    import optuna


def require_optuna(storage: str | None = None) -> None:
    """Raise EchelonError unless Optuna is installed and the database, if any, can be opened."""
    try:
        import optuna
    except ImportError:
        raise EchelonError(
            Fault(
                "sweeps need Optuna, which is not installed here",
                "pip install 'echelon[sweep]', or let wandb search with --engine wandb",
            )
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if storage is not None:
        _open_database(storage)


def open_study(sweep: SweepFolder, lock: SweepLock) -> tuple[optuna.Study, Callable[[], None]]:
    """Open or create the study. Also return a function that writes changes through to the disk."""
    require_optuna()
    import optuna

    settings, metric = sweep.read_settings(), sweep.read_metric()
    with lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        storage, flush = _open_storage(sweep, settings.storage, lock)
        # A database may hold sweeps of this name of other people.
        name = str(sweep.folder) if settings.storage else sweep.name
        with contextlib.suppress(KeyError):
            return optuna.load_study(study_name=name, storage=storage), flush
        study = optuna.create_study(
            study_name=name,
            storage=storage,
            direction="maximize" if metric.goal == "maximize" else "minimize",
        )
        return study, flush


def _open_storage(
    sweep: SweepFolder, url: str | None, lock: SweepLock
) -> tuple[Any, Callable[[], None]]:
    import optuna

    if url is None:
        from echelon.sweep.optuna_journal import SweepJournal

        journal = SweepJournal(sweep.journal_file, lock)
        return optuna.storages.JournalStorage(journal), journal.flush
    return _open_database(url), lambda: None


def _open_database(url: str) -> Any:
    import optuna

    try:
        return optuna.storages.RDBStorage(url)
    except Exception as error:  # drivers of databases raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EchelonError(
            Fault(
                f"--storage {_hide_password(url)}: {reason}",
                "give a URL such as postgresql://user:password@host/database",
            ),
            exit=ExitCode.USAGE,
        ) from None


def _hide_password(url: str) -> str:
    """Return the URL fit to be shown."""
    before, at, host = url.rpartition("@")
    scheme, slashes, user = before.partition("://")
    return f"{scheme}{slashes}{user.partition(':')[0]}:…@{host}" if at else url

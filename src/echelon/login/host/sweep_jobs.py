"""The workers of a sweep, submitted once. The laptop has planned it and checked its trials."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echelon.config.schema import build_config
from echelon.errors import EchelonError
from echelon.launch.registry import make_launcher
from echelon.launch.slurm.sbatch import find_in_queue
from echelon.login.host.source_store import RUNS_FOLDER, SourceStore
from echelon.login.host.submit_once import SubmissionFiles, describe_error
from echelon.sweep.same_sweep import require_same_sweep
from echelon.sweep.slurm_workers import WorkerArray, check_submittable, submit_workers
from echelon.sweep.sweep_file import SweepFile, read_sweep_file
from echelon.sweep.sweep_folder import SweepFolder, SweepSettings


@dataclass(frozen=True)
class SweepSubmission:
    """What the laptop asks for."""

    id: str
    digest: str
    """Of the source tree."""
    name: str
    config: dict[str, Any]
    """Of a trial, with the Python of the jobs."""
    settings: Mapping[str, Any]
    """`SweepSettings`, with the paths here."""
    text: str
    """Of the sweep's file."""
    parallel: int

    def carry_out(self, store: SourceStore, files: SubmissionFiles) -> dict[str, Any]:
        """Submit the workers, or find out that an earlier process did before it was killed."""
        sweep = SweepFolder(store.root / RUNS_FOLDER / self.name)
        had_folder = sweep.folder.exists()
        try:
            if not _take_over_earlier_job(sweep, files):
                self._submit(store, files, sweep)
        except (EchelonError, OSError) as error:
            if not had_folder and not sweep.job_file.exists():
                shutil.rmtree(sweep.folder, ignore_errors=True)
                shutil.rmtree(store.get_sweep_folder(self.name), ignore_errors=True)
            return describe_error(error)
        job = sweep.job_file.read_text(encoding="utf-8").strip()
        return {"runs": [{"name": self.name, "folder": str(sweep.folder), "job": job}]}

    def _submit(self, store: SourceStore, files: SubmissionFiles, sweep: SweepFolder) -> None:
        config = build_config(self.config)
        settings = SweepSettings(**self.settings)
        tree = store.get_tree(self.digest)
        os.chdir(tree)
        # 1. Checks, before anything is written.
        require_same_sweep(sweep, self._read_file(files), settings)
        config = make_launcher(config).complete_config(config, False)
        python = str(config.launch.python)
        array = WorkerArray(sweep, config, settings.overrides, self.parallel, python)
        check_submittable(array)
        # 2. The sweep's folder and its code, both as they were when there was no worker.
        sweep.write_files(settings, self.text)
        os.chdir(store.make_sweep_folder(self.name, tree))
        # 3. The workers, which work where sbatch is called.
        files.begun.touch()
        submit_workers(array)

    def _read_file(self, files: SubmissionFiles) -> SweepFile:
        """Return the sweep's file, which is read from a file here as its parser wants it."""
        path = files.folder / f"{self.id}.yml"
        path.write_text(self.text, encoding="utf-8")
        try:
            return read_sweep_file(path)
        finally:
            path.unlink()


def _take_over_earlier_job(sweep: SweepFolder, files: SubmissionFiles) -> bool:
    """Return whether an earlier process has queued the workers for this submission, and write down
    their job if it was killed before it could."""
    try:
        begun = files.begun.stat().st_mtime
    except FileNotFoundError:
        return False
    with contextlib.suppress(OSError):
        if sweep.job_file.stat().st_mtime >= begun:
            return True
    job = find_in_queue(sweep.name, begun)
    if job is not None:
        sweep.job_file.write_text(f"{job}\n", encoding="utf-8")
    return job is not None

"""A run and its folder: every path in it, its configuration and its status.

No other code spells a path inside a run folder, except `snapshot.layout`, which names what is in
``snapshots/``.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.config.schema import Config, build_config
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.runs.trusted_code import require_trusted_code, require_trusted_file
from echelon.snapshot.layout import find_newest_step, list_snapshots
from echelon.utils.files import read_json_object, write_json_atomically

RUN_FORMAT = 2
"""The version of a run folder, in config.json. It is raised when older runs cannot be resumed as
they are. Version 2 came with new module names, which `experiment.entry` contains; a folder without
a version has version 1."""
_FORMAT_KEY = "run_format"

CONFIG_FILE, STATUS_FILE, METRICS_FILE = "config.json", "status.json", "metrics.jsonl"
RUN_FILES = (CONFIG_FILE, STATUS_FILE, METRICS_FILE)
"""A folder with one of these is a run, sound or broken."""
SUBMISSION_FILE = "submission.json"
HISTORY_FILE = "history.jsonl"
ORIGIN_FILE = "origin.json"


@dataclass(frozen=True)
class Run:
    """All paths of one run, and what its small files hold. The folder need not exist yet."""

    folder: Path

    @classmethod
    def from_config(cls, config: Config) -> Run:
        """Return the run that a configuration with a name belongs to."""
        return cls(Path(config.run.dir).absolute() / str(config.run.name))

    @property
    def name(self) -> str:
        return self.folder.name

    # --- what every run has ---

    @property
    def config_file(self) -> Path:
        """The resolved configuration, and the version of the folder."""
        return self.folder / CONFIG_FILE

    @property
    def status_file(self) -> Path:
        """State, process, launcher and result, as the run itself last wrote them."""
        return self.folder / STATUS_FILE

    @property
    def metrics_file(self) -> Path:
        """A line for every `trainer.log_steps` steps and for every evaluation."""
        return self.folder / METRICS_FILE

    @property
    def summary_file(self) -> Path:
        """The last and the best value of every metric, so that a list need not read them all. See
        `runs.metrics_summary`."""
        return self.folder / "summary.json"

    @property
    def history_file(self) -> Path:
        """Every start and stop of the run. See `runs.history`."""
        return self.folder / HISTORY_FILE

    @property
    def news_file(self) -> Path:
        """Which messages about the run were sent, and what became of them. See `notify.record`."""
        return self.folder / "news.jsonl"

    @property
    def energy_folder(self) -> Path:
        """What the GPUs of each start have used, a file per machine. See `runs.energy`."""
        return self.folder / "energy"

    @property
    def start_file(self) -> Path:
        """The command of the last start, and the version of the code. See `runs.start_record`."""
        return self.folder / "start.json"

    @property
    def bad_samples_file(self) -> Path:
        """The samples that the run has skipped (`trainer.bad_samples=skip`), a line each."""
        return self.folder / "bad_samples.jsonl"

    @property
    def annotations_file(self) -> Path:
        """The tags and the note that a person gave the run. See `runs.annotations`."""
        return self.folder / "annotations.json"

    @property
    def snapshots_folder(self) -> Path:
        """A folder `step-N` for each snapshot, and `best`, a link to the best of them."""
        return self.folder / "snapshots"

    @property
    def mirror_file(self) -> Path:
        """As whom this folder has last written to its mirror in an object store."""
        return self.folder / "mirror.json"

    @property
    def fetched_folder(self) -> Path:
        """Where a snapshot is put that `trainer.resume` names in an object store."""
        return self.folder / "fetched"

    @property
    def media_folder(self) -> Path:
        """Logged images, which lines of metrics name."""
        return self.folder / "media"

    @property
    def curves_folder(self) -> Path:
        """What `echelon board` keeps of the metrics, so that long curves are drawn at once; it is
        made again when it is missing."""
        return self.folder / ".curves"

    @property
    def traces_folder(self) -> Path:
        """Where trainer.profile writes its traces."""
        return self.folder / "traces"

    def get_heartbeat_file(self, node: int) -> Path:
        """Mapped by the ranks of a node and by the agent that watches them."""
        return self.folder / f".heartbeat-{node}"

    @property
    def membership_file(self) -> Path:
        """Which nodes go on since one was lost, by the agent that leads."""
        return self.folder / ".membership"

    @property
    def node_report_file(self) -> Path:
        """Which nodes are lost, and where the leader is: for what starts agents again on nodes of a
        Slurm job, by the agent that leads."""
        return self.folder / ".nodes"

    def get_round_file(self, node: int) -> Path:
        """Written by the agent of a node for its ranks: who takes part, and which store they
        use."""
        return self.folder / f".round-{node}"

    @property
    def cancel_file(self) -> Path:
        """Made by whoever cancels the run. A separate file: status.json belongs to the run
        and a second writer would lose fields of the first."""
        return self.folder / "cancelled"

    @property
    def writer_file(self) -> Path:
        """Locked by the process that writes into the folder, which says there who it is."""
        return self.folder / ".writer"

    @property
    def origin_file(self) -> Path:
        """There if the run is on a cluster and this folder is a copy of it. See `runs.origin`."""
        return self.folder / ORIGIN_FILE

    @property
    def origin_state_file(self) -> Path:
        """How far that copy has come."""
        return self.folder / ".origin"

    @property
    def archive_file(self) -> Path:
        """There while the run is archived: left out of lists."""
        return self.folder / "archived"

    # --- logs ---

    @property
    def logs_folder(self) -> Path:
        """What the processes of the run have printed."""
        return self.folder / "logs"

    def get_rank_log_file(self, rank: int) -> Path:
        """Return the log file of a rank."""
        return self.logs_folder / f"rank-{rank}.log"

    def get_node_log_file(self, node: int) -> Path:
        """Return the log file of a node's agent."""
        return self.logs_folder / f"node-{node}.log"

    @property
    def job_log_file(self) -> Path:
        """The output of the batch script itself."""
        return self.logs_folder / "job.log"

    def get_stamps_file(self, node: int) -> Path:
        """Return the file that says when each log of a node's ranks grew to which size. Logs are
        merged by these times."""
        return self.logs_folder / f"node-{node}.stamps"

    # --- where the ranks stand ---

    def get_stack_file(self, rank: int) -> Path:
        """Return the file that says how a rank is asked where it stands, and into which it writes
        its stack at a signal."""
        return self.logs_folder / f"rank-{rank}.stack"

    def get_stack_answer_of_rank(self, rank: int) -> Path:
        """Return the file into which a rank writes where it stands. The agent removes it."""
        return self.logs_folder / f"rank-{rank}.stacks"

    def get_hang_report_file(self, time_text: str) -> Path:
        """Return the file with the stacks of all ranks when one of them was found hanging."""
        return self.logs_folder / f"hang-{time_text}.txt"

    def list_hang_reports(self) -> list[Path]:
        """Return the files with the stacks of all ranks at each hang, the oldest first."""
        return sorted(self.logs_folder.glob("hang-*.txt"))

    @property
    def stack_agent_file(self) -> Path:
        """Which agent answers requests for stacks; there while it runs."""
        return self.folder / ".stacks-agent"

    @property
    def joining_script_file(self) -> Path:
        """The newest batch script by which further nodes join."""
        return self.folder / "join.sh"

    @property
    def invitation_file(self) -> Path:
        """For nodes of further jobs, with the key of the run; its owner's alone."""
        return self.folder / ".invitation"

    @property
    def stack_request_file(self) -> Path:
        """The newest request for stacks. It is written in place, and so is its answer: on a network
        file system another machine sees a new name late, and new content of a file at once."""
        return self.folder / ".stacks-request"

    def get_stack_answer_file(self, request_id: str) -> Path:
        """Return the file into which the agent writes its answer. Whoever asks makes and removes
        it."""
        return self.folder / f".stacks-{request_id}"

    # --- code that was sent ---

    def get_code_folder(self, node: int) -> Path:
        """Return the folder with a copy of the experiment's code, on a node that does not share
        the original."""
        return self.folder / f"code-{node}"

    def get_entry_point(self, config: Config, node: int) -> str:
        """Return the entry point of the experiment (FILE.py:FUNCTION) as it is on that node."""
        entry = str(config.experiment.get("entry"))
        file, _, function = entry.rpartition(":")
        copy = self.get_code_folder(node) / Path(file).name
        if not file.endswith(".py") or not copy.exists():
            return entry
        require_trusted_code(self.get_code_folder(node))
        return f"{copy}:{function}"

    # --- batch jobs ---

    @property
    def script_file(self) -> Path:
        """The batch script."""
        return self.folder / "job.sh"

    @property
    def submission_file(self) -> Path | None:
        """What `echelon submit` wrote about this run, alone or with others; None without."""
        group = self.folder.with_name(self.name.rpartition("-")[0] or self.name)
        files = [folder / SUBMISSION_FILE for folder in (self.folder, group)]
        return next((file for file in files if file.exists()), None)

    @property
    def work_folder(self) -> Path:
        """The folder that a submitted command runs in. It begins as a copy of the source and is
        kept, with everything that the command wrote by relative paths."""
        return self.folder / "work"

    @property
    def command_file(self) -> Path:
        """The configuration of a submitted command, once a training has taken config.json."""
        return self.folder / "command.json"

    def get_training_claim_file(self, attempt: str) -> Path:
        """Return the file whose existence says that a training of the submitted command has become
        this run, in this attempt of its job."""
        return self.folder / f".training-{attempt}"

    @property
    def call_file(self) -> Path:
        """The function that `echelon.submit` calls in this run, and its arguments."""
        return self.folder / "call.json"

    @property
    def result_file(self) -> Path:
        """What that function returned or raised."""
        return self.folder / "result.json"

    @property
    def arguments_file(self) -> Path:
        """The arguments of a program, NUL-separated, for the batch script of a job array."""
        return self.folder / "words"

    @property
    def array_file(self) -> Path:
        """Beside the first run of a job array: which folder each task works in."""
        return self.folder.with_name(f".{self.name}.array")

    @property
    def exit_code_file(self) -> Path:
        """The exit code of a batch job, written by its script as its last act."""
        return self.folder / "exit"

    @property
    def agent_exit_file(self) -> Path:
        """The exit code of node 0's agent, for the batch script."""
        return self.folder / ".code"

    @property
    def job_id_file(self) -> Path:
        """Slurm's id of the newest job. Not in status.json, which the job itself may write as soon
        as it is queued."""
        return self.folder / "job"

    def read_job_id(self) -> str:
        """Return Slurm's id of the newest job, or an empty string."""
        with contextlib.suppress(OSError):
            return self.job_id_file.read_text(encoding="utf-8").strip()
        return ""

    # --- trackers ---

    @property
    def wandb_file(self) -> Path:
        """The id of wandb's run, and which of its files its server may not have."""
        return self.folder / "wandb.json"

    def read_wandb_id(self) -> str | None:
        """Return the id of wandb's run; None before there is one."""
        wandb = read_json_object(self.wandb_file) or {}
        return str(wandb["id"]) if "id" in wandb else None

    def get_tracker_progress_file(self, tracker: str) -> Path:
        """Return the file that says how many lines of metrics a tracker has received."""
        return self.folder / f".tracker-{tracker}"

    # --- content ---

    def find_newest_step(self) -> int:
        """Return the step of the newest snapshot, unverified; 0 without one."""
        return find_newest_step(self.snapshots_folder)

    def has_snapshots(self) -> bool:
        """Return whether there is a snapshot of the run, unverified."""
        return bool(list_snapshots(self.snapshots_folder, ignore_errors=True))

    def write_config(self, config: Config) -> None:
        """Write config.json, with the version of the folder."""
        data = {_FORMAT_KEY: RUN_FORMAT, **config.to_dict()}
        write_json_atomically(self.config_file, data, names_code=True)

    def read_config(self, *, runs_code: bool = True) -> Config:
        """Return the configuration, to go on with the run.

        Raises EchelonError if the file cannot be read and if the folder is of another version. To
        display a run of any version, use read_config_json().

        The file names the code to run, so it raises EchelonError too if somebody else can have
        written it. ``runs_code=False`` is for callers that take nothing but values from it.
        """
        return _read_config_file(self.config_file, runs_code)

    def read_launch_config(self) -> Config:
        """Return the configuration that starts the processes of the run.

        It differs from read_config() where a submitted command trains: then it is the command's.
        """
        is_command = self.command_file.exists()
        return _read_config_file(self.command_file) if is_command else self.read_config()

    def set_command_aside(self) -> None:
        """Keep the configuration of a submitted command, so that its training can write
        config.json."""
        data = read_json_object(self.config_file) or {}
        write_json_atomically(self.command_file, data, names_code=True)

    def read_config_json(self) -> dict[str, Any]:
        """Return config.json of a folder of any version as it is, without the version.

        Raises OSError, ValueError or RecursionError where there is no JSON object in the file.
        """
        data = json.loads(self.config_file.read_bytes())
        if not isinstance(data, dict):
            raise ValueError("not a JSON object")
        data.pop(_FORMAT_KEY, None)
        return data

    def read_status_file(self) -> dict[str, Any]:
        """Return status.json; empty if it is missing or damaged."""
        return read_json_object(self.status_file) or {}

    def update_status(self, **fields: Any) -> None:
        """Merge fields into status.json. A full disk must not end a training over its status."""
        with contextlib.suppress(OSError):
            write_json_atomically(
                self.status_file, self.read_status_file() | fields | {"updated": time.time()}
            )


def _read_config_file(file: Path, runs_code: bool = True) -> Config:
    try:
        with file.open(encoding="utf-8") as opened:
            if runs_code:
                require_trusted_file(file, os.fstat(opened.fileno()))
            data = json.load(opened)
        version = data.pop(_FORMAT_KEY, 1)
        # Before the values: those of another version may mean something else.
        if version != RUN_FORMAT:
            raise _make_version_error(file.parent, version)
        return build_config(data)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise EchelonError(
            Fault(
                f"{file} cannot be read: {error}",
                "restore the file, or start a run of another name",
            ),
            exit=ExitCode.NOT_FOUND,
        ) from error


def _make_version_error(folder: Path, version: object) -> EchelonError:
    return EchelonError(
        Fault(
            f"{folder} is a run folder of format {version}, and this version of Echelon reads "
            f"format {RUN_FORMAT}",
            "start a run of another name, or set this one aside with trainer.resume=never; "
            "its weights can still be loaded with echelon.load_weights",
        )
    )

"""What the laptop writes down before it submits, and when that is forgotten.

`launch.ssh` is a program that runs the command here, or fails as ssh does; Slurm's commands answer
as Slurm does. With the real ones, see tests/cluster/test_login.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from command_runner import ECHELON, CommandResult, run

from echelon.config.schema import Config, LaunchConfig, RunConfig
from echelon.errors import ExitCode
from echelon.login.submission import LoginSubmission, SubmissionNote
from echelon.runs.origin import NOTES_FOLDER
from echelon.runs.run_folder import Run

LOCAL_SSH = '#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n'
DEAD_SSH = "#!/bin/sh\necho 'ssh: connect to host x: Network is unreachable' >&2\nexit 255\n"


class Desk:
    """A folder to type commands in, with programs of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        self.has("ssh", LOCAL_SSH)
        self.has("squeue", "#!/bin/sh\n")
        self.sbatch_does("echo 7")

    def has(self, name: str, text: str) -> None:
        program = self.folder / "bin" / name
        program.write_text(text)
        program.chmod(0o755)

    def sbatch_does(self, then: str) -> None:
        test = 'case "$*" in *--test-only*) cat > /dev/null; exit 0 ;; esac\n'
        self.has("sbatch", f"#!/bin/sh\n{test}echo x >> {self.folder}/calls\n{then}\n")

    def train(self, *words: str) -> CommandResult:
        settings = (
            "launch=slurm",
            "launch.login=x",
            f"launch.ssh={self.folder}/bin/ssh",
            f"launch.remote_dir={self.folder}/there",
            f"launch.python={sys.executable}",
        )
        path = f"{self.folder}/bin:/usr/bin:/bin"
        # A process of its own: a note of one that lives is not taken up.
        command = (*ECHELON, "train", *settings, *words)
        return run(command, self.folder, PATH=path, HOME=str(self.folder))

    def notes(self) -> list[str]:
        files = (self.folder / "runs" / NOTES_FOLDER).glob("*.json")
        return [json.loads(file.read_text())["id"] for file in files]

    @property
    def submitted(self) -> int:
        return len((self.folder / "calls").read_text().split())


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.mark.slow
def test_a_submission_that_ends_well_or_is_refused_leaves_no_note(desk: Desk) -> None:
    done = desk.train("run.name=a")
    assert done.code == ExitCode.OK, done.err
    assert "job 7: run a on x in" in done.out
    assert Run(desk.folder / "runs" / "a").read_job_id() == "7"
    desk.sbatch_does("echo 'sbatch: error: over the limit' >&2; exit 1")
    refused = desk.train("run.name=b")
    assert "on x: Slurm does not take the job" in refused.err
    assert not (desk.folder / "runs" / "b").exists()
    assert not (desk.folder / "there" / "runs" / "b").exists()
    desk.has("ssh", DEAD_SSH)
    assert "x cannot be reached" in desk.train("run.name=c").err
    assert desk.notes() == []


@pytest.mark.slow
def test_what_is_open_stays_written_down_until_the_login_node_answers(desk: Desk) -> None:
    desk.sbatch_does("kill -9 $PPID; sleep 1; echo 9")
    lost = desk.train("run.name=a")
    assert "ended the process that submitted the job" in lost.err, lost.output
    [first] = desk.notes()
    desk.has("ssh", DEAD_SSH)
    assert "x cannot be reached" in desk.train("run.name=a").err
    assert desk.notes() == [first], "nobody has said what became of it"
    desk.has("ssh", LOCAL_SSH)
    desk.has("squeue", '#!/bin/sh\necho "9|$(date +%Y-%m-%dT%H:%M:%S)"\n')
    again = desk.train("run.name=a")
    assert again.code == ExitCode.OK, again.output
    assert "job 9: run a on x" in again.out
    assert desk.submitted == 1
    assert desk.notes() == []


def test_the_same_words_typed_twice_at_once_are_two_submissions(tmp_path: Path) -> None:
    launch = LaunchConfig(kind="slurm", login="x")
    config = Config(launch=launch, run=RunConfig("generated", str(tmp_path / "runs")))
    submission = LoginSubmission.from_configs([config])
    first = SubmissionNote(submission, None)
    first_id = first.write(submission)  # by this process, which lives
    second = SubmissionNote(submission, None)
    assert second.id is None
    assert second.write(submission) != first_id
    text = json.loads(first.file.read_text())
    text["process"]["born"] = "long ago"
    first.file.write_text(json.dumps(text))
    assert SubmissionNote(submission, None).id == first_id
    assert SubmissionNote(submission, "named").id is None

"""`echelon rm` and `archive`: out of sight, and back."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import echelon, lines, make_run

from echelon.errors import EchelonError, ExitCode
from echelon.runs.find import find_run
from echelon.runs.latest import record_first_step
from echelon.runs.process_record import identify_this_process
from echelon.runs.removal import archive_runs, move_to_trash
from echelon.runs.run_folder import SUBMISSION_FILE
from echelon.utils.locks import FileLock, is_locked


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def list_folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.is_symlink())


def test_a_run_goes_to_the_trash_and_comes_back_whole(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(root, "a", lines())
    make_run(root, "b", lines())
    files = {p.relative_to(root): p.read_bytes() for p in run.folder.rglob("*") if p.is_file()}
    code, out, err = echelon(capsys, "rm", "--yes", "a")
    assert code == 0, err
    assert out.splitlines() == [
        "moved 1 run to runs/.trash: a",
        "  get back  echelon rm --undo a",
        "  for good  echelon rm --empty-trash",
    ]
    assert list_folders(root) == [".trash", "b"]
    assert '"a"' not in echelon(capsys, "runs", "--json")[1]
    assert echelon(capsys, "show", "a")[0] == ExitCode.NOT_FOUND
    (entry,) = json.loads(echelon(capsys, "rm", "--list", "--json")[1])["trash"]
    assert (entry["run"], entry["folder"]) == ("a", str(root / ".trash" / "a"))
    assert entry["size_bytes"] == sum(map(len, files.values()))
    assert echelon(capsys, "rm", "--list")[1].splitlines()[1].split()[0] == "a"

    code, out, _ = echelon(capsys, "rm", "--undo", "a")
    assert (code, out) == (0, "brought back runs/a\n")
    after = {p.relative_to(root): p.read_bytes() for p in run.folder.rglob("*") if p.is_file()}
    assert after == files
    assert not is_locked(run.writer_file)


def test_the_trash_is_emptied_for_good(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        make_run(root, "a", lines())
        assert echelon(capsys, "rm", "-y", "a")[0] == 0
    assert list_folders(root / ".trash") == ["a", "a.1"], "the older one makes room"
    make_run(root, "a", lines())
    code, _, err = echelon(capsys, "rm", "--undo", "a")
    assert code == ExitCode.USAGE
    assert "is there again" in err
    code, out, _ = echelon(capsys, "rm", "--empty-trash", "--yes")
    assert code == 0
    assert out.startswith("deleted 2 folders of runs/.trash, ")
    assert list_folders(root / ".trash") == []
    assert list_folders(root) == [".trash", "a"]
    assert echelon(capsys, "rm", "--empty-trash")[1] == "runs/.trash is empty\n"
    code, _, err = echelon(capsys, "rm", "--undo", "b")
    assert code == ExitCode.NOT_FOUND
    assert "the trash is empty" in err


def test_nothing_is_removed_without_consent(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(root, "a", lines())
    for words in (["rm", "a"], ["rm", "a", "--dir", "runs"]):
        code, _, err = echelon(capsys, *words)
        assert code == ExitCode.USAGE
        assert "no terminal to ask at" in err
        assert "--yes" in err
    assert list_folders(root) == ["a"]


@pytest.mark.parametrize(("answer", "left"), [("y", [".trash"]), ("n", ["a"]), ("", ["a"])])
def test_a_person_is_asked(root: Path, answer: str, left: list[str]) -> None:
    make_run(root, "a", lines())
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "echelon", "rm", "a"]
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        os.write(ours, f"{answer}\n".encode())
        said = b""
        while b"?" not in said:
            said += os.read(ours, 4096)
        process.wait()
    os.close(ours)
    assert b"move 1 run to runs/.trash: a? [y/N]" in said
    assert process.returncode == (0 if answer == "y" else ExitCode.USAGE)
    assert list_folders(root) == left


def test_a_run_that_somebody_writes_is_refused_with_all_others(root: Path) -> None:
    quiet, busy = make_run(root, "quiet", lines()), make_run(root, "busy", lines())
    script = "import sys\nfrom pathlib import Path\nfrom echelon.runs.run_folder import Run\n"
    script += "from echelon.runs.writer import claim_run_folder\n"
    script += "claim_run_folder(Run(Path(sys.argv[1])))\nprint(flush=True)\nsys.stdin.read()"
    pipe = subprocess.PIPE
    words = [sys.executable, "-c", script, str(busy.folder)]
    with subprocess.Popen(words, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(EchelonError) as raised:
            move_to_trash([quiet, busy])
        process.kill()
    (fault,) = raised.value.faults
    assert f"run busy is running already, as process {process.pid}" in fault.what
    assert "echelon cancel" in fault.do
    assert list_folders(root) == ["busy", "quiet"]
    assert not is_locked(quiet.writer_file)
    move_to_trash([quiet, busy])
    assert list_folders(root) == [".trash"]


def test_patterns_groups_and_broken_runs_are_removed(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("seed-1", "seed-2", "other", "ab-0", "ab-1"):
        make_run(root, name, lines())
    make_run(root, "broken", lines()).config_file.unlink()
    (root / "ab").mkdir()
    (root / "ab" / SUBMISSION_FILE).write_text("{}")
    assert echelon(capsys, "rm", "-y", "seed-*", "broken", "ab-0")[0] == 0
    assert list_folders(root) == [".trash", "ab", "ab-1", "other"]
    assert echelon(capsys, "rm", "--undo", "ab-0")[0] == 0
    assert echelon(capsys, "rm", "-y", "ab")[0] == 0
    assert list_folders(root) == [".trash", "other"], "the code goes with the last run"
    assert echelon(capsys, "rm", "--undo", "ab")[0] == 0
    assert list_folders(root) == [".trash", "ab", "ab-0", "ab-1", "other"]
    code, _, err = echelon(capsys, "rm", "-y", "nothing-*")
    assert code == ExitCode.NOT_FOUND
    assert "nothing-*" in err


def test_latest_is_never_a_removed_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, name in enumerate("ab"):
        record_first_step(make_run(root, name, lines(), status={"started": 1e9 + number}))
    assert echelon(capsys, "rm", "-y", "latest")[0] == 0
    assert os.readlink(root / "latest") == "a"
    assert find_run("latest").name == "a"
    assert echelon(capsys, "rm", "-y", "a")[0] == 0
    assert not (root / "latest").is_symlink()


def test_an_archived_run_is_out_of_the_lists_and_found_by_name(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        make_run(root, name, lines())
    code, out, err = echelon(capsys, "archive", "a")
    assert code == 0, err
    assert out == "archived 1 run: a\n  undo      echelon archive --undo a\n"
    for command in ("runs", "jobs"):
        shown = echelon(capsys, command)[1].splitlines()
        assert [line.split()[0] for line in shown[1:]] == ["b", "not"]
        assert shown[-1] == "not shown: 1 archived: --all"
        assert "a " in echelon(capsys, command, "--all")[1]
    assert echelon(capsys, "show", "a")[0] == 0
    listed = json.loads(echelon(capsys, "archive", "--list", "--json")[1])
    assert listed == {"version": 1, "archived": [{"run": "a", "folder": str(root / "a")}]}
    assert echelon(capsys, "archive", "--list")[1].splitlines()[1].split()[:2] == ["a", "finished"]
    assert echelon(capsys, "archive", "--undo", "a")[0] == 0
    assert "not shown" not in echelon(capsys, "runs")[1]
    assert "is archived" in echelon(capsys, "archive", "--list")[1]


def test_a_run_that_runs_is_not_archived(root: Path) -> None:
    ended = make_run(root, "ended", lines())
    active = make_run(root, "active", status={"state": "running"})
    active.update_status(process=identify_this_process())
    with pytest.raises(EchelonError, match="run active is running, and such a run is always"):
        archive_runs([ended, active])
    assert not ended.archive_file.exists()


@pytest.mark.parametrize(
    "words",
    [["rm"], ["rm", "--undo"], ["rm", "--list", "a"], ["rm", "--json", "a"], ["archive"]],
    ids=" ".join,
)
def test_what_makes_no_sense_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        echelon(capsys, *words)
    assert raised.value.code == ExitCode.USAGE


def test_a_lock_says_whether_it_is_held(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    assert not is_locked(file)
    with FileLock(file) as lock:
        assert lock.is_held
        assert lock.is_current()
        assert is_locked(file)
        file.rename(tmp_path / "moved")
        assert not lock.is_current()
    assert not is_locked(tmp_path / "moved")

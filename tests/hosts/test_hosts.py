"""Asking other machines: the command line, answers and failures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from echelon.errors import EchelonError
from echelon.hosts.ask import HostAnswer, ask_host, ask_hosts, join_last_lines
from echelon.hosts.message_protocol import MARK, send_message, split_message
from echelon.hosts.ssh import (
    build_ssh_prefix,
    explain_host_key_failure,
    require_ssh,
    split_ssh_command,
)
from echelon.launch.ssh import host_probe


def test_ssh_never_asks_unless_a_person_can_answer() -> None:
    prefix = build_ssh_prefix(["ssh", "-F", "file"], "node1")
    assert prefix[:3] == ["ssh", "-F", "file"]
    assert prefix[-2:] == ["--", "node1"]
    asking = build_ssh_prefix(["ssh"], "node1", asks_questions=True)
    assert {*prefix} - {*asking} == {"BatchMode=yes", "-F", "file"}


@pytest.mark.parametrize(
    ("command", "reason"),
    [("ssh 'x", "no closing quotation"), ("", "it is empty"), ("no-such-ssh", "there is no no-su")],
)
def test_what_is_not_a_command_is_a_fault(command: str, reason: str) -> None:
    with pytest.raises(EchelonError, match=reason) as caught:
        require_ssh(command, "launch.ssh")
    assert caught.value.faults[0].what.startswith(f"launch.ssh={command!r} is not a command: ")
    with pytest.raises(EchelonError, match=r"^--ssh '' is not"):
        split_ssh_command("", "--ssh")


CHANGED = """\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
Host key for pod has changed and you have requested strict checking.
Host key verification failed.
"""


def test_a_new_host_is_not_called_a_changed_one() -> None:
    """By what OpenSSH prints; tests of the cluster ask the real one."""
    strict = "No ED25519 host key is known for pod and you have requested strict checking.\n"
    for text in ("Host key verification failed.\n", strict + "Host key verification failed.\n"):
        new = explain_host_key_failure("ssh -F f", "pod", text, "do that")
        assert new is not None
        assert new.what.startswith("ssh has never seen pod: ")
        assert new.do.startswith("log in once with `ssh -F f pod` ")
        assert "or do that" in new.do
    changed = explain_host_key_failure("ssh", "pod", CHANGED, "do that")
    assert changed is not None
    assert changed.what.startswith("pod shows another host key than the one that ssh has")
    assert "ssh-keygen -R pod" in changed.do
    assert explain_host_key_failure("ssh", "pod", "Permission denied (publickey).", "x") is None


def test_an_answer_has_output_and_code() -> None:
    program = "import sys; print(sys.stdin.read()); print('bad', file=sys.stderr); sys.exit(3)"
    answer = ask_host([sys.executable, "-c", program], b"word", 60)
    assert answer == HostAnswer(3, "word\n", "bad\n")


def test_a_host_that_does_not_answer_is_a_value() -> None:
    assert ask_host(["sleep", "60"], b"", 0.1) == HostAnswer(
        None, "", "", "did not answer within 0.1 s"
    )
    missing = ask_host(["/no/such/ssh", "node1"], b"", 60)
    assert missing.exit_code is None
    assert missing.failure == "/no/such/ssh cannot be run: no such file or directory"


def test_hosts_are_asked_at_once_and_answer_in_order(tmp_path: Path) -> None:
    """Each waits until all are asked, and then for those behind it."""
    waits = {
        "a": "asked-a asked-b asked-c done-b done-c",
        "b": "asked-a asked-b asked-c done-c",
        "c": "asked-a asked-b asked-c",
    }
    script = "cd {0}; touch asked-{1}; for f in {2}; do until [ -e $f ]; do sleep 0.01; done; done;"
    script += "touch done-{1}; echo {1}"
    asked = [["sh", "-c", script.format(tmp_path, *each)] for each in waits.items()]
    answers = ask_hosts(asked, b"", 300)
    assert [answer.stdout for answer in answers] == ["a\n", "b\n", "c\n"]
    assert ask_hosts([], b"", 60) == []


@pytest.mark.parametrize(
    ("stdout", "message"),
    [
        (f'welcome {{\n{MARK}{{"a": 1}}\nbye', {"a": 1}),
        ('welcome\n{\n "a": 1\n}\n', {"a": 1}),
        (f"{MARK}[1]\n", None),
        (f'{MARK}{{"a": ', None),
        ("no message", None),
        ("", None),
    ],
)
def test_the_message_of_an_answer(stdout: str, message: dict[str, int] | None) -> None:
    assert HostAnswer(0, stdout, "").read_message() == message


def test_a_message_is_a_line_behind_a_mark(capsys: pytest.CaptureFixture[str]) -> None:
    send_message({"a": 1})
    sent = capsys.readouterr().out
    assert split_message(f"text{sent}") == ("text", {"a": 1})
    assert split_message("text\n") == ("text\n", None)
    assert split_message(f"text{MARK}{{") == ("text", None)
    assert split_message(f"{MARK}[1]") == ("", None)


def test_the_end_of_what_was_printed() -> None:
    printed = "@@@@@@@\n@  WARNING  @\n@@@@@\n\n  a\nb  \n\n"
    assert join_last_lines(printed) == "a b"
    assert join_last_lines(printed, 1) == "b"
    assert join_last_lines("") == ""


def test_the_probe_that_is_sent_alone_marks_its_message_as_others_do() -> None:
    """It may find no Echelon there, so it cannot import the mark."""
    program = Path(host_probe.__file__).read_bytes()
    answer = ask_host([sys.executable, "-I", "-"], program, 60)
    message = answer.read_message()
    assert message is not None, answer.stderr
    assert answer.stdout.startswith(MARK)
    assert message["executable"] == sys.executable

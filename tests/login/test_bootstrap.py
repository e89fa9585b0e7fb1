"""The command that ssh gives to the login shell of a user, whichever that is."""

from __future__ import annotations

import subprocess

from echelon.login.bootstrap import make_remote_command


def test_it_is_one_line_as_csh_ends_a_word_at_the_end_of_its_line() -> None:
    assert "\n" not in make_remote_command("/opt/my python/bin/python3")


def test_it_starts_the_program_that_it_is_given() -> None:
    program = b"print(6 * 7)\n"
    done = subprocess.run(
        ["sh", "-c", make_remote_command(None)],
        input=b"%d\n" % len(program) + program,
        capture_output=True,
    )
    assert (done.returncode, done.stdout) == (0, b"42\n"), done.stderr

"""Command files: by the rules of a shell, with file and line in every message, and no shell."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import EchelonError, ExitCode
from echelon.submission.command_file import parse_commands, quote_words, read_commands

DOCUMENTED = Path(__file__).parents[2] / "docs" / "command_files.md"


def argvs(text: str) -> list[list[str]]:
    return [command.argv for command in parse_commands(text, "f.txt")]


def faults(text: str) -> list[str]:
    with pytest.raises(EchelonError) as caught:
        parse_commands(text, "f.txt")
    return [fault.what for fault in caught.value.faults]


@pytest.mark.parametrize(
    ("text", "argv"),
    [
        ("python main.py --train", ["python", "main.py", "--train"]),
        ("  a\tb  ", ["a", "b"]),
        ("a --layers=64,64 'b=[1,2]' 'c={a: 1}'", ["a", "--layers=64,64", "b=[1,2]", "c={a: 1}"]),
        ("a b=[1,2] c={} {d}", ["a", "b=[1,2]", "c={}", "{d}"]),
        ("a 'b c' \"d e\" f\\ g", ["a", "b c", "d e", "f g"]),
        ("a ''  \"\"", ["a", "", ""]),
        ("a b'c'\"d\"e", ["a", "bcde"]),
        ("a 'x\ny' \"u\nv\"", ["a", "x\ny", "u\nv"]),
        ('a "\\n" "\\"\\\\\\$" \\\\', ["a", "\\n", '"\\$', "\\"]),
        (
            "a '$(rm x)' '`rm x`' '*' \\* ';' '$HOME'",
            ["a", "$(rm x)", "`rm x`", "*", "*", ";", "$HOME"],
        ),
        ("a b#c # d", ["a", "b#c"]),
        ("a 'b # c'", ["a", "b # c"]),
        ('a --cost=5$ $ "6$"', ["a", "--cost=5$", "$", "6$"]),
        ("a -- -x --y", ["a", "--", "-x", "--y"]),
        ("a --b=~/c ä 你好", ["a", "--b=~/c", "ä", "你好"]),
    ],
)
def test_words(text: str, argv: list[str]) -> None:
    assert argvs(text) == [argv]


@pytest.mark.parametrize(
    "text",
    [
        "a \\\n b",
        "a \\\n# between\n b",
        "# before\n\na \\\n   # between\n   # and again \\\n b # after",
        "a \\\r\n b\r\n",
        "a \\\r\n# between\r\n b\r\n",
        "a \\\n\\\n b",
    ],
)
def test_lines_that_go_on(text: str) -> None:
    assert argvs(text) == [["a", "b"]]


def test_windows_and_its_marks(tmp_path: Path) -> None:
    file = tmp_path / "f.txt"
    file.write_bytes("\ufeff# first\r\na b\r\n\r\nc 'd\r\ne'\r\n".encode())
    assert [(c.line, c.argv) for c in read_commands(file)] == [
        (2, ["a", "b"]),
        (4, ["c", "d\r\ne"]),
    ]


def test_several_commands_know_their_lines() -> None:
    commands = parse_commands("# x\na\n\n  b \\\n  c\nd 'e\nf'\ng", "f.txt")
    assert [command.location for command in commands] == [
        "f.txt:2",
        "f.txt:4",
        "f.txt:6",
        "f.txt:8",
    ]


def test_variables_of_one_command() -> None:
    [command] = parse_commands("A=1 B='x y' C= python D=2", "f.txt")
    assert [(name, value.text) for name, value in command.variables] == [
        ("A", "1"),
        ("B", "x y"),
        ("C", ""),
    ]
    assert command.argv == ["python", "D=2"]
    assert argvs("'A'=1 b") == [["A=1", "b"]], "quoted, it is a word as any other"


def test_variables_are_the_jobs_to_fill_in() -> None:
    text = "a $B\n# echelon: expand\nc \"x $D\" ${E}f'$G' ~/h i=~/j"
    first, second = parse_commands(text, "f.txt")
    assert (first.expand, second.expand) == (False, True)
    assert second.argv == ["c", "x $D", "${E}f$G", "~/h", "i=~/j"]
    shown = " ".join(word.shell or shlex.quote(word.text) for word in second.words)
    env = {"D": "* $(touch x)", "E": "a  b", "HOME": "/home"}
    done = subprocess.run(
        ["bash", "-c", f'printf "%s\\0" {shown}'], env=env, capture_output=True, text=True
    )
    words = done.stdout.split("\0")[:-1]
    assert words == ["c", "x * $(touch x)", "a  bf$G", "/home/h", "i=/home/j"]
    unset = subprocess.run(["bash", "-c", f"true {shown}"], env={}, capture_output=True, text=True)
    assert unset.returncode != 0
    assert "D: is not set in the job" in unset.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "f.txt: there is no command in it"),
        ("# only\n\n   # comments", "f.txt: there is no command in it"),
        ("a \\", "f.txt:1: the file ends with \\"),
        ("a\nb \\\n", "f.txt:2: the last line ends with \\"),
        ("a\nb \\\n# c\n", "f.txt:2: the last line ends with \\"),
        ("a \\ \nb", "f.txt:1: \\ continues a line only as its very last character"),
        ("a \\  # why\nb", "f.txt:1: \\ continues a line only as its very last character"),
        ("a\nb 'c\nd", "f.txt:2: the quote ' that is opened here is never closed"),
        ('a "b\nc', 'f.txt:1: the quote " that is opened here is never closed'),
        ("a | b", "f.txt:1: | is a pipe"),
        ("a > b", "f.txt:1: > is a redirection"),
        ("a && b", "f.txt:1: & is a background job or `&&`"),
        ("a; b", "f.txt:1: ; is a list of commands"),
        ("a $(b)", "f.txt:1: $(…) is a command substitution"),
        ('a "$(b)"', "f.txt:1: $(…) is a command substitution"),
        ("a `b`", "f.txt:1: ` is a command substitution"),
        ('a "`b`"', "f.txt:1: ` is a command substitution"),
        ("a *.txt", "f.txt:1: * is a pattern of file names"),
        ("a {b,c}", "f.txt:1: {b,c} is several words to a shell"),
        ("a ${b:-c}", "f.txt:1: ${ means more to a shell"),
        ("a $1", "f.txt:1: $1 means more to a shell"),
        ("a $[1]", "f.txt:1: $[ means more to a shell"),
        ("a $'b'", "f.txt:1: $' means more to a shell"),
        ('a $"b"', 'f.txt:1: $" means more to a shell'),
        ("a ~b/c", "f.txt:1: ~NAME is the home of a user"),
        ("cd x", "f.txt:1: 'cd' is a keyword of the shell, not a program"),
        ("a\n--b", "f.txt:2: the command begins with the option --b"),
        ("A=1", "f.txt:1: A=… is alone on its line"),
        ("# echelon: expnad\na", "f.txt:1: there is no directive 'expnad'"),
    ],
)
def test_what_is_refused(text: str, told: str) -> None:
    assert faults(text)[0].startswith(told)


def test_all_faults_at_once() -> None:
    assert len(faults("a | b\nc \\\n > d\ne\nA=1\n*\n")) == 4


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "sweep.txt").write_text("a")
    (tmp_path / "binary.txt").write_bytes(b"a\0b")
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe a")
    for name, told, code in (
        ("swep.txt", "did you mean 'sweep.txt'?", ExitCode.NOT_FOUND),
        (".", "is a folder", ExitCode.USAGE),
        ("binary.txt", "is not a text file", ExitCode.USAGE),
        ("latin.txt", "is not a text file", ExitCode.USAGE),
        ("/dev/zero", "is larger than 64 MB", ExitCode.USAGE),
    ):
        with pytest.raises(EchelonError, match=told.replace("?", r"\?")) as caught:
            read_commands(tmp_path / name)
        assert caught.value.exit == code


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)


@given(st.lists(st.lists(TEXTS, min_size=1, max_size=6), min_size=1, max_size=4))
def test_what_is_quoted_arrives(commands: list[list[str]]) -> None:
    """Any words whatever, line breaks and marks of all kinds in them."""
    commands = [["program", *words] for words in commands]
    text = "# a comment\n" + "\n".join(map(quote_words, commands)) + "\n"
    assert argvs(text) == commands


@given(st.lists(st.text("ab \t'\"\\=-[]:.,", max_size=12), max_size=4))
def test_plain_text_is_read_as_bash_reads_it(lines: list[str]) -> None:
    """What is taken at all is taken as the shell's own rules have it, comments aside."""
    text = "x " + " ".join(lines)
    try:
        ours = argvs(text)
        theirs = shlex.split(text)
    except (EchelonError, ValueError):
        return
    if len(ours) == 1:
        assert ours[0] == theirs


def test_the_table_in_the_docs_holds() -> None:
    """Each row's construct gives the words, or the refusal, that stand beside it."""
    section = DOCUMENTED.read_text().partition("## What each")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) > 15
    for row in rows:
        construct, meaning = (cell.strip() for cell in row.replace("\\|", "\0").split("|")[1:3])
        text = construct.replace("\0", "|").strip("`").replace("⏎", "\n")
        if meaning.startswith("refused"):
            assert faults(text), row
        else:
            shown = meaning.replace("\0", "|").replace("⏎", "\n").partition(", with ")[0]
            assert [f"`{shlex.join(argv)}`" for argv in argvs(text)] == shown.split(" and "), row


def test_a_carriage_return_may_end_the_file() -> None:
    [command] = parse_commands("python a.py\r", "f")
    assert command.argv == ["python", "a.py"]

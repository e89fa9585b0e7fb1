"""One command after the other out of a text: words, quotes, continuations, variables.

The words of a command reach its program exactly as they are written. What a shell would do beyond
that (pipes, redirections, patterns of file names, substitutions) is refused and not guessed at:
done at submitting it would see another machine, time and folder than the person meant.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from echelon.errors import nearest

DIRECTIVES = ("expand",)
_DIRECTIVE = re.compile(r"#\s*echelon\s*:\s*(.*)", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", re.ASCII)
_COMMENT_LINE = re.compile(r"[ \t]*#[^\n]*(\n|\Z)")
_BRACES = re.compile(r"\{\S*?(,|\.\.)\S*?\}")
_OPERATORS = {
    **{"|": "a pipe", "&": "a background job or `&&`", ";": "a list of commands"},
    **{"<": "a redirection", ">": "a redirection", "(": "a subshell", ")": "a subshell"},
    **{"`": "a command substitution"},
    **dict.fromkeys("*?", "a pattern of file names"),
}
_IN_A_SCRIPT = "put it into a script of its own, or write bash -c '…'; as plain text, quote it"
_SHELLS_OWN = {
    *("cd", "export", "source", ".", "set", "unset", "alias", "eval", "exec", "ulimit", "module"),
    *("if", "then", "for", "while", "until", "do", "done", "case", "function", "{", "}", "!", "[["),
}
"""Words that only a shell understands, or that change only the shell they are typed into."""


@dataclass(frozen=True)
class Word:
    text: str
    """What the program is given; variables stand in it as they were written."""
    line: int
    shell: str | None = None
    """The same for bash, where variables stand in it; they are never split or matched to files."""


@dataclass(frozen=True)
class Command:
    file: str
    line: int
    """Where it begins."""
    words: tuple[Word, ...]
    variables: tuple[tuple[str, Word], ...] = ()
    """`NAME=value` before the program: for this command alone."""
    expand: bool = False
    """Whether the job's shell may fill in variables."""

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def argv(self) -> list[str]:
        return [word.text for word in self.words]


class Bad(Exception):
    def __init__(self, line: int, what: str, do: str) -> None:
        self.line, self.what, self.do = line, what, do


@dataclass
class _Building:
    """A word that is being read."""

    line: int
    text: str = ""
    shell: str = ""
    literal: str = ""
    """The end of the word, not yet in `shell`."""
    has_variables: bool = False
    assigned: str | None = None
    """The name before an unquoted `=`, when that is all that stands before it."""
    plain: bool = True
    """Whether nothing of it was quoted so far."""

    def add(self, text: str) -> None:
        self.text += text
        self.literal += text

    def add_variable(self, name: str, written: str) -> None:
        self._flush()
        self.text += written
        self.shell += f'"${{{name}?is not set in the job}}"'
        self.has_variables = True
        self.plain = False

    def end_name(self) -> None:
        """What follows may need quotes, and NAME= may not be in them: it is cut off as it is."""
        self._flush()

    def _flush(self) -> None:
        self.shell += shlex.quote(self.literal) if self.literal else ""
        self.literal = ""

    def done(self, cut: int = 0) -> Word:
        """Without its first so many characters, which are literal."""
        text = self.text[cut:]
        if not self.has_variables:
            return Word(text, self.line)
        self._flush()
        whole = self.shell
        if cut:  # NAME= needs no quotes, so it stands in the shell's text as it is
            whole = whole.removeprefix(self.text[:cut])
        return Word(text, self.line, whole)


class Reader:
    def __init__(self, text: str, file: str) -> None:
        self._text, self._file = text, file
        self._at, self._line = 0, 1
        self._expand = False

    @property
    def at_end(self) -> bool:
        return self._at >= len(self._text)

    def command(self) -> Command | None:
        """The next one; None for a line without."""
        words: list[Word] = []
        variables: list[tuple[str, Word]] = []
        line = self._line
        while not self._over():
            if self._peek() == "#":
                self._comment(alone=not words and not variables)
                continue
            building = self._word()
            if not words and not variables:
                line = building.line
            if building.assigned and not words:
                name = building.assigned
                variables.append((name, building.done(cut=len(name) + 1)))
            else:
                self._require_program(building, first=not words)
                words.append(building.done())
        if variables and not words:
            raise Bad(line, f"{variables[0][0]}=… stands alone", "write the command after it")
        self._newline()
        if not words:
            return None
        return Command(self._file, line, tuple(words), tuple(variables), self._expand)

    def skip_command(self) -> None:
        """To the next line that is not a continuation of this one."""
        while not self.at_end:
            end = self._text.find("\n", self._at)
            line = self._text[self._at : end if end >= 0 else len(self._text)]
            self._at = end + 1 if end >= 0 else len(self._text)
            self._line += 1
            if not line.rstrip("\r").endswith("\\"):
                return

    # --- between words ---

    def _over(self) -> bool:
        """Whether the command is, after what stands between words."""
        while not self.at_end:
            if self._peek() in " \t":
                self._at += 1
            elif not self._continued():
                break
        return self.at_end or self._at_newline()

    def _continued(self) -> bool:
        """Past a backslash at the end of a line, and past comment lines that follow it."""
        length = 1 + self._newline_length(1) if self._peek() == "\\" else 1
        if length == 1:
            return False
        line = self._line
        self._at += length
        self._line += 1
        while (match := _COMMENT_LINE.match(self._text, self._at)) is not None:
            self._line += match[0].count("\n")
            self._at = match.end()
        if not self._text[self._at :].strip():
            raise Bad(line, "the last line ends with \\, and nothing follows", "delete the \\")
        return True

    def _comment(self, alone: bool) -> None:
        end = self._text.find("\n", self._at)
        end = end if end >= 0 else len(self._text)
        text = self._text[self._at : end].rstrip("\r")
        self._at = end - self._text[self._at : end].endswith("\r")
        if (found := _DIRECTIVE.fullmatch(text.strip())) and alone:
            if found[1].strip() not in DIRECTIVES:
                raise Bad(
                    self._line,
                    f"there is no directive {found[1].strip()!r}",
                    nearest(found[1].strip(), DIRECTIVES),
                )
            self._expand = True

    # --- one word ---

    def _word(self) -> _Building:
        word = _Building(self._line)
        while not self.at_end and not self._at_newline() and self._peek() not in " \t":
            if self._continued():
                continue
            self._part(word)
        return word

    def _part(self, word: _Building) -> None:
        character = self._peek()
        if character == "'":
            self._single(word)
        elif character == '"':
            self._double(word)
        elif character == "\\":
            self._escaped(word)
        elif character == "$":
            self._dollar(word, special="\"'")  # $"…" and $'…' are quotes of bash's
        elif character in _OPERATORS:
            raise Bad(self._line, f"{character} is {_OPERATORS[character]}", _IN_A_SCRIPT)
        elif character == "{" and (braces := _BRACES.match(self._text, self._at)):
            raise Bad(
                self._line,
                f"{braces[0]} is several words to a shell",
                f"as plain text, quote it: '{braces[0]}'",
            )
        elif character == "~" and (not word.text or (word.assigned and word.text[-1] in "=:")):
            self._home(word)
        else:
            if character == "=" and word.plain and _NAME.fullmatch(word.text):
                word.assigned = word.text
            self._at += 1
            word.add(character)
            if word.assigned is not None and word.assigned == word.text[:-1]:
                word.end_name()

    def _single(self, word: _Building) -> None:
        end = self._text.find("'", self._at + 1)
        if end < 0:
            raise self._unclosed("'")
        inside = self._text[self._at + 1 : end]
        self._line += inside.count("\n")
        self._at = end + 1
        word.plain = False
        word.add(inside)

    def _double(self, word: _Building) -> None:
        line, start = self._line, self._at
        self._at += 1
        word.plain = False
        while not self.at_end:
            character = self._peek()
            if character == '"':
                self._at += 1
                return
            if character == "\\" and (length := self._newline_length(1)):
                self._at += 1 + length
                self._line += 1
            elif character == "\\" and self._peek(1) in ("$", "`", '"', "\\"):
                word.add(self._peek(1))
                self._at += 2
            elif character == "$":
                self._dollar(word)
            elif character == "`":
                raise Bad(self._line, "` is a command substitution", _IN_A_SCRIPT)
            else:
                self._line += character == "\n"
                self._at += 1
                word.add(character)
        self._line, self._at = line, start
        raise self._unclosed('"')

    def _unclosed(self, mark: str) -> Bad:
        bad = Bad(
            self._line,
            f"the quote {mark} that is opened here is never closed",
            f"close it, or write \\{mark} for the character itself",
        )
        self._at = len(self._text)  # what follows was read as quoted, or as something else
        return bad

    def _escaped(self, word: _Building) -> None:
        following = self._peek(1)
        rest = self._text[self._at + 1 :].partition("\n")[0].strip()
        if not following:
            raise Bad(self._line, "the file ends with \\, and nothing follows", "delete the \\")
        if following in " \t" and (not rest or rest.startswith("#")):
            raise Bad(
                self._line,
                "\\ continues a line only as its very last character",
                "delete what stands after it",
            )
        word.plain = False
        word.add(following)
        self._at += 2

    def _dollar(self, word: _Building, special: str = "") -> None:
        match = _VARIABLE.match(self._text, self._at)
        following = self._peek(1)
        if match:
            self._at = match.end()
            word.add_variable(match[1] or match[2], match[0])
        elif following == "(":
            raise Bad(self._line, "$(…) is a command substitution", _IN_A_SCRIPT)
        elif following and (following in f"{special}{{[@*#?$!-" or following.isdecimal()):
            raise Bad(
                self._line,
                f"${following} means more to a shell than the value of a variable",
                f"{_IN_A_SCRIPT}: \\$",
            )
        else:
            self._at += 1
            word.add("$")

    def _home(self, word: _Building) -> None:
        following = self._peek(1)
        if following not in ("", "/", " ", "\t", "\r", "\n"):
            raise Bad(self._line, "~NAME is the home of a user", "write the path")
        self._at += 1
        word.add_variable("HOME", "~")

    def _require_program(self, word: _Building, first: bool) -> None:
        if not first or not word.plain:
            return
        if word.text in _SHELLS_OWN:
            raise Bad(
                word.line,
                f"{word.text!r} is a word of the shell's, and no program",
                "put it into a script, or into launch.setup, which runs before the command",
            )
        if word.text.startswith("-"):
            raise Bad(
                word.line,
                f"the command begins with the option {word.text}",
                "end the line before it with \\ if it goes on here",
            )

    # --- characters ---

    def _peek(self, ahead: int = 0) -> str:
        return self._text[self._at + ahead : self._at + ahead + 1]

    def _newline_length(self, ahead: int) -> int:
        """Of a line's end there, as Unix or Windows writes it; 0 for anything else."""
        if self._peek(ahead) == "\n":
            return 1
        if self._peek(ahead) != "\r":
            return 0
        return {"\n": 2, "": 1}.get(self._peek(ahead + 1), 0)

    def _at_newline(self) -> bool:
        return self._newline_length(0) > 0

    def _newline(self) -> None:
        if not self.at_end:
            self._at += self._newline_length(0)
            self._line += 1

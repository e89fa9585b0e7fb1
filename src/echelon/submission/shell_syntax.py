"""A parser for commands as typed into a shell: words, quotes, continuations, variables.

The words of a command reach its program exactly as they are written. What a shell would do beyond
that (pipes, redirections, patterns of file names, substitutions) is refused, not guessed at. Done
while submitting, it would see another machine, time and folder than its writer meant.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from echelon.errors import suggest_nearest

DIRECTIVES = ("expand",)
_DIRECTIVE_COMMENT = re.compile(r"#\s*echelon\s*:\s*(.*)", re.IGNORECASE)
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", re.ASCII)
_COMMENT_LINE = re.compile(r"[ \t]*#[^\n]*(\n|\Z)")
_BRACES = re.compile(r"\{\S*?(,|\.\.)\S*?\}")
_OPERATORS = {
    **{"|": "a pipe", "&": "a background job or `&&`", ";": "a list of commands"},
    **{"<": "a redirection", ">": "a redirection", "(": "a subshell", ")": "a subshell"},
    **{"`": "a command substitution"},
    **dict.fromkeys("*?", "a pattern of file names"),
}
_SCRIPT_HINT = "put it into a script of its own, or write bash -c '…'; as plain text, quote it"
_SHELL_KEYWORDS = {
    *("cd", "export", "source", ".", "set", "unset", "alias", "eval", "exec", "ulimit", "module"),
    *("if", "then", "for", "while", "until", "do", "done", "case", "function", "{", "}", "!", "[["),
}
"""Words that only a shell understands, or that change only the shell they are typed into."""


@dataclass(frozen=True)
class ShellWord:
    """One word of a command."""

    text: str
    """The argument of the program, with variables as they were written."""
    line: int
    shell: str | None = None
    """The same for bash, if it has variables. Their values are neither split nor matched to
    files."""


@dataclass(frozen=True)
class ShellCommand:
    """One command of a file."""

    file: str
    line: int
    """The line on which it begins."""
    words: tuple[ShellWord, ...]
    variables: tuple[tuple[str, ShellWord], ...] = ()
    """`NAME=value` before the program: for this command alone."""
    expand: bool = False
    """Whether the job's shell expands variables."""

    @property
    def location(self) -> str:
        """FILE:LINE, for faults."""
        return f"{self.file}:{self.line}"

    @property
    def argv(self) -> list[str]:
        """The words as text."""
        return [word.text for word in self.words]


class CommandSyntaxError(Exception):
    """A command that is not one, with its line and what to do about it."""

    def __init__(self, line: int, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.line, self.problem, self.remedy = line, problem, remedy


@dataclass
class _WordBuilder:
    """A word while it is read, as text and, in parallel, quoted for bash."""

    line: int
    text: str = ""
    shell: str = ""
    pending_literal: str = ""
    """The end of the word, not yet in `shell`."""
    has_variables: bool = False
    assigned_name: str | None = None
    """NAME, in a word that begins with NAME= without quotes."""
    is_unquoted: bool = True
    """Whether nothing of it has been quoted so far."""

    def add(self, text: str) -> None:
        """Append literal text."""
        self.text += text
        self.pending_literal += text

    def add_variable(self, name: str, written: str) -> None:
        """Append a variable; `written` is how the file has it: $NAME, ${NAME} or ~."""
        self._quote_pending_literal()
        self.text += written
        self.shell += f'"${{{name}?is not set in the job}}"'
        self.has_variables = True
        self.is_unquoted = False

    def end_assigned_name(self) -> None:
        """Keep NAME= out of the quotes that the rest of the word may need: build() cuts it off."""
        self._quote_pending_literal()

    def _quote_pending_literal(self) -> None:
        self.shell += shlex.quote(self.pending_literal) if self.pending_literal else ""
        self.pending_literal = ""

    def build(self, cut: int = 0) -> ShellWord:
        """Return the word without its first `cut` characters, which are literal."""
        text = self.text[cut:]
        if not self.has_variables:
            return ShellWord(text, self.line)
        self._quote_pending_literal()
        whole = self.shell
        if cut:  # NAME= needs no quotes, so `shell` begins with it as it is
            whole = whole.removeprefix(self.text[:cut])
        return ShellWord(text, self.line, whole)


class CommandReader:
    """Reads commands from a text, one after the other."""

    def __init__(self, text: str, file: str) -> None:
        self._text, self._file = text, file
        self._position, self._line = 0, 1
        self._expand = False

    @property
    def is_at_end(self) -> bool:
        return self._position >= len(self._text)

    def read_command(self) -> ShellCommand | None:
        """Return the next command, or None for a line without one."""
        words: list[ShellWord] = []
        variables: list[tuple[str, ShellWord]] = []
        line = self._line
        while not self._skip_to_word_or_end():
            if self._peek() == "#":
                self._read_comment(is_whole_line=not words and not variables)
                continue
            word = self._read_word()
            if not words and not variables:
                line = word.line
            if word.assigned_name and not words:
                name = word.assigned_name
                variables.append((name, word.build(cut=len(name) + 1)))
            else:
                if not words:
                    self._require_valid_first_word(word)
                words.append(word.build())
        if variables and not words:
            raise CommandSyntaxError(
                line, f"{variables[0][0]}=… is alone on its line", "write the command after it"
            )
        self._read_newline()
        if not words:
            return None
        return ShellCommand(self._file, line, tuple(words), tuple(variables), self._expand)

    def skip_command(self) -> None:
        """Move to the next line that is not a continuation of this one, after a syntax error."""
        while not self.is_at_end:
            end = self._text.find("\n", self._position)
            line = self._text[self._position : end if end >= 0 else len(self._text)]
            self._position = end + 1 if end >= 0 else len(self._text)
            self._line += 1
            if not line.rstrip("\r").endswith("\\"):
                return

    # --- between words ---

    def _skip_to_word_or_end(self) -> bool:
        """Skip blanks and continuations, and return whether the command ends there."""
        while not self.is_at_end:
            if self._peek() in " \t":
                self._position += 1
            elif not self._skip_continuation():
                break
        return self.is_at_end or self._is_at_newline()

    def _skip_continuation(self) -> bool:
        """Skip a backslash at the end of a line and comment lines after it; return whether there is
        one."""
        length = 1 + self._measure_newline(1) if self._peek() == "\\" else 1
        if length == 1:
            return False
        line = self._line
        self._position += length
        self._line += 1
        while (match := _COMMENT_LINE.match(self._text, self._position)) is not None:
            self._line += match[0].count("\n")
            self._position = match.end()
        if not self._text[self._position :].strip():
            raise CommandSyntaxError(
                line, "the last line ends with \\, and nothing follows", "delete the \\"
            )
        return True

    def _read_comment(self, is_whole_line: bool) -> None:
        """Skip a comment; on a line of its own it may be a directive `# echelon: NAME`."""
        end = self._text.find("\n", self._position)
        end = end if end >= 0 else len(self._text)
        text = self._text[self._position : end].rstrip("\r")
        self._position = end - self._text[self._position : end].endswith("\r")
        if (match := _DIRECTIVE_COMMENT.fullmatch(text.strip())) and is_whole_line:
            if match[1].strip() not in DIRECTIVES:
                raise CommandSyntaxError(
                    self._line,
                    f"there is no directive {match[1].strip()!r}",
                    suggest_nearest(match[1].strip(), DIRECTIVES),
                )
            self._expand = True

    # --- one word ---

    def _read_word(self) -> _WordBuilder:
        word = _WordBuilder(self._line)
        while not self.is_at_end and not self._is_at_newline() and self._peek() not in " \t":
            if self._skip_continuation():
                continue
            self._read_word_part(word)
        return word

    def _read_word_part(self, word: _WordBuilder) -> None:
        """Read a quoted part, a variable or one character into the word."""
        character = self._peek()
        if character == "'":
            self._read_single_quotes(word)
        elif character == '"':
            self._read_double_quotes(word)
        elif character == "\\":
            self._read_escape(word)
        elif character == "$":
            self._read_dollar(word, special="\"'")  # bash has the quotes $"…" and $'…'
        elif character in _OPERATORS:
            raise CommandSyntaxError(
                self._line, f"{character} is {_OPERATORS[character]}", _SCRIPT_HINT
            )
        elif character == "{" and (braces := _BRACES.match(self._text, self._position)):
            raise CommandSyntaxError(
                self._line,
                f"{braces[0]} is several words to a shell",
                f"as plain text, quote it: '{braces[0]}'",
            )
        elif character == "~" and (not word.text or (word.assigned_name and word.text[-1] in "=:")):
            self._read_tilde(word)
        else:
            if character == "=" and word.is_unquoted and _VARIABLE_NAME.fullmatch(word.text):
                word.assigned_name = word.text
            self._position += 1
            word.add(character)
            if word.assigned_name is not None and word.assigned_name == word.text[:-1]:
                word.end_assigned_name()

    def _read_single_quotes(self, word: _WordBuilder) -> None:
        end = self._text.find("'", self._position + 1)
        if end < 0:
            raise self._make_unclosed_quote_error("'")
        inside = self._text[self._position + 1 : end]
        self._line += inside.count("\n")
        self._position = end + 1
        word.is_unquoted = False
        word.add(inside)

    def _read_double_quotes(self, word: _WordBuilder) -> None:
        line, start = self._line, self._position
        self._position += 1
        word.is_unquoted = False
        while not self.is_at_end:
            character = self._peek()
            if character == '"':
                self._position += 1
                return
            if character == "\\" and (length := self._measure_newline(1)):
                self._position += 1 + length
                self._line += 1
            elif character == "\\" and self._peek(1) in ("$", "`", '"', "\\"):
                word.add(self._peek(1))
                self._position += 2
            elif character == "$":
                self._read_dollar(word)
            elif character == "`":
                raise CommandSyntaxError(self._line, "` is a command substitution", _SCRIPT_HINT)
            else:
                self._line += character == "\n"
                self._position += 1
                word.add(character)
        self._line, self._position = line, start
        raise self._make_unclosed_quote_error('"')

    def _make_unclosed_quote_error(self, mark: str) -> CommandSyntaxError:
        """Return the error, and give up the rest: it was read as quoted, or as something else."""
        self._position = len(self._text)
        return CommandSyntaxError(
            self._line,
            f"the quote {mark} that is opened here is never closed",
            f"close it, or write \\{mark} for the character itself",
        )

    def _read_escape(self, word: _WordBuilder) -> None:
        following = self._peek(1)
        rest = self._text[self._position + 1 :].partition("\n")[0].strip()
        if not following:
            raise CommandSyntaxError(
                self._line, "the file ends with \\, and nothing follows", "delete the \\"
            )
        if following in " \t" and (not rest or rest.startswith("#")):
            raise CommandSyntaxError(
                self._line,
                "\\ continues a line only as its very last character",
                "delete what comes after it",
            )
        word.is_unquoted = False
        word.add(following)
        self._position += 2

    def _read_dollar(self, word: _WordBuilder, special: str = "") -> None:
        """Read a variable, or a `$` that is nothing but itself.

        `special` are characters that mean something after `$` here, besides the usual ones.
        """
        match = _VARIABLE.match(self._text, self._position)
        following = self._peek(1)
        if match:
            self._position = match.end()
            word.add_variable(match[1] or match[2], match[0])
        elif following == "(":
            raise CommandSyntaxError(self._line, "$(…) is a command substitution", _SCRIPT_HINT)
        elif following and (following in f"{special}{{[@*#?$!-" or following.isdecimal()):
            raise CommandSyntaxError(
                self._line,
                f"${following} means more to a shell than the value of a variable",
                f"{_SCRIPT_HINT}: \\$",
            )
        else:
            self._position += 1
            word.add("$")

    def _read_tilde(self, word: _WordBuilder) -> None:
        """Read `~`, which is $HOME of the job."""
        following = self._peek(1)
        if following not in ("", "/", " ", "\t", "\r", "\n"):
            raise CommandSyntaxError(self._line, "~NAME is the home of a user", "write the path")
        self._position += 1
        word.add_variable("HOME", "~")

    def _require_valid_first_word(self, word: _WordBuilder) -> None:
        """Refuse a first word that only a shell understands, or that is an option."""
        if not word.is_unquoted:
            return
        if word.text in _SHELL_KEYWORDS:
            raise CommandSyntaxError(
                word.line,
                f"{word.text!r} is a keyword of the shell, not a program",
                "put it into a script, or into launch.setup, which runs before the command",
            )
        if word.text.startswith("-"):
            raise CommandSyntaxError(
                word.line,
                f"the command begins with the option {word.text}",
                "end the line before it with \\ if it continues here",
            )

    # --- characters ---

    def _peek(self, ahead: int = 0) -> str:
        return self._text[self._position + ahead : self._position + ahead + 1]

    def _measure_newline(self, ahead: int) -> int:
        """Return the length of a line end of Unix or Windows there; 0 for anything else."""
        if self._peek(ahead) == "\n":
            return 1
        if self._peek(ahead) != "\r":
            return 0
        return {"\n": 2, "": 1}.get(self._peek(ahead + 1), 0)

    def _is_at_newline(self) -> bool:
        return self._measure_newline(0) > 0

    def _read_newline(self) -> None:
        if not self.is_at_end:
            self._position += self._measure_newline(0)
            self._line += 1

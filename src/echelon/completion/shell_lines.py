"""From what a shell says of a line that is typed to words, and from an answer to what it reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from echelon.completion.answer import Answer, complete

SHELLS = ("bash", "zsh", "fish")


def print_answer(words: Sequence[str]) -> int:
    """Print the answer to a shell: its name comes first, then what the shell has said.

    zsh and fish say the words behind `echelon`, with the last one as far as the cursor. bash says
    the line as far as the cursor, and the signs at which it divides words.
    """
    shell, *given = words
    if shell == "bash":
        line, breaks = given
        typed, quote = split_line(line)
        answer = complete(typed[1:])
        lines = _cut_at_word_breaks(answer, typed[-1], quote, breaks)
    else:
        answer = complete(given)
        lines = (f"{text}\t{about}" if about else text for text, about in answer.candidates)
    print(answer.paths, *lines, sep="\n")
    return 0


def split_line(line: str) -> tuple[list[str], str]:
    """Return the words of a line as a shell divides it, and the quotation mark that is open or "".

    A line that ends with a blank has an empty last word.
    """
    words, word, quote, has_word = [], "", "", False
    signs = iter(line)
    for sign in signs:
        if quote:
            if sign == quote:
                quote = ""
            elif sign == "\\" and quote == '"':
                word += next(signs, "")
            else:
                word += sign
        elif sign in "'\"":
            quote, has_word = sign, True
        elif sign == "\\":
            word, has_word = word + next(signs, ""), True
        elif sign.isspace():
            if has_word:
                words.append(word)
            word, has_word = "", False
        else:
            word, has_word = word + sign, True
    return [*words, word], quote


def _cut_at_word_breaks(answer: Answer, current: str, quote: str, breaks: str) -> Iterator[str]:
    """Yield the candidates without what bash keeps: it replaces the part behind the last sign that
    divides words, which `=` and `:` do for it outside of quotation marks."""
    dividing = [sign for sign in "=:" if sign in breaks]
    kept = 0 if quote else 1 + max((current.rfind(sign) for sign in dividing), default=-1)
    for text, _ in answer.candidates:
        yield text[kept:]

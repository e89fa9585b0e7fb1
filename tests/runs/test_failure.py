"""The first failure in one line and in full, also where torch brought it from another process."""

from __future__ import annotations

import sys

import pytest
from torch._utils import ExceptionWrapper

from echelon.errors import EchelonError, Fault
from echelon.runs.failure import Failure, make_failure_from_exception


def read_sample(index: int) -> int:
    try:
        return [1, 2, 3][index]
    except IndexError as error:
        raise ValueError(f"sample {index} is\nnot there") from error


def catch(function: object, *args: object) -> BaseException:
    with pytest.raises(Exception) as caught:
        function(*args)  # type: ignore[operator]
    return caught.value


def bring_from_loader(error: BaseException) -> BaseException:
    """The exception as torch's DataLoader raises it after a worker process has raised it."""
    try:
        raise error
    except Exception:
        wrapped = ExceptionWrapper(sys.exc_info(), where="in DataLoader worker process 1")
    return catch(wrapped.reraise)


def test_a_failure_of_a_loader_process_is_its_own_traceback_once() -> None:
    failure = make_failure_from_exception(bring_from_loader(catch(read_sample, 7)), 0, 4)
    assert failure.summary == "ValueError: sample 7 is not there"
    assert failure.detail.startswith("In DataLoader worker process 1:\nTraceback (most recent")
    assert failure.detail.count("in read_sample") == 2, "of the cause, and of what came of it"
    assert failure.detail.count("IndexError: list index out of range") == 1
    assert failure.detail.count("ValueError: sample 7 is\nnot there") == 1
    assert "Caught" not in failure.detail
    assert "reraise" not in failure.detail
    assert str(failure).endswith(" failed after step 4: ValueError: sample 7 is not there")


def test_an_error_that_cannot_be_made_again_is_still_read() -> None:
    """Its class takes other arguments than a text, so torch raises a RuntimeError instead."""
    failure = make_failure_from_exception(
        bring_from_loader(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad start")), 0, None
    )
    assert failure.summary.startswith("UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Error(s) in loading:\n" + "\tMissing key(s): weight\n" * 100),
        EchelonError(Fault("the value " + "x" * 900 + " is long", "make it shorter")),
    ],
)
def test_a_summary_is_one_short_line_and_the_detail_is_whole(error: Exception) -> None:
    failure = make_failure_from_exception(error, 0, None)
    assert len(failure.summary) == 200
    assert failure.summary.endswith("…")
    assert "\n" not in failure.summary
    assert (str(error.args[0]).strip() in failure.detail) or "x" * 900 in failure.detail
    assert Failure.from_json(failure.to_json()) == failure


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
def test_a_note_does_not_replace_the_message() -> None:
    error = ValueError("the cause")
    error.add_note("a note of somebody else")  # type: ignore[attr-defined,unused-ignore]
    failure = make_failure_from_exception(error, 0, None)
    assert failure.summary == "ValueError: the cause"
    assert "a note of somebody else" in failure.detail

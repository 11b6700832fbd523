"""Foreign errors in one line."""

from __future__ import annotations

import re

import pytest

from ml_pipeline.errors import first_line, last_line, one_line, type_and_line


@pytest.mark.parametrize(
    ("message", "first", "first_two", "last", "whole"),
    [
        ("", "ValueError", "ValueError", "ValueError", "ValueError"),
        ("one", "one", "one", "one", "one"),
        ("\n  one\n\n  two\nthree\n", "one", "one; two", "three", "one; two; three"),
        ("Errors:\n\tsize", "Errors:", "Errors: size", "size", "Errors: size"),
    ],
)
def test_a_message_of_many_lines_becomes_one_line(
    message: str, first: str, first_two: str, last: str, whole: str
) -> None:
    error = ValueError(message)

    assert first_line(error) == first
    assert first_line(error, n_lines=2) == first_two
    assert last_line(error) == last
    assert one_line(error) == whole


def test_whole_message_leaves_out_the_frames_of_tracebacks() -> None:
    text = """env 0 (seed 7) raised:
Traceback (most recent call last):
  File "my_env.py", line 7, in step
    self.table[3]
    ~~~~~~~~~~^^^
IndexError: list index out of range

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "my_env.py", line 9, in step
ValueError: puck left the table
lower the speed"""

    assert one_line(ValueError(text)) == (
        "env 0 (seed 7) raised: IndexError: list index out of range; During handling of the above "
        "exception, another exception occurred: ValueError: puck left the table; lower the speed"
    )


def test_error_without_text_names_its_place() -> None:
    def broken() -> None:
        assert False  # noqa: B011, PT015

    with pytest.raises(AssertionError) as raised:
        broken()
    raised.value.args = ()

    assert re.fullmatch(
        r"AssertionError \(test_errors\.py:\d+ in broken\)", type_and_line(raised.value)
    )
    assert type_and_line(ValueError("too long")) == "ValueError: too long"

"""Foreign errors in one line."""

from __future__ import annotations

import pytest

from ml_pipeline.errors import first_line, last_line


@pytest.mark.parametrize(
    ("message", "first", "first_two", "last"),
    [
        ("", "ValueError", "ValueError", "ValueError"),
        ("one", "one", "one", "one"),
        ("\n  one\n\n  two\nthree\n", "one", "one; two", "three"),
        ("Errors:\n\tsize mismatch", "Errors:", "Errors: size mismatch", "size mismatch"),
    ],
)
def test_a_message_of_many_lines_becomes_one_line(
    message: str, first: str, first_two: str, last: str
) -> None:
    error = ValueError(message)

    assert first_line(error) == first
    assert first_line(error, n_lines=2) == first_two
    assert last_line(error) == last

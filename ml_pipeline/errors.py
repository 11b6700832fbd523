"""UserError: what a user can put right, told in one clear line and never as a traceback."""

from __future__ import annotations


class UserError(Exception):
    """The door prints ``str(error)`` and ends with exit code 1; the rooms raise subclasses."""


def first_line(error: BaseException) -> str:
    """What an error of somebody else's code says, short enough for a line of ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__

"""UserError: what a user can put right, told in one clear line and never as a traceback."""

from __future__ import annotations


class UserError(Exception):
    """The door prints ``str(error)`` and ends with exit code 1; the rooms raise subclasses."""

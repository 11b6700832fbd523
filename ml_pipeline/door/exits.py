"""exit_code: errors of a command as one line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ml_pipeline.errors import UserError


def exit_code(command: Callable[[], object]) -> int:
    """Run ``command``; return 0, 1 after a ``UserError``, or the code of the stop signal."""
    try:
        command()
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        return getattr(stop, "exit_code", 130)  # Interrupted knows its signal
    return 0

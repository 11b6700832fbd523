"""UserError: a mistake that the user can fix, reported in one line without a traceback."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections import deque
from collections.abc import Sequence
from errno import EACCES, EDQUOT, ENOSPC, EPERM, EROFS
from pathlib import Path

_PACKAGE = Path(__file__).parent
_FORBIDDEN = (EACCES, EPERM, EROFS)
_FULL = (ENOSPC, EDQUOT)
_STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])


class UserError(Exception):
    """Commands print ``str(error)`` and exit with code 1; modules raise subclasses."""

    def __str__(self) -> str:
        return printable(super().__str__())


class BrokenEnvError(UserError):
    """An env failed during a run; the last complete iteration is worth saving."""


def refused_path(error: BaseException) -> str:
    """One line if the system refused to read or write a file or folder; an empty text if not."""
    if not isinstance(error, OSError) or error.filename is None:
        return ""
    fact = f"{shorten(str(error.filename), 300)}: {error.strerror}"
    if error.errno in _FULL:
        return printable(f"{fact}; free some space, or name a folder on another disk")
    if error.errno in _FORBIDDEN:
        return printable(f"{fact}; change its permissions, or name another file or folder")
    return ""


def printable(text: str) -> str:
    """Text of a file without control characters, which a terminal would obey."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text)


def shorten(text: str, length: int = 100) -> str:
    """The first ``length`` characters."""
    return text if len(text) <= length else f"{text[:length]}..."


def first_line(error: BaseException, n_lines: int = 1) -> str:
    """The start of a foreign error message, in one line; its type if the message is empty.

    Use ``n_lines=2`` for libraries that put the reason on the second line.
    """
    return "; ".join(_lines(error)[:n_lines]).replace(":; ", ": ")


def last_line(error: BaseException) -> str:
    """The last line of an error message that contains a traceback, as in ``WorkerError``."""
    return _lines(error)[-1]


def one_line(error: BaseException) -> str:
    """The whole message in one line, without the frames of a traceback in it."""
    lines, is_frame = [], False
    for line in str(error).splitlines():
        is_frame = line.startswith("Traceback (") or (is_frame and line[:1] in ("", " "))
        if line.strip() and not is_frame:
            lines.append(line.strip())
    return "; ".join(lines or [type(error).__name__]).replace(":; ", ": ")


def _lines(error: BaseException) -> list[str]:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines or [type(error).__name__]


def type_and_line(error: BaseException) -> str:
    """The class of an error and the first line of its message, or where it was raised."""
    name = type(error).__name__
    return f"{name}: {first_line(error)}" if str(error).strip() else f"{name}{place_of(error)}"


def place_of(error: BaseException) -> str:
    """The innermost line of code that no installed package or Python has, or an empty text."""
    return place_of_frames(traceback.extract_tb(error.__traceback__)) or _place_of_class(error)


def place_of_frames(frames: Sequence[traceback.FrameSummary]) -> str:
    """``place_of`` for the frames of a stack, the innermost one last."""
    for frame in reversed(frames):
        path = Path(frame.filename)
        is_library = "site-packages" in path.parts or path.is_relative_to(_STANDARD_LIBRARY)
        if not is_library and not path.is_relative_to(_PACKAGE):
            return f" ({path.name}:{frame.lineno} in {frame.name})"
    return ""


def _place_of_class(error: BaseException) -> str:
    """The class that does not write a method of its base class, which raised the error."""
    if not isinstance(error, NotImplementedError) or error.__traceback__ is None:
        return ""
    frame, _ = deque(traceback.walk_tb(error.__traceback__), maxlen=1)[0]
    owner = type(frame.f_locals.get("self"))
    method = frame.f_code.co_name
    try:
        file, line = inspect.getsourcefile(owner), inspect.getsourcelines(owner)[1]
    except (OSError, TypeError):  # a builtin, or a class without a source
        return ""
    lacks = "" if str(error).strip() else f" has no method {method}"
    return f" ({Path(str(file)).name}:{line}: {owner.__name__}{lacks})"

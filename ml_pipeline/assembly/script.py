"""main: the whole program of a train_*.py script; exit_code: that of every command.

This imports only the standard library and small modules before ``exit_code`` runs, so a package
that is not installed is reported in one line. Spawned workers import it with the script, so torch
stays out of them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from ml_pipeline.errors import UserError, refused_path
from ml_pipeline.extras import CORE_PACKAGES, core_fix
from ml_pipeline.ranks.rendezvous import RankError, launched_rank

_CLOSED_PIPE = 141  # as shells show a program that SIGPIPE ended
_RANK_SECONDS = 10.0  # torchrun ends the other ranks sooner than this after the first has failed
_THREAD_SECONDS = 5.0  # how long a program that has ended waits for its threads


def main(agent: str | None = None, preset: str | None = None) -> int:
    """Train as the command line says and return the exit code.

    ``agent``: the option of agent= for a command line that does not choose one. ``preset``: the
    option of experiment= for one that does not choose an env.
    """
    return exit_code(lambda: _train(agent, preset))


def _train(agent: str | None, preset: str | None) -> None:
    from ml_pipeline.assembly.entry import check_words, train, with_agent
    from ml_pipeline.assembly.words import as_settings

    command_line = as_settings(sys.argv)
    check_words(command_line, agent)
    train(command_line if agent is None else with_agent(command_line, agent, preset))


def exit_code(command: Callable[[], object]) -> int:
    """Run ``command``; return 0, 1 after a ``UserError``, or the code of the stop signal.

    A missing package that ml_pipeline always needs also ends in one line and code 1, and so does a
    file or folder that this user may not read or write.

    If nobody reads the output any more, it ends quietly.

    The program ends soon after, even if an env has left a thread running.
    """
    code = 1
    try:
        code = _code_of(command)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
        raise
    finally:
        if any(not thread.daemon for thread in _other_threads()):
            threading.Thread(target=_end_despite_threads, args=(code,), daemon=True).start()
    return code


def _code_of(command: Callable[[], object]) -> int:
    try:
        try:
            command()
        finally:
            sys.stdout.flush()  # not at exit, where the interpreter would report a closed pipe
    except UserError as error:
        if launched_rank() > 0 and not isinstance(error, RankError):
            time.sleep(_RANK_SECONDS)  # rank 0 probably reports the same mistake
        print(error, file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name not in CORE_PACKAGES:
            raise
        print(
            f"{error.name} is not installed; {core_fix()}",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt as stop:
        return getattr(stop, "exit_code", 130)  # Interrupted knows its signal
    except BrokenPipeError:
        if not _is_output_closed():
            raise
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, stays open
        return _CLOSED_PIPE
    except OSError as error:
        line = refused_path(error)
        if not line:
            raise
        print(line, file=sys.stderr)
        return 1
    return 0


def _is_output_closed() -> bool:
    """Whether nobody reads the output any more, as after ``| head -1``."""
    try:
        print(flush=True)  # not only flush: what could not be written may be lost
    except BrokenPipeError:
        return True
    return False


def _other_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each is not threading.main_thread()]


def _end_despite_threads(code: int) -> None:
    """End the process once only threads are left, which Python would wait for without a limit."""
    threading.main_thread().join()
    deadline = time.monotonic() + _THREAD_SECONDS
    waited_for = [thread for thread in _other_threads() if not thread.daemon]
    for thread in waited_for:
        thread.join(max(0.0, deadline - time.monotonic()))
    left = [thread.name for thread in waited_for if thread.is_alive()]
    if not left:
        return
    try:
        print(
            f"threads={', '.join(left)}: still running {_THREAD_SECONDS:g} s after the end of the "
            "program, so it does not wait for them; end them in env.close(), or start them with "
            "daemon=True",
            file=sys.stderr,
        )
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)

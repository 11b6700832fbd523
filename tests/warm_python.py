"""Runs Python programs in forked copies of a process that has imported torch, which takes seconds.

As a script it is that process. It imports nothing of this package, so a program may use a copy of
the package with other code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class WarmPython:
    """``run`` runs a script, or ``-m`` a module, as the command python would; then close it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(
        self, *command: str | Path, cwd: Path, environments: Sequence[Mapping[str, str]] = ({},)
    ) -> tuple[list[int], str]:
        """One process per environment, all at once; returns their exit codes and their output."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.NamedTemporaryFile("r") as output:
            request = {
                "command": [str(word) for word in command],
                "cwd": str(cwd),
                "output": output.name,
                "environments": [{**os.environ, **each} for each in environments],
            }
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline()), output.read()

    def close(self) -> None:
        self._process.communicate()


def _run(request: dict[str, Any], environment: dict[str, str]) -> int:
    """Become the program; returns its exit code."""
    import runpy

    file = os.open(request["output"], os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(environment)
    first, *rest = request["command"]
    place = request["cwd"] if first == "-m" else str(Path(first).parent)
    sys.path[:0] = [place, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    try:
        if first == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [first, *rest]
            runpy.run_path(first, run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _fork(request: dict[str, Any], environment: dict[str, str]) -> int:
    pid = os.fork()
    if pid == 0:
        code = _run(request, environment)
        threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter does at its end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return pid


def main() -> None:
    import gymnasium  # noqa: F401
    import hydra  # noqa: F401
    import torch  # noqa: F401

    del sys.path[0]  # the folder of this script
    for line in sys.stdin:
        request = json.loads(line)
        pids = [_fork(request, each) for each in request["environments"]]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main()

"""main: the whole program of a train_*.py script.

It imports only the standard library before ``exit_code`` runs, so a package that is not installed
is reported in one line. Spawned workers import it with the script, so torch stays out of them.
"""

from __future__ import annotations

import sys

from ml_pipeline.assembly.exits import exit_code


def main(agent: str | None = None, preset: str | None = None) -> int:
    """Train as the command line says and return the exit code.

    ``agent``: the option of agent= for a command line that does not choose one. ``preset``: the
    option of experiment= for one that does not choose an env.
    """
    return exit_code(lambda: _train(agent, preset))


def _train(agent: str | None, preset: str | None) -> None:
    from ml_pipeline.assembly.entry import train, with_agent

    train(sys.argv if agent is None else with_agent(sys.argv, agent, preset))

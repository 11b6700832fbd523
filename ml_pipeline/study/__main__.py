"""``python -m ml_pipeline.study NAME FIRST PARENT``: a worker of a study; ``start`` calls it.

Spawned workers of its envs import this module again. So torch is imported inside functions.
"""

from __future__ import annotations

import sys

from ml_pipeline.assembly.script import exit_code


def _work() -> None:
    from ml_pipeline.study.trials import work

    name, first, parent = sys.argv[1:]
    work(name, first=int(first), parent=int(parent))


if __name__ == "__main__":
    sys.exit(exit_code(_work))

"""Print the lowest version of each core dependency that pyproject.toml allows, for pip.

pip install -e . $(python tests/lowest.py)
"""

from __future__ import annotations

import re
from pathlib import Path


def lowest_versions(pyproject: str) -> list[str]:
    """["torch==2.6", ...] of the text of pyproject.toml. Python 3.10 has no tomllib."""
    core = pyproject.partition("\ndependencies = [\n")[2].partition("\n]\n")[0]
    return [f"{name}=={version}" for name, version in re.findall(r'"([\w-]+)>=([\d.]+)', core)]


if __name__ == "__main__":
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    print(*lowest_versions(text))

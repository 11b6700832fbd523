"""World: the ranks that train together. There is one rank until several machines are supported."""

from __future__ import annotations

from typing import NamedTuple


class World(NamedTuple):
    """This process among its peers; the default is a process on its own."""

    rank: int = 0
    size: int = 1

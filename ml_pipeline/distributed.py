"""World: the ranks that train together. There is one rank until several machines are supported."""

from __future__ import annotations

from typing import NamedTuple


class World(NamedTuple):
    """The rank of this process and the number of ranks; the default is a single process."""

    rank: int = 0
    size: int = 1

"""Which seed belongs to whom: every owner of randomness draws from a stream of its own.

Training env i is seeded ``seed + i``, so that a run with few envs replays the first envs of a
run with many. The other streams lie far away from these and from each other.
"""

from __future__ import annotations

import hashlib

_MAX_SEED = 2**31 - 1  # the range that NumPy, torch and Gymnasium all accept


def first_env_seed(seed: int, *, env_steps: int = 0) -> int:
    """Seed of the first training env; a run resumed at ``env_steps`` must not replay its start."""
    return seed if env_steps == 0 else stream_seed(seed, f"envs resumed at {env_steps}")


def stream_seed(seed: int, owner: str) -> int:
    """A seed for ``owner`` (any name): fixed by ``seed``, unrelated between owners."""
    digest = hashlib.sha256(f"{seed}/{owner}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % _MAX_SEED

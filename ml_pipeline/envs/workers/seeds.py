"""EnvSeeds: the seed of each env of a vector env, through resets, restarts and resizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Seeds = list[int | None]


class EnvSeeds:
    """Env i gets ``seed + i``; its first reset uses that seed, unless the reset has its own."""

    def __init__(self, seed: int | None, n_envs: int) -> None:
        self._of_env_0 = None if seed is None else int(seed)
        self.last = spread_seed(seed, n_envs)  # the last seed of each env
        self._unused = list(self.last)

    def for_reset(self, seed: int | Sequence[int | None] | None, mask: Sequence[bool]) -> Seeds:
        """The seeds that a reset must use; None for envs outside ``mask``."""
        seeds = self._unused if seed is None else spread_seed(seed, len(self.last))
        return [each if chosen else None for each, chosen in zip(seeds, mask, strict=True)]

    def mark_used(
        self, seed: int | Sequence[int | None] | None, seeds: Seeds, mask: Sequence[bool]
    ) -> None:
        """Record that the envs were reset with ``seeds``, returned by ``for_reset(seed, mask)``."""
        if isinstance(seed, (int, np.integer)) and all(mask):
            self._of_env_0 = int(seed)
        for index, new in enumerate(seeds):
            self.last[index] = self.last[index] if new is None else new
            self._unused[index] = None if mask[index] else self._unused[index]

    def discard_unused(self) -> None:
        """Let the next reset continue the envs' own generators."""
        self._unused = [None] * len(self._unused)

    def resize(self, n_envs: int) -> None:
        first = self._of_env_0
        new = range(len(self.last), n_envs)
        self.last = self.last[:n_envs] + [None if first is None else first + i for i in new]
        self._unused = self._unused[:n_envs] + [None for _ in new]

    def after_restart(self, rows: Sequence[int], n_restarts: int) -> Seeds:
        """New seeds, derived from the old ones: an old seed might repeat the crash."""
        return [_restart_seed(self.last[row], n_restarts) for row in rows]


def spread_seed(seed: int | Sequence[int | None] | None, n_envs: int) -> Seeds:
    if seed is None:
        return [None] * n_envs
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + i for i in range(n_envs)]
    if len(seed) != n_envs:
        raise ValueError(f"{len(seed)} seeds given for {n_envs} envs")
    return [None if each is None else int(each) for each in seed]


def _restart_seed(seed: int | None, n_restarts: int) -> int | None:
    if seed is None:
        return None
    return int(np.random.SeedSequence([seed, n_restarts]).generate_state(1)[0])

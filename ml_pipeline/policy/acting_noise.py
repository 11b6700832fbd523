"""ActingNoise: the noise of sampled actions outside of rollouts, step by step."""

from __future__ import annotations

import torch
from torch import Tensor

from ml_pipeline.policy.distributions import Distribution
from ml_pipeline.records import StateDict


class ActingNoise:
    """Draws new noise when a rollout of ``n_steps`` would: gSDE keeps its noise for several steps.

    A step for another number of envs starts a new rollout.
    """

    def __init__(self, distribution: Distribution, *, n_steps: int, seed: int) -> None:
        self._distribution = distribution
        self._n_steps = n_steps
        self._generator = torch.Generator().manual_seed(seed)
        self._step = 0  # of the rollout
        self._noise: Tensor | None = None

    def next(self, n_envs: int) -> Tensor:
        """Noise for one step of all envs, on the CPU."""
        if self._noise is None or len(self._noise) != n_envs:
            self._step = 0
        row_of, t = self._distribution.noise_row, self._step
        if self._noise is None or t == 0 or row_of(t) != row_of(t - 1):
            self._noise = self._distribution.draw_noise(1, n_envs, self._generator)[0]
        self._step = (t + 1) % self._n_steps
        return self._noise

    def state_dict(self) -> StateDict:
        return {
            "act_generator": self._generator.get_state(),
            "act_step": self._step,
            "act_noise": self._noise,
        }

    def load_state_dict(self, state: StateDict) -> None:
        self._generator.set_state(state["act_generator"])
        # Older checkpoints hold the generator only.
        self._step, self._noise = state.get("act_step", 0), state.get("act_noise")

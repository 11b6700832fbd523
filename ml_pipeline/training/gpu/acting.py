"""GpuActing: actions from a GPU for envs in host memory, at one short wait per step.

Observations go through pinned memory, so that the copy there, the policy, the draw and the copy
back are queued at once, and captured as one graph where graphs are wanted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.agents.ppo import PPOAgent
from ml_pipeline.protocols import PolicyInput
from ml_pipeline.training.gpu.programs import Programs


class GpuActing:
    """Acts in ``n_envs`` envs, always the same ones: a policy's memory is kept here."""

    def __init__(self, agent: PPOAgent, n_envs: int, programs: Programs) -> None:
        reader, distribution = agent.reader, agent.distribution
        self._agent = agent
        self.n_envs = n_envs
        # In host memory, and in the device's: leaves, mask and episode starts; then the actions.
        self._given = {
            name: _pinned((n_envs, *reader.shapes[name]), reader.dtypes[name])
            for name in reader.leaves
        }
        self._mask = self._start = None
        if agent.is_masked:
            self._mask = _pinned((n_envs, distribution.mask_size), np.bool_)
        self.state = agent.new_memory(n_envs)
        if self.state is not None:
            self._start = _pinned((n_envs,), np.bool_)
        noise_shape = distribution.noise_shape(1, n_envs)[1:]
        self._noise = torch.zeros(noise_shape, device=agent.device)
        shape = (n_envs, *distribution.action_shape)
        self._action = torch.zeros(shape, dtype=distribution.action_dtype, pin_memory=True)
        self._act = programs.captured(self._run, "acting")

    def begin(
        self,
        leaves: dict[str, NDArray[Any]],
        mask: NDArray[np.bool_] | None,
        state: Tensor | None,
        episode_start: NDArray[np.bool_],
        noise: Tensor,
    ) -> None:
        """Queue it all; the memory after the actions is in ``state``."""
        for name, leaf in leaves.items():
            self._given[name].numpy()[...] = leaf
        if self._mask is not None:
            self._mask.numpy()[...] = mask
        if self.state is not None and self._start is not None and state is not None:
            self._start.numpy()[...] = episode_start
            if state is not self.state:  # of a new run, or of one that is resumed
                self.state.copy_(state)
        self._noise.copy_(noise)
        self._act()

    def actions(self) -> NDArray[Any]:
        """Wait for them; as they are stored."""
        torch.cuda.current_stream(self._agent.device).synchronize()
        return self._action.numpy().copy()  # type: ignore[no-any-return]

    def _run(self) -> None:
        leaves = {name: self._sent(given) for name, given in self._given.items()}
        obs = leaves[""] if self._agent.reader.is_single else leaves
        inputs = PolicyInput(obs, self._sent(self._mask), self.state, self._sent(self._start))  # type: ignore[arg-type]
        sample = self._agent.sample_batch(inputs, self._noise)
        if self.state is not None and sample.state is not None:
            self.state.copy_(sample.state)
        self._action.copy_(sample.action, non_blocking=True)

    def _sent(self, given: Tensor | None) -> Tensor | None:
        return None if given is None else given.to(self._agent.device, non_blocking=True)


def _pinned(shape: tuple[int, ...], dtype: Any) -> Tensor:
    return torch.from_numpy(np.zeros(shape, dtype=dtype)).pin_memory()

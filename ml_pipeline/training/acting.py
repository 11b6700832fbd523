"""GpuActing: actions from a GPU for envs in host memory, with one short wait per step.

Observations pass through pinned memory. The copy to the GPU, the policy, the sampling and the
copy back are queued together. If graphs are enabled, they are captured as one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.policy.contracts import PolicyInput
from ml_pipeline.policy.masks import Mask
from ml_pipeline.training.contracts import Observer
from ml_pipeline.training.env_batch import Choose
from ml_pipeline.training.graphs import Programs


class GpuActing:
    """Acts in ``n_envs`` envs, always the same ones; it keeps their recurrent state."""

    def __init__(self, agent: Observer, n_envs: int, programs: Programs) -> None:
        reader, distribution = agent.reader, agent.distribution
        self._agent = agent
        self._programs = programs
        self._leaves = {
            name: _pinned((n_envs, *reader.shapes[name]), reader.dtypes[name])
            for name in reader.leaves
        }
        self._mask = self._start = None
        if agent.masks.are_used:
            self._mask = _pinned((n_envs, distribution.mask_size), np.bool_)
        self.memory = agent.new_memory(n_envs)
        if self.memory is not None:
            self._start = _pinned((n_envs,), np.bool_)
        self._noise: Tensor | None = None
        shape = (n_envs, *distribution.action_shape)
        self._action = torch.zeros(shape, dtype=distribution.action_dtype, pin_memory=True)
        self._act: dict[Choose, Callable[[], None]] = {}

    def actions(
        self,
        choose: Choose,
        leaves: dict[str, NDArray[Any]],
        mask: Mask | None,
        memory: Tensor | None,
        episode_start: NDArray[np.bool_],
        noise: Tensor,
    ) -> NDArray[Any]:
        """In the form that rollouts store; ``self.memory`` is the recurrent state after them."""
        for name, leaf in leaves.items():
            self._leaves[name].numpy()[...] = leaf
        if self._mask is not None:
            self._mask.numpy()[...] = mask
        if self.memory is not None and self._start is not None and memory is not None:
            self._start.numpy()[...] = episode_start
            if memory is not self.memory:  # of a new or a resumed run
                self.memory.copy_(memory)
        if self._noise is None:
            self._noise = torch.empty_like(noise, device=self._agent.device)
        self._noise.copy_(noise)
        if choose not in self._act:
            self._act[choose] = self._programs.captured(partial(self._run, choose), "acting")
        self._act[choose]()
        torch.cuda.current_stream(self._agent.device).synchronize()
        action: NDArray[Any] = self._action.numpy().copy()
        return action

    def _run(self, choose: Choose) -> None:
        device = self._agent.device
        leaves = {name: leaf.to(device, non_blocking=True) for name, leaf in self._leaves.items()}
        obs = leaves[""] if self._agent.reader.is_single else leaves
        inputs = PolicyInput(obs, self._sent(self._mask), self.memory, self._sent(self._start))
        if self._noise is None:
            raise RuntimeError("there is no noise yet; call actions")
        sample = choose(inputs, self._noise)
        if self.memory is not None and sample.memory is not None:
            self.memory.copy_(sample.memory)
        self._action.copy_(sample.action, non_blocking=True)

    def _sent(self, pinned: Tensor | None) -> Tensor | None:
        return None if pinned is None else pinned.to(self._agent.device, non_blocking=True)


def _pinned(shape: tuple[int, ...], dtype: Any) -> Tensor:
    return torch.from_numpy(np.zeros(shape, dtype=dtype)).pin_memory()

"""Windows: gathers windows of n steps from the tables of a replay buffer.

In host memory NumPy gathers rows several times as fast as torch. So the tables are arrays there and
tensors on a device; the code uses what both have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ml_pipeline.algorithms.replay.contracts import ReplayBatch
from ml_pipeline.algorithms.replay.final_observations import FinalObservations
from ml_pipeline.algorithms.replay.frame_stacks import FrameStacks
from ml_pipeline.policy.contracts import PolicyInput


class Windows:
    """A window ends after ``n_step`` steps, with its episode, or at the write head."""

    def __init__(
        self,
        tables: Mapping[str, Tensor],
        finals: FinalObservations,
        stacks: FrameStacks,
        *,
        is_single: bool,
        n_envs: int,
        n_step: int,
        gamma: float,
    ) -> None:
        """``is_single``: the observation is one leaf, not a dict of them."""
        device = tables["reward"].device
        self._on_host = device.type == "cpu"
        self._library: Any = np if self._on_host else torch
        self.tables = {name: self._native(table) for name, table in tables.items()}
        self._names = [name[4:] for name in tables if name.startswith("obs ")]
        self._finals = finals
        self._stacks = stacks
        self._is_single = is_single
        self._has_no_mask = "mask" not in tables
        self._n_envs = n_envs
        self._n_step = n_step
        self._size = len(tables["reward"])
        self._n_rows = self._size // n_envs
        powers = [gamma**k for k in range(n_step + 1)]
        self._powers = self._native(torch.tensor(powers, device=device))

    def batch(self, index: Any, weight: Any, newest: Any) -> ReplayBatch:
        """The windows that begin at ``index`` [B]; ``newest`` is the place of the newest row.

        The fields are tensors, or arrays if ``index`` is an array.
        """
        at = self._native(index)
        last, n_steps, reward = self._window(at, newest)
        successor = (last + self._n_envs) % self._size
        next_obs = self._leaves(successor)
        next_mask = None if self._has_no_mask else self.tables["mask"][successor]
        slot = self.tables["final"][last]
        has_final = slot >= 0
        # On a GPU, the question whether there are any would take longer than the work.
        if bool(has_final.any()) if self._on_host else len(self._finals) > 0:
            next_obs, next_mask = self._with_finals(next_obs, next_mask, slot, has_final)
        terminated = self.tables["terminated"][last]
        if next_mask is not None:
            # The mask of a terminated episode's last observation may allow nothing.
            next_mask = next_mask | terminated[:, None]
        discount = self._powers[n_steps] * ~terminated
        mask = None if self._has_no_mask else self.tables["mask"][at]
        batch = ReplayBatch(
            self._inputs(self._leaves(at), mask),
            self.tables["action"][at],
            reward,
            self._inputs(next_obs, next_mask),
            discount,
            weight,
        )
        return _as_tensors(batch) if at is not index else batch

    def _with_finals(self, obs: Any, mask: Any, slot: Any, has_final: Any) -> tuple[Any, Any]:
        """Put final observations and masks in the place of those of a reset."""
        slot, where = slot.clip(0), self._library.where
        for name, leaf in obs.items():
            final = self._native(self._finals.leaves[name])[slot]
            obs[name] = where(has_final.reshape(-1, *[1] * (leaf.ndim - 1)), final, leaf)
        if mask is not None and self._finals.mask is not None:
            mask = where(has_final[:, None], self._native(self._finals.mask)[slot], mask)
        return obs, mask

    def observed(self, index: Tensor) -> dict[str, Tensor]:
        """The observations of the rows at ``index``, [B, *shape] each."""
        return {name: _tensor(leaf) for name, leaf in self._leaves(self._native(index)).items()}

    def _leaves(self, index: Any) -> dict[str, Any]:
        rows = {False: index}
        if self._stacks.names:
            rows[True] = self._stacks.rows(index, self.tables["done"], self._n_envs)
        return {n: self._taken(f"obs {n}", rows[n in self._stacks.names]) for n in self._names}

    def _taken(self, name: str, index: Any) -> Any:
        table = self.tables[name]
        # For rows of several numbers, ``take`` is three times as fast as an index.
        return table.take(index, axis=0) if self._on_host else table[index]

    def ends(self, index: Tensor, newest: Any) -> tuple[Tensor, Tensor]:
        """The last transition of each window, and its length."""
        last, n_steps, _ = self._window(self._native(index), newest)
        return _tensor(last), _tensor(n_steps + 0 * last)

    def _window(self, index: Any, newest: Any) -> tuple[Any, Any, Any]:
        """The last transition, the length (1 or [B]) and the discounted sum of rewards."""
        reward, done = self.tables["reward"], self.tables["done"]
        library = self._library
        last, total = index, reward[index]
        if self._n_step == 1:
            return last, 1, total
        steps = library.ones_like(index)
        left = (newest - index // self._n_envs) % self._n_rows  # rows before the write head
        is_open = ~done[index]
        for k in range(1, self._n_step):
            is_open = is_open & (left >= k)
            step = (index + k * self._n_envs) % self._size
            last = library.where(is_open, step, last)
            total = total + is_open * (self._powers[k] * reward[step])
            steps = steps + is_open
            is_open = is_open & ~done[step]
        return last, steps, total

    def _inputs(self, leaves: dict[str, Any], mask: Any) -> PolicyInput:
        return PolicyInput(leaves[""] if self._is_single else leaves, mask, None, None)

    def _native(self, values: Any) -> Any:
        return values.numpy() if self._on_host and isinstance(values, Tensor) else values


def _as_tensors(batch: ReplayBatch) -> ReplayBatch:
    inputs, action, reward, next_inputs, discount, weight = batch
    inputs, next_inputs = (each.mapped(_tensor, None) for each in (inputs, next_inputs))
    return ReplayBatch(
        inputs, _tensor(action), _tensor(reward), next_inputs, _tensor(discount), weight
    )


def _tensor(native: Any) -> Tensor:
    return native if isinstance(native, Tensor) else torch.from_numpy(native)

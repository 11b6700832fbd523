"""ReplayBuffer: the last transitions of all envs, in a ring of rows, [n_rows, n_envs].

Row t holds the observation before step t and what the step returned. The next observation is that
of row t + 1, so each is stored once. Only a truncated episode needs its final observation as
well: the next row begins with that of the reset. The row at the write head holds the current
observation, so a window of n steps may end there and still bootstrap from the true successor.
Stacked frames are stored once each; see ``FrameStacks``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.agents.distributions import Distribution
from ml_pipeline.agents.masks import Mask
from ml_pipeline.agents.observations import ObservationReader
from ml_pipeline.protocols import Obs, PolicyInput, ReplayBatch, StateDict
from ml_pipeline.training.final_observations import FinalObservation, FinalObservations
from ml_pipeline.training.frame_stacks import FrameStacks
from ml_pipeline.training.sum_tree import SumTree


class ReplayBuffer:
    """Transitions of ``n_envs`` envs; observations are stored as the env returns them."""

    def __init__(
        self,
        capacity: int,
        n_envs: int,
        reader: ObservationReader,
        distribution: Distribution,
        *,
        n_step: int,
        gamma: float,
        device: torch.device,
        has_masks: bool = False,
        priority_exponent: float = 0.0,
        stacked_frames: int = 1,
    ) -> None:
        """``capacity`` is that of all envs together."""
        self.n_envs = n_envs
        self.capacity_rows = max(capacity // n_envs, 1)  # those that are drawn
        # One more for the current observation, and those that complete the oldest stack.
        self.n_rows = self.capacity_rows + stacked_frames
        self.stacks = FrameStacks(stacked_frames, reader.shapes)
        self.n_step = n_step
        self.gamma = gamma
        self.device = device
        self.n_written = 0  # rows since the start of the run
        self.first = 0  # no row before this one can be drawn
        self._reader = reader
        self._exponent = priority_exponent
        mask_size = distribution.mask_size if has_masks else 0

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        n = self.n_rows * n_envs
        dtypes = {name: _torch_dtype(dtype) for name, dtype in reader.dtypes.items()}
        self.obs = {
            name: zeros(n, *self.stacks.stored_shape(name, shape), dtype=dtypes[name])
            for name, shape in reader.shapes.items()
        }
        self.mask = zeros(n, mask_size, dtype=torch.bool) if mask_size else None
        self.action = zeros(n, *distribution.action_shape, dtype=distribution.action_dtype)
        self.reward = zeros(n)
        self.terminated = zeros(n, dtype=torch.bool)
        self.done = ~zeros(n, dtype=torch.bool)  # no episode reaches back beyond the first row
        self.final_of = torch.full((n,), -1, dtype=torch.int64, device=device)
        self.finals = FinalObservations(
            {name: zeros(0, *shape, dtype=dtypes[name]) for name, shape in reader.shapes.items()},
            None if self.mask is None else self.mask[:0].clone(),
        )
        self.tree = SumTree(n, device) if priority_exponent > 0 else None
        # Files that hold the transitions: written by runs.replay_files, named in the checkpoint.
        self.segments: list[dict[str, Any]] = []
        self.n_saved = 0  # rows that are in these files
        self._top = zeros() + 1.0  # the largest priority so far, which new transitions get
        self._is_reset = True  # the next ``begin`` starts episodes

    def __len__(self) -> int:
        """Transitions that can be drawn."""
        return (self.n_written - self.first_drawn) * self.n_envs

    @property
    def first_drawn(self) -> int:
        """The first row that can be drawn, counted from the start of the run."""
        return max(self.n_written - self.capacity_rows, self.first)

    @property
    def oldest(self) -> int:
        """The first row that is still needed, counted from the start of the run."""
        return max(self.first_drawn - (self.stacks.n_frames - 1), 0)

    @property
    def row_bytes(self) -> int:
        """What a row holds, without final observations and priorities."""
        return sum(table.nbytes for _, table, _ in self._tables()) // self.n_rows

    @property
    def n_bytes(self) -> int:
        """Memory of the buffer."""
        finals = sum(kept.nbytes for _, _, kept in self._tables() if kept is not None)
        tree = 0 if self.tree is None else self.tree.n_bytes
        return self.n_rows * self.row_bytes + self.final_of.nbytes + finals + tree

    def begin(self, leaves: Mapping[str, NDArray[Any]], mask: Mask | None) -> None:
        """Store the current observations of all envs: after ``end_episodes`` and a resume."""
        self._observe(leaves, mask, np.ones(self.n_envs, bool) if self._is_reset else None)
        self._is_reset = False

    def _observe(
        self, leaves: Mapping[str, NDArray[Any]], mask: Mask | None, start: NDArray[Any] | None
    ) -> None:
        self.stacks.check(leaves, start)
        place = self._place(self.n_written)
        for name, leaf in leaves.items():
            self._put(self.obs[name], place, self.stacks.newest(name, leaf))
        if self.mask is not None and mask is not None:
            self._put(self.mask, place, mask)

    def end_episodes(self) -> None:
        """The envs start new episodes: the current observations are final ones."""
        self._is_reset = True
        self.n_saved = min(self.n_saved, max(self.n_written - 1, 0))  # that row changes
        if not self.n_written:
            return
        newest, head = self._place(self.n_written - 1), self._place(self.n_written)
        index = torch.arange(head.start, head.stop, device=self.device)
        current = {name: leaf.cpu().numpy() for name, leaf in self._leaves(index).items()}
        for env in torch.nonzero(~self.done[newest]).flatten().tolist():
            leaves = {name: leaf[env] for name, leaf in current.items()}
            mask = None if self.mask is None else self.mask[head.start + env].cpu().numpy()
            slot = self.finals.keep(FinalObservation(env, leaves, mask))
            self.final_of[newest.start + env] = slot
        self.done[newest] = True

    def forget_newest(self) -> None:
        """Drop the newest row, whose successor is not known; its observations are current."""
        if not self.n_written:
            return
        self.first = self.first_drawn  # the row before it has been overwritten
        self.n_written -= 1
        self._set_priority(self.n_written, self.n_written + 1, 0.0 * self._top)

    def forget_before(self, row: int) -> None:
        """Draw no transition that needs a row before this one."""
        first_drawn = self.first_drawn
        self.first = row + self.stacks.n_frames - 1 if row else 0
        self._set_priority(first_drawn, self.first, 0.0 * self._top)

    def write(
        self,
        action: Tensor,
        reward: NDArray[Any],
        terminated: NDArray[Any],
        truncated: NDArray[Any],
        leaves: Mapping[str, NDArray[Any]],
        mask: Mask | None,
        finals: Sequence[FinalObservation],
    ) -> None:
        """Complete the current row, and store the observations that follow it.

        ``finals``: one for each episode that was truncated and not terminated.
        """
        place = self._place(self.n_written)
        self._release(place)
        self.action[place] = action
        self._put(self.reward, place, reward)
        self._put(self.terminated, place, terminated)
        done = terminated | truncated
        self._put(self.done, place, done)
        for final in finals:
            self.final_of[place.start + final.env] = self.finals.keep(final)
        self.n_written += 1
        row, left = self.n_written - 1, self.n_written - 1 - self.capacity_rows
        self._set_priority(row, row + 1, self._top)
        self._set_priority(left, left + 1, 0.0 * self._top)
        self._observe(leaves, mask, done)

    def _set_priority(self, first: int, last: int, priority: Tensor) -> None:
        """Give the rows from ``first`` to ``last`` one priority."""
        if self.tree is not None and first < last:
            number = torch.arange(first * self.n_envs, last * self.n_envs, device=self.device)
            self.tree.set(number % len(self.done), priority.expand(len(number)))

    def _put(self, table: Tensor, place: slice, values: NDArray[Any]) -> None:
        if self.device.type == "cpu":
            table.numpy()[place] = values  # several times as fast for a few numbers
        else:
            table[place] = torch.from_numpy(values).to(self.device, table.dtype)

    def _place(self, row: int) -> slice:
        start = (row % self.n_rows) * self.n_envs
        return slice(start, start + self.n_envs)

    def _release(self, place: slice) -> None:
        """Free the final observations of a row that is overwritten."""
        if self.n_written >= self.n_rows:
            held = self.final_of[place]
            self.finals.release(held[held >= 0].tolist())
        self.final_of[place] = -1

    def sample(self, uniform: Tensor, *, beta: float = 1.0) -> tuple[ReplayBatch, Tensor]:
        """Transitions for uniform numbers [B] in [0, 1), and their indices for ``prioritise``."""
        n_valid = len(self)
        if self.tree is not None:
            index = self.tree.draw(uniform)
            share = self.tree.priorities[index] / self.tree.total
            weight = (n_valid * share).pow(-beta)
            weight = (weight / weight.max()).float()
        else:
            number = (uniform.double() * n_valid).long().clamp_(max=n_valid - 1)
            index = (number + self.first_drawn * self.n_envs) % len(self.done)
            weight = torch.ones_like(uniform)
        return self.batch(index, weight), index

    def batch(self, index: Tensor, weight: Tensor) -> ReplayBatch:
        """The windows of n steps that begin at ``index``."""
        last, steps, reward = self.window(index)
        successor = (last + self.n_envs) % len(self.done)
        slot = self.final_of[last]
        next_obs = self._leaves(successor)
        next_mask = None if self.mask is None else self.mask[successor]
        has_final = slot >= 0
        # On a GPU, the question whether there are any would take longer than the work.
        on_cpu = self.device.type == "cpu"
        if bool(has_final.any()) if on_cpu else len(self.finals) > 0:
            at = slot.clamp(min=0)
            for name, leaf in next_obs.items():
                shape = (-1, *[1] * (leaf.ndim - 1))
                final = self.finals.leaves[name].index_select(0, at)
                next_obs[name] = torch.where(has_final.view(shape), final, leaf)
            if next_mask is not None and self.finals.mask is not None:
                next_mask = torch.where(has_final[:, None], self.finals.mask[at], next_mask)
        if next_mask is not None:
            # The mask of a terminated episode's last observation may allow nothing.
            next_mask = next_mask | self.terminated[last][:, None]
        discount = self.gamma**steps * (~self.terminated[last]).float()
        mask = None if self.mask is None else self.mask[index]
        return ReplayBatch(
            PolicyInput(self._obs(self._leaves(index)), mask, None, None),
            self.action[index],
            reward,
            PolicyInput(self._obs(next_obs), next_mask, None, None),
            discount,
            weight,
        )

    def _leaves(self, index: Tensor) -> dict[str, Tensor]:
        """The observations of the rows at ``index``, [B, *shape] each."""
        leaves = {}
        if self.stacks.names:
            frames = self.stacks.rows(index, self.done, self.n_envs)
        for name, table in self.obs.items():
            if name in self.stacks.names:
                leaf = table.index_select(0, frames.flatten())
                leaves[name] = leaf.view(*frames.shape, *table.shape[1:])
            else:
                leaves[name] = table.index_select(0, index)
        return leaves

    def window(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The last transition of each window, its length, and the discounted sum of rewards."""
        if self.n_step == 1:
            return index, torch.ones_like(index), self.reward[index]
        size = len(self.done)
        newest = self._place(self.n_written - 1).start // self.n_envs
        left = (newest - index // self.n_envs) % self.n_rows  # rows before the write head
        last, reward = index, self.reward[index]
        steps = torch.ones_like(index)
        is_open = ~self.done[index]
        for k in range(1, self.n_step):
            is_open = is_open & (left >= k)
            step = (index + k * self.n_envs) % size
            last = torch.where(is_open, step, last)
            reward = reward + torch.where(is_open, self.gamma**k * self.reward[step], 0.0)
            steps = steps + is_open
            is_open = is_open & ~self.done[step]
        return last, steps, reward

    def _obs(self, leaves: dict[str, Tensor]) -> Obs:
        return leaves[""] if self._reader.is_single else leaves

    def prioritise(self, index: Tensor, error: Tensor) -> None:
        """Set priorities by the absolute TD error, [B]; without prioritised replay does nothing."""
        if self.tree is None:
            return
        priority = (error.abs() + 1e-6).pow(self._exponent)
        # The same transition may be drawn twice; its errors are equal, so any of them will do.
        self.tree.set(index, priority)
        self._top = torch.maximum(self._top, priority.max())

    def rows(self, first: int, last: int) -> dict[str, Any]:
        """The rows from ``first`` to ``last``, counted from the start of the run, on the CPU."""
        spans = self._spans(first, last)
        slot = torch.cat([self.final_of[span] for span in spans])
        has_final = torch.nonzero(slot >= 0).flatten()
        rows: dict[str, Any] = {"final_at": has_final}
        for name, table, finals in self._tables():
            rows[name] = torch.cat([table[span] for span in spans])
            if finals is not None:
                rows[f"final {name}"] = finals[slot[has_final]]
        return {name: values.cpu() for name, values in rows.items()}

    def load_rows(self, first: int, last: int, rows: Mapping[str, Tensor]) -> None:
        """Put rows back; those that are no longer in the ring are ignored."""
        self._check_rows(rows, last - first)
        skipped = max(self.oldest - first, 0) * self.n_envs
        read = skipped
        for span in self._spans(max(first, self.oldest), last):
            part = slice(read, read + span.stop - span.start)
            for name, table, _ in self._tables():
                table[span] = rows[name][part].to(self.device)
            self.final_of[span] = -1
            read = part.stop
        finals = {name for name, _, kept in self._tables() if kept is not None}
        for number, at in enumerate(rows["final_at"].tolist()):
            if at < skipped:
                continue
            one = {name: rows[f"final {name}"][number].numpy() for name in finals}
            mask = one.pop("mask", None)
            leaves = {name.removeprefix("obs "): value for name, value in one.items()}
            place = (first * self.n_envs + at) % len(self.done)
            final = FinalObservation(place % self.n_envs, leaves, mask)
            self.final_of[place] = self.finals.keep(final)

    def _spans(self, first: int, last: int) -> list[slice]:
        """The rows from ``first`` to ``last`` as slices: two if they pass the end of the ring."""
        start, size = self._place(first).start, len(self.done)
        stop = start + max(last - first, 0) * self.n_envs
        return [slice(start, min(stop, size)), slice(0, max(stop - size, 0))]

    def _check_rows(self, rows: Mapping[str, Tensor], n_rows: int) -> None:
        if len(rows["reward"]) != n_rows * self.n_envs:
            n_envs = len(rows["reward"]) // n_rows
            raise ValueError(f"n_envs={self.n_envs}: the replay files have {n_envs} envs")
        for name, table, _ in self._tables():
            if name not in rows or rows[name].shape[1:] != table.shape[1:]:
                key = f"agent.stacked_frames={self.stacks.n_frames}"
                raise ValueError(f"{key}: {name!r} has another shape in the replay files")

    def _tables(self) -> list[tuple[str, Tensor, Tensor | None]]:
        """Every table by name, and the table of its final values if it has one."""
        tables: list[tuple[str, Tensor, Tensor | None]] = [
            (f"obs {name}", leaf, self.finals.leaves[name]) for name, leaf in self.obs.items()
        ]
        if self.mask is not None:
            tables.append(("mask", self.mask, self.finals.mask))
        for name in ("action", "reward", "terminated", "done"):
            tables.append((name, getattr(self, name), None))
        return tables

    def state_dict(self) -> StateDict:
        """The counters and priorities; ``runs.replay_files`` saves the transitions."""
        return {
            "n_written": self.n_written,
            "first": self.first,
            "segments": [dict(segment) for segment in self.segments],
            "n_saved": self.n_saved,
            "priorities": None if self.tree is None else self.tree.priorities.float(),
            "top_priority": self._top,
        }

    def load_state_dict(self, state: StateDict) -> None:
        self.n_written = state["n_written"]
        self.first = state.get("first", 0)
        self.segments = [dict(segment) for segment in state["segments"]]
        self.n_saved = state["n_saved"]
        self._top = state["top_priority"].to(self.device)
        self._is_reset = False  # the saved episodes continue, unless ``end_episodes`` is called
        priorities = state["priorities"]
        if self.tree is not None and priorities is not None and len(priorities) == len(self.done):
            self.tree.load(priorities)
        else:  # agent.priority_exponent was 0, or agent.buffer_size has changed
            self._set_priority(self.first_drawn, self.n_written, self._top)


def _torch_dtype(dtype: Any) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, dtype)).dtype

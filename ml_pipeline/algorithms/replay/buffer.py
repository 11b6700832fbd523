"""ReplayBuffer: the last transitions of all envs, in a ring of rows, [n_rows, n_envs].

Row t holds the observation before step t and what the step returned. The next observation is that
of row t + 1, so each is stored once. Only a truncated episode needs its final observation as
well: the next row begins with that of the reset. The row at the write head holds the current
observation, so a window of n steps may end there and still bootstrap from the true successor.
Stacked frames are stored once each; see ``FrameStacks``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from ml_pipeline.algorithms.replay.contracts import ReplayBatch
from ml_pipeline.algorithms.replay.device_rows import DeviceRows
from ml_pipeline.algorithms.replay.priorities import SumTree
from ml_pipeline.algorithms.replay.windows import FinalObservations, FrameStacks, Windows, by_table
from ml_pipeline.policy.distributions import Distribution
from ml_pipeline.policy.masks import Mask
from ml_pipeline.policy.observations import ObservationReader
from ml_pipeline.ranks.batches import BatchPart
from ml_pipeline.ranks.world import ALONE, World
from ml_pipeline.records import StateDict
from ml_pipeline.training.env_batch import ArrayOrTensor, EnvStep
from ml_pipeline.training.graphs import Programs


class Sampled(NamedTuple):
    """Transitions that were drawn."""

    batch: ReplayBatch
    index: ArrayOrTensor  # [B], for ``prioritise``
    part: BatchPart | None  # of several ranks: what this one has of the batch


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
        programs: Programs | None = None,
        on_device: bool = False,
        has_reset_rows: bool = False,
        world: World = ALONE,
    ) -> None:
        """``capacity`` is that of all envs together; ``on_device``: those of a tensor env.

        ``has_reset_rows``: some rows of an env only reset it, and are never drawn.

        Each rank stores its own ``n_envs``. Draws and priorities cover those of all.
        """
        self.n_envs = n_envs
        self.n_all_envs = world.all_envs(n_envs)
        self._batches = world.batches(n_envs)
        self.capacity_rows = max(capacity // self.n_all_envs, 1)  # those that are drawn
        # One more for the current observation, and those that complete the oldest stack.
        self.n_rows = self.capacity_rows + stacked_frames
        self.device = device
        self.n_written = 0  # rows since the start of the run
        self.first = 0  # no row before this one can be drawn
        self._exponent = priority_exponent
        self._has_reset_rows = has_reset_rows

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # What the envs show at each step: one row of these tables, and one final observation.
        shapes = by_table(reader.shapes, (distribution.mask_size,) if has_masks else None)
        dtypes = {name: _torch_dtype(dtype) for name, dtype in reader.dtypes.items()}
        dtypes = by_table(dtypes, torch.bool)
        self.stacks = FrameStacks(stacked_frames, by_table(reader.shapes, None))
        stacked = self.stacks.names
        n = self.size
        seen = {
            name: zeros(n, *(shape[1:] if name in stacked else shape), dtype=dtypes[name])
            for name, shape in shapes.items()
        }
        self.finals = FinalObservations(
            {name: zeros(0, *shape, dtype=dtypes[name]) for name, shape in shapes.items()},
            n,
            has_all_slots=on_device,
        )
        # What a step returns. No episode reaches back beyond the first row.
        outcome = {
            "action": zeros(n, *distribution.action_shape, dtype=distribution.action_dtype),
            "reward": zeros(n),
            "terminated": zeros(n, dtype=torch.bool),
            "done": ~zeros(n, dtype=torch.bool),
            "final": self.finals.slot_of,
        }
        self.tables = {**seen, **outcome}
        # Without prioritised replay, all that can be drawn have the priority 1.
        has_tree = priority_exponent > 0 or has_reset_rows
        self.tree = SumTree(world.all_envs(n), device) if has_tree else None
        # Files that hold the transitions: written by ``files``, named in the checkpoint.
        self.segments: list[dict[str, Any]] = []
        self.n_saved = 0  # rows that are in these files
        self._top = zeros() + 1.0  # the largest priority so far, which new transitions get
        programs = programs or Programs(device)
        self._device_rows: DeviceRows | None = None
        if device.type != "cpu" or on_device:
            self._device_rows = DeviceRows(
                outcome,
                seen,
                programs,
                n_envs=n_envs,
                n_all_envs=self.n_all_envs,
                n_drawn=self.capacity_rows,
            )
        self.windows = Windows(
            self.tables,
            self.finals,
            self.stacks,
            is_single=reader.is_single,
            n_envs=n_envs,
            n_step=n_step,
            gamma=gamma,
        )
        self._is_reset = True  # the next ``begin`` starts episodes
        self._sample = self._plain_sample
        if device.type == "cuda" and self._batches.can_be_compiled:

            def sample(uniform: ArrayOrTensor, beta: float | Tensor) -> Sampled:
                return self._plain_sample(uniform, beta)

            self._sample = programs.compiled(sample, "the batches of replay")

    def __len__(self) -> int:
        """Transitions that can be drawn, of all ranks."""
        return max(self.n_written - self.first_drawn, 0) * self.n_all_envs

    @property
    def is_prioritised(self) -> bool:
        return self._exponent > 0

    @property
    def first_drawn(self) -> int:
        """The first row that can be drawn, counted from the start of the run."""
        return max(self.n_written - self.capacity_rows, self.first)

    @property
    def oldest(self) -> int:
        """The first row that is still needed, counted from the start of the run."""
        return max(self.first_drawn - (self.stacks.n_frames - 1), 0)

    @property
    def size(self) -> int:
        """Transitions that the ring holds, of this rank, whether they can be drawn or not."""
        return self.n_rows * self.n_envs

    @property
    def row_bytes(self) -> int:
        """What a row holds, without final observations and priorities."""
        held = [table.nbytes for name, table in self.tables.items() if name != "final"]
        return sum(held) // self.n_rows

    @property
    def n_bytes(self) -> int:
        """Memory of the buffer."""
        finals = sum(table.nbytes for table in self.finals.tables.values())
        tree = 0 if self.tree is None else self.tree.n_bytes
        return self.n_rows * self.row_bytes + self.finals.slot_of.nbytes + finals + tree

    def begin(self, leaves: Mapping[str, ArrayOrTensor], mask: Mask | None) -> None:
        """Store the current observations of all envs: after ``end_episodes`` and a resume."""
        start = np.ones(self.n_envs, bool) if self._is_reset else None
        self._observe(by_table(leaves, mask), start)
        self._is_reset = False

    def _observe(self, seen: Mapping[str, ArrayOrTensor], start: NDArray[np.bool_] | None) -> None:
        self.stacks.check(seen, start)
        place, on_host = self.place(self.n_written), self.device.type == "cpu"
        for name, values in seen.items():
            newest, table = self.stacks.newest(name, values), self.windows.tables[name]
            table[place] = newest if on_host else torch.as_tensor(newest).to(table)

    def end_episodes(self) -> None:
        """The envs start new episodes: the current observations are final ones."""
        self._is_reset = True
        self.n_saved = min(self.n_saved, max(self.n_written - 1, 0))  # that row changes
        if not self.n_written:
            return
        newest, head = self.place(self.n_written - 1), self.place(self.n_written)
        seen = self.windows.observed(torch.arange(head.start, head.stop, device=self.device))
        done = self.tables["done"]
        for env in torch.nonzero(~done[newest]).flatten().tolist():
            values = {name: each[env] for name, each in seen.items()}
            self.finals.keep(newest.start + env, values)
        done[newest] = True

    def forget_newest(self) -> None:
        """Drop the newest row, whose successor is not known; its observations are current."""
        if not self.n_written:
            return
        self.first = min(self.first_drawn, self.n_written - 1)  # the row before is overwritten
        self.n_written -= 1
        self._tell_device()
        self._set_priority(self.n_written, self.n_written + 1, 0.0 * self._top)

    def clear(self) -> None:
        """Draw none of the transitions so far; the current episodes continue."""
        self._set_priority(self.first_drawn, self.n_written, 0.0 * self._top)
        self.first = self.n_written
        self._tell_device()

    def forget_before(self, row: int) -> None:
        """Draw no transition that needs a row before this one."""
        first_drawn = self.first_drawn
        self.first = row + self.stacks.n_frames - 1 if row else 0
        self._tell_device()
        self._set_priority(first_drawn, self.first, 0.0 * self._top)

    def current_row(self) -> dict[str, Tensor]:
        """A copy of the row at the write head, by table."""
        return {name: table[self.place(self.n_written)].clone() for name, table in self._rows()}

    def restore_row(self, row: Mapping[str, Tensor]) -> None:
        """Put back what ``current_row`` returned."""
        for name, table in self._rows():
            table[self.place(self.n_written)] = row[name]

    def _rows(self) -> list[tuple[str, Tensor]]:
        """The tables without the slots of final observations, which have an owner."""
        return [(name, table) for name, table in self.tables.items() if name != "final"]

    def cut_before(self, row: int) -> None:
        """Truncate the episodes before ``row``, of which only the observations are known.

        The rows before it came from other places, so they get the priority of new ones.
        """
        kept = self.n_written, self.n_saved, self._is_reset
        self.n_written = row
        self.end_episodes()
        self.n_written, self.n_saved, self._is_reset = kept
        self._set_priority(self.first_drawn, row, self._top)

    def write(self, action: ArrayOrTensor, step: EnvStep) -> None:
        """Complete the current row, and store the observations that follow it.

        Call ``count_row`` as well after a step of envs on the device: that is not captured.
        """
        done = step.terminated | step.truncated
        starts, is_transition = done, None  # where episodes begin after this step
        if step.is_reset is not None:
            starts, is_transition = step.is_reset, torch.from_numpy(~step.is_reset)
            done = done | step.is_reset
        row = {
            "action": action,
            "reward": step.reward,
            "terminated": step.terminated,
            "done": done,
        }
        seen = by_table(step.obs, step.mask)
        if step.final is not None:
            is_cut = step.truncated & ~step.terminated
            self._insert({**row, **seen}, is_cut, by_table(step.final.obs, step.final.mask))
            return
        place = self.place(self.n_written)
        row["final"] = self.finals.replace(place, step.finals)
        self.n_written += 1
        if self._device_rows is not None:
            self.stacks.check(seen, starts)
            newest = {name: self.stacks.newest(name, values) for name, values in seen.items()}
            self._device_rows.write({**row, **newest})
        else:
            for name, values in row.items():
                self.windows.tables[name][place] = values
            self._observe(seen, starts)
        if self.tree is not None:
            new, left = self.n_written - 1, self.n_written - 1 - self.capacity_rows
            top = self._top
            if is_transition is not None:
                top = top * is_transition.to(self.device)
            self._set_priority(max(new, self.first), new + 1, top)
            self._set_priority(left, left + 1, 0.0 * self._top)

    def _insert(
        self, row: dict[str, Tensor], is_cut: Tensor, final: dict[str, ArrayOrTensor]
    ) -> None:
        """``write`` without a wait for the device."""
        rows = self._on_device()
        here = rows.place()
        for name, values in final.items():
            self.finals.tables[name].index_copy_(0, here, values)
        rows.insert({**row, "final": torch.where(is_cut, here, -1)})
        if self.tree is not None:
            n_envs = self.n_all_envs  # every rank has the priorities of all
            self.tree.set(rows.places_of_all(before=1), self._top.expand(n_envs))
            leaving = rows.places_of_all(before=1 + self.capacity_rows)
            self.tree.set(leaving, torch.zeros(n_envs, device=self.device))

    def count_row(self) -> None:
        """Count the row that envs on the device have written."""
        self.n_written += 1

    @property
    def n_tables_moved(self) -> int:
        """Changes when tables are at a new address, which a captured graph must learn."""
        return len(self.finals)

    def _on_device(self) -> DeviceRows:
        if self._device_rows is None:
            raise RuntimeError("this buffer is written by the host; call write")
        return self._device_rows

    def _tell_device(self) -> None:
        if self._device_rows is not None:
            self._device_rows.count(self.n_written, self.first)

    def _set_priority(self, first: int, last: int, priority: Tensor) -> None:
        """Give the rows from ``first`` to ``last`` one priority."""
        if self.tree is not None and first < last:
            n_envs = self.n_all_envs
            number = torch.arange(first * n_envs, last * n_envs, device=self.device)
            self.tree.set(number % self.tree.n_leaves, priority.expand(len(number)))

    def place(self, row: int) -> slice:
        """Indices of a row, which is counted from the start of the run."""
        start = (row % self.n_rows) * self.n_envs
        return slice(start, start + self.n_envs)

    def sample(self, uniform: ArrayOrTensor, *, beta: float | Tensor = 1.0) -> Sampled:
        """Transitions for uniform numbers [B] in [0, 1).

        All are tensors, or arrays if ``uniform`` is an array, which is faster on the CPU.
        """
        return self._sample(uniform, beta)

    def _plain_sample(self, uniform: ArrayOrTensor, beta: float | Tensor) -> Sampled:
        index, weight = self.draw(uniform, beta=beta)
        part, own = self._batches.part(index)
        weight = weight if part is None else weight[part.rows]
        return Sampled(self.batch(own, weight), index, part)

    def draw(
        self, uniform: ArrayOrTensor, *, beta: float | Tensor = 1.0
    ) -> tuple[ArrayOrTensor, ArrayOrTensor]:
        """Indices [B] into the envs of all ranks, row by row, and the importance weights."""
        n_valid, first, _ = self._counts()
        index: ArrayOrTensor
        weight: ArrayOrTensor
        is_array = isinstance(uniform, np.ndarray)
        if self.tree is not None:
            index = self.tree.draw(torch.as_tensor(uniform))
            share = self.tree.priorities[index] / self.tree.total
            weight = (n_valid * share).pow(-beta)
            weight = (weight / weight.max()).float()
            if is_array:
                index, weight = index.numpy(), weight.numpy()
        else:
            # torch draws float32 numbers of 24 bits, so the integers are exact.
            number = uniform * 2**24
            number = number.astype(np.int64) if is_array else number.long()
            index = ((number * n_valid >> 24) + first) % (self.n_rows * self.n_all_envs)
            weight = np.ones_like(uniform) if is_array else torch.ones_like(uniform)
        return index, weight

    def _counts(self) -> Sequence[int | Tensor]:
        """Transitions that can be drawn, index of the first, newest row; tensors on a device."""
        if self.device.type != "cpu":
            n_valid, first, newest = self._on_device().counts
            return n_valid, first, newest
        first_row, newest_row = self.first_drawn % self.n_rows, (self.n_written - 1) % self.n_rows
        return len(self), first_row * self.n_all_envs, newest_row

    def batch(self, index: ArrayOrTensor, weight: ArrayOrTensor) -> ReplayBatch:
        """The windows of n steps that begin at ``index``."""
        return self.windows.batch(index, weight, self._counts()[2])

    def prioritise(self, index: ArrayOrTensor, error: ArrayOrTensor) -> None:
        """Set priorities by the absolute TD error, [B]; without prioritised replay does nothing."""
        if self.tree is None or not self.is_prioritised:
            return
        priority = (torch.as_tensor(error).abs() + 1e-6).pow(self._exponent)
        # The same transition may be drawn twice; its errors are equal, so any of them will do.
        self.tree.set(torch.as_tensor(index), priority)
        self._top.copy_(torch.maximum(self._top, priority.max()))

    def state_dict(self) -> StateDict:
        """The counters and priorities; ``files`` saves the transitions."""
        return {
            "n_envs": self.n_all_envs,
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
        if min(self.n_written, self.first, self.n_saved) < 0:
            raise ValueError("a counter of the replay is negative")
        self._top.copy_(state["top_priority"])
        self._tell_device()
        self._is_reset = False  # the saved episodes continue, unless ``end_episodes`` is called
        priorities = state["priorities"]
        tree = self.tree
        if tree is not None and priorities is not None and len(priorities) == tree.n_leaves:
            tree.load(priorities)
        elif self._has_reset_rows and self.n_written:
            raise ValueError("this env does not allow another agent.buffer_size")
        else:  # agent.priority_exponent was 0, or agent.buffer_size has changed
            self._set_priority(self.first_drawn, self.n_written, self._top)


def _torch_dtype(dtype: DTypeLike) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, dtype)).dtype

"""Windows: what a replay buffer returns of its rows: n-step returns, and true next observations.

Most next observations are those of the following row. ``FinalObservations`` holds those of
truncated episodes, and ``FrameStacks`` puts stacked frames together again.

In host memory NumPy gathers rows several times as fast as torch. So the tables are arrays there and
tensors on a device; the code uses what both have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ml_pipeline.algorithms.replay.contracts import ReplayBatch
from ml_pipeline.policy.contracts import PolicyInput
from ml_pipeline.training.checks import TrainingError
from ml_pipeline.training.env_batch import ArrayOrTensor, FinalObservation

_FIRST_SLOTS = 64  # or a 256th of the transitions; their number doubles when all are in use
_FIX = "agent.stacked_frames=1 stores whole observations"


def by_table(
    leaves: Mapping[str, ArrayOrTensor], mask: ArrayOrTensor | None
) -> dict[str, ArrayOrTensor]:
    """Observations and masks by the name of their table in a replay buffer."""
    named = {f"obs {name}": leaf for name, leaf in leaves.items()}
    return named if mask is None else {**named, "mask": mask}


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
        self._seen = list(finals.tables)  # the tables of what envs show: observations and masks
        self._finals = finals
        self._stacks = stacks
        self._is_single = is_single
        self._n_envs = n_envs
        self._n_step = n_step
        self._size = len(tables["reward"])
        self._n_rows = self._size // n_envs
        powers = [gamma**k for k in range(n_step + 1)]
        self._powers = self._native(torch.tensor(powers, device=device))

    def batch(
        self, index: ArrayOrTensor, weight: ArrayOrTensor, newest: int | Tensor
    ) -> ReplayBatch:
        """The windows that begin at ``index`` [B]; ``newest`` is the place of the newest row.

        The fields are tensors, or arrays if ``index`` is an array.
        """
        at = self._native(index)
        last, n_steps, reward = self._window(at, newest)
        terminated = self.tables["terminated"][last]
        following = self._observed((last + self._n_envs) % self._size)
        slot = self.tables["final"][last]
        has_final = slot >= 0
        # On a GPU, the question whether there are any would take longer than the work.
        if bool(has_final.any()) if self._on_host else len(self._finals) > 0:
            self._put_finals(following, slot, has_final)
        if "mask" in following:
            # The mask of a terminated episode's last observation may allow nothing.
            following["mask"] = following["mask"] | terminated[:, None]
        batch = ReplayBatch(
            self._inputs(self._observed(at)),
            self.tables["action"][at],
            reward,
            self._inputs(following),
            self._powers[n_steps] * ~terminated,
            weight,
        )
        return _as_tensors(batch) if at is not index else batch

    def _window(
        self, index: ArrayOrTensor, newest: int | Tensor
    ) -> tuple[ArrayOrTensor, ArrayOrTensor, ArrayOrTensor]:
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

    def ends(self, index: Tensor, newest: int | Tensor) -> tuple[Tensor, Tensor]:
        """The last transition of each window, and its length."""
        last, n_steps, _ = self._window(self._native(index), newest)
        return _tensor(last), _tensor(n_steps + 0 * last)

    def observed(self, index: Tensor) -> dict[str, Tensor]:
        """What the envs showed in the rows at ``index``, by table: [B, *shape] each."""
        seen = self._observed(self._native(index))
        return {name: _tensor(values) for name, values in seen.items()}

    def _observed(self, index: ArrayOrTensor) -> dict[str, ArrayOrTensor]:
        stacked = self._stacks.names
        frames = self._stacks.rows(index, self.tables["done"], self._n_envs) if stacked else index
        seen = {}
        for name in self._seen:
            table, rows = self.tables[name], frames if name in stacked else index
            # For rows of several numbers, ``take`` is three times as fast as an index.
            seen[name] = table.take(rows, axis=0) if self._on_host else table[rows]
        return seen

    def _put_finals(
        self, seen: dict[str, ArrayOrTensor], slot: ArrayOrTensor, has_final: ArrayOrTensor
    ) -> None:
        """Replace what a reset showed by the final observations and masks."""
        slot = slot.clip(0)
        for name, values in seen.items():
            final = self._native(self._finals.tables[name])[slot]
            is_final = has_final.reshape(-1, *[1] * (values.ndim - 1))
            seen[name] = self._library.where(is_final, final, values)

    def _inputs(self, seen: dict[str, ArrayOrTensor]) -> PolicyInput:
        mask = seen.pop("mask", None)
        if self._is_single:
            return PolicyInput(seen["obs "], mask, None, None)
        obs = {name.removeprefix("obs "): leaf for name, leaf in seen.items()}
        return PolicyInput(obs, mask, None, None)

    def _native(self, values: ArrayOrTensor) -> ArrayOrTensor:
        return values.numpy() if self._on_host and isinstance(values, Tensor) else values


def _as_tensors(batch: ReplayBatch) -> ReplayBatch:
    inputs, action, reward, next_inputs, discount, weight = batch
    inputs, next_inputs = (each.mapped(_tensor, None) for each in (inputs, next_inputs))
    return ReplayBatch(
        inputs, _tensor(action), _tensor(reward), next_inputs, _tensor(discount), weight
    )


def _tensor(native: ArrayOrTensor) -> Tensor:
    return native if isinstance(native, Tensor) else torch.from_numpy(native)


class FinalObservations:
    """The last observations of truncated episodes, in slots that are used again."""

    def __init__(
        self, tables: Mapping[str, Tensor], n_transitions: int, *, has_all_slots: bool
    ) -> None:
        """``tables`` are empty, with the shapes and dtypes of the observations and masks.

        ``has_all_slots``: each transition has its own slot, for envs on the device.
        """
        self.tables = dict(tables)  # [n_slots, ...] each, on the device of the replay buffer
        self._has_all_slots = has_all_slots
        self._slots = np.full(n_transitions, -1)
        host = torch.from_numpy(self._slots)  # on the CPU the same memory
        self.slot_of = host.to(next(iter(tables.values())).device)  # of a transition; -1: none
        self._free: list[int] = []
        if has_all_slots:
            self._grow(n_transitions)

    def __len__(self) -> int:
        """Slots in use or free."""
        return len(next(iter(self.tables.values())))

    def replace(self, place: slice, finals: Sequence[FinalObservation]) -> NDArray[np.int64]:
        """The finals of a new row; returns its part of ``slot_of``, which the caller writes."""
        self.release(place)
        for final in finals:
            values = by_table(final.leaves, final.mask)
            self._slots[place.start + final.env] = self._stored(values, self._free_slot())
        return self._slots[place]

    def keep(self, at: int, values: Mapping[str, ArrayOrTensor]) -> None:
        """Store the final observation of the transition ``at``, by table."""
        slot = self._stored(values, at if self._has_all_slots else self._free_slot())
        self._slots[at] = slot
        self.slot_of[at] = slot

    def release(self, place: slice) -> None:
        """Free the slots of transitions that are overwritten."""
        held = self._slots[place]
        if (used := held[held >= 0]).size:
            self._free += used.tolist()
            self._slots[place] = -1

    def _stored(self, values: Mapping[str, ArrayOrTensor], slot: int) -> int:
        for name, value in values.items():
            self.tables[name][slot] = torch.as_tensor(value).to(self.tables[name].device)
        return slot

    def _free_slot(self) -> int:
        if not self._free:
            before = len(self)
            self._grow(max(2 * before, _FIRST_SLOTS, len(self._slots) // 256))
            self._free = list(range(len(self) - 1, before - 1, -1))
        return self._free.pop()

    def _grow(self, size: int) -> None:
        for name, old in self.tables.items():
            new = torch.zeros(size, *old.shape[1:], dtype=old.dtype, device=old.device)
            new[: len(old)] = old
            self.tables[name] = new


class FrameStacks:
    """Which observations are stacks of ``n_frames``, and how a ring of rows stores them.

    A stack holds the newest frame and those of the steps before it, in its first dimension. Row t
    stores its newest frame only; the others are the newest frames of rows t - 1, t - 2 and so on.
    At the start of an episode a stack repeats its first frame, as ``FrameStackObservation`` does.
    """

    def __init__(self, n_frames: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """``shapes`` are those of the tables of observations; ``n_frames`` 1: none is a stack."""
        self.n_frames = n_frames
        self.names = {
            name
            for name, shape in shapes.items()
            if n_frames > 1 and len(shape) > 1 and shape[0] == n_frames
        }
        if n_frames > 1 and not self.names:
            found = ", ".join(str(list(shape)) for shape in shapes.values())
            raise TrainingError(
                f"agent.stacked_frames={n_frames}: no observation is a stack of {n_frames} frames, "
                f"the shapes are {found}; {_FIX}"
            )
        self._current: dict[str, NDArray[np.generic]] = {}

    def newest(self, name: str, values: ArrayOrTensor) -> ArrayOrTensor:
        """What a row stores of ``values``, [n_envs, *shape]."""
        return values[:, -1] if name in self.names else values

    def check(
        self, seen: Mapping[str, NDArray[np.generic]], start: NDArray[np.bool_] | None
    ) -> None:
        """Refuse stacks that could not be restored from their newest frames.

        ``start``: which envs begin an episode, [n_envs]; None if the rows before are not known.
        """
        for name in self.names:
            stack = seen[name]
            if start is not None:
                before = self._current.get(name, stack)
                expected = before[:, 1:]
                if start.any():
                    is_start = start.reshape(-1, *[1] * (stack.ndim - 1))
                    expected = np.where(is_start, stack[:, -1:], expected)
                if not np.array_equal(stack[:, :-1], expected):
                    differs = (stack[:, :-1] != expected).reshape(len(stack), -1).any(axis=1)
                    env = int(differs.argmax())
                    raise TrainingError(self._misfit(name, env, is_start=bool(start[env])))
            self._current[name] = stack.copy()  # a vector env may use its arrays again

    def _misfit(self, name: str, env: int, *, is_start: bool) -> str:
        leaf = name.removeprefix("obs ")
        which = f" {leaf!r}" if leaf else ""
        fact = (
            "does not repeat its first frame at the start of an episode"
            if is_start
            else "does not continue that of the step before"
        )
        return (
            f"agent.stacked_frames={self.n_frames}: the observation{which} of env {env} {fact}; "
            f"{_FIX}"
        )

    def rows(self, index: ArrayOrTensor, done: ArrayOrTensor, n_envs: int) -> ArrayOrTensor:
        """Indices of the frames in the stacks of ``index`` [B], oldest first: [B, n_frames].

        Arguments are arrays, or tensors of one device.
        """
        library: Any = torch if isinstance(index, Tensor) else np
        rows = [index]
        for _ in range(self.n_frames - 1):
            before = (rows[-1] - n_envs) % len(done)
            rows.append(library.where(done[before], rows[-1], before))
        return library.stack(rows[::-1], 1)

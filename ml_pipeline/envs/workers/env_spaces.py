"""EnvSpaces: the spaces of a vector env, made from those of its envs."""

from __future__ import annotations

from typing import Literal

from gymnasium import Space
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from ml_pipeline.envs.kinds import AnySpace
from ml_pipeline.envs.workers.errors import WorkerError

# "same": all envs have the same observation space. "different": bounds and numbers of choices may
# differ, shapes and dtypes may not. A pair: the batched and the single space, given by the user.
ObservationMode = Literal["same", "different"] | tuple[AnySpace, AnySpace]


class EnvSpaces:
    """Checks that the envs fit together; ``single`` spaces are those of env 0."""

    def __init__(self, mode: ObservationMode) -> None:
        is_pair = isinstance(mode, tuple) and len(mode) == 2
        if is_pair and not all(isinstance(space, Space) for space in mode):
            raise TypeError(f"observation_mode={mode!r}: both must be spaces, batched and single")
        if not is_pair and mode not in ("same", "different"):
            raise ValueError(
                f"observation_mode={mode!r}: must be 'same', 'different', or a pair of spaces, "
                "batched and single"
            )
        self.mode = mode
        self._observation: list[AnySpace] = []  # of each env
        self._action: AnySpace  # of all envs

    def add(self, observation: AnySpace, action: AnySpace) -> None:
        """Add the next env; raises ``WorkerError`` if it does not fit the others."""
        index = len(self._observation)
        if index == 0:
            self._action = action
        first = self._observation[0] if index else observation
        if self.mode == "same":
            if observation != first:
                raise WorkerError(
                    f"env {index} has observation_space {observation}, but env 0 has {first}; "
                    "all envs must have the same; if only bounds differ, set "
                    "observation_mode='different'"
                )
            observation = first  # keep one of many equal objects
        else:
            self._check_alike(
                index, observation, first if self.mode == "different" else self.mode[1]
            )
        if action != self._action:
            raise WorkerError(
                f"env {index} has action_space {action}, but env 0 has {self._action}; "
                "all envs must have the same"
            )
        self._observation.append(observation)

    def _check_alike(self, index: int, observation: AnySpace, single: AnySpace) -> None:
        try:
            is_alike = is_space_dtype_shape_equiv(single, observation)
        except NotImplementedError:  # a custom space
            is_alike = single == observation
        if not is_alike:
            raise WorkerError(
                f"env {index} has observation_space {observation}, which does not have the shapes "
                f"and dtypes of {single}; observation_mode allows only other bounds"
            )

    def resize(self, n_envs: int) -> None:
        """Drop the envs from ``n_envs`` on."""
        del self._observation[n_envs:]

    def observation(self) -> tuple[AnySpace, AnySpace]:
        """The observation spaces of the vector env: batched, single."""
        first = self._observation[0]
        if self.mode == "same":
            return batch_space(first, len(self._observation)), first
        if self.mode != "different":
            return self.mode
        try:
            return batch_differing_spaces(self._observation), first
        except (TypeError, ValueError) as error:  # a custom space
            raise WorkerError(
                f"observation_mode='different': {error}; give a pair of spaces"
            ) from error

    def action(self) -> tuple[AnySpace, AnySpace]:
        """The action spaces of the vector env: batched, single."""
        return batch_space(self._action, len(self._observation)), self._action

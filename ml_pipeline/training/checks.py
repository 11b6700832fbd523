"""Checks of env outputs and of updates; each error names the env or the minibatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml_pipeline.errors import UserError
from ml_pipeline.protocols import UpdateResult


class TrainingError(UserError):
    """Training cannot continue."""


class BadValueError(UserError):
    """An env returned NaN or infinity, or an observation outside its space."""


class FiniteCheck:
    """Finds NaN and infinity in the observations and rewards of a rollout."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.n_steps = 0  # of each env, in complete rollouts

    def reward(self, reward: NDArray[Any], *, first_env: int, t: int) -> None:
        # One dot product is the cheapest test. If it overflows, the rewards may still be finite.
        if not self.enabled or math.isfinite(reward.dot(reward)):
            return
        for row in np.flatnonzero(~np.isfinite(reward)).tolist():
            raise BadValueError(
                f"env {first_env + row} returned the reward {reward[row]} at {self.when(t + 1)}; "
                "nothing was learned from it"
            )

    def obs(self, leaves: Mapping[str, NDArray[Any]], *, first_env: int, t: int) -> None:
        if not self.enabled:
            return
        for name, leaf in leaves.items():
            if leaf.dtype != np.float32:
                continue
            flat = leaf.reshape(-1)
            if math.isfinite(flat.dot(flat)):
                continue
            for row, *index in np.argwhere(~np.isfinite(leaf)).tolist():
                which = f" {name!r}" if name else ""
                raise BadValueError(
                    f"env {first_env + row} returned an observation{which} that is not finite at "
                    f"{self.when(t)}: entry {index} is {leaf[row][tuple(index)]}; nothing was "
                    "learned from it"
                )

    def when(self, t: int) -> str:
        return f"its step {self.n_steps + t:,} (step {t} of this rollout)"


def check_rollout(is_finite: bool) -> None:
    """For tensor envs, whose values are checked once per rollout."""
    if not is_finite:
        raise TrainingError(
            "an env returned an observation or a reward that is not finite. To find it, train a "
            "few envs with compile=off and print what the env's advance returns"
        )


def check_updates(
    table: NDArray[Any],
    *,
    n_minibatches: int,
    loss: Mapping[str, Any],
    first_epoch: int = 1,
    find_broken: Callable[[], Sequence[str]] | None = None,
) -> None:
    """Raise if a gradient step was not finite; ``table`` is that of ``Epochs.run``.

    ``loss`` is the entry agent.loss; a user's own loss is the first suspect.
    ``find_broken`` names parameters with non-finite gradients; None if later steps replaced them.
    """
    finite = table[:, -1] != 0
    if finite.all():
        return
    broken = None if find_broken is None else find_broken()
    row = int(finite.argmin())
    fields = zip(UpdateResult._fields[:-1], table[row, :-1].tolist(), strict=True)
    names = [name for name, value in fields if not math.isfinite(value)]
    if broken:
        names.append(f"the gradients of {', '.join(broken[:3])}{', ...' * (len(broken) > 3)}")
    left = "That step changed nothing" if broken is None else "The weights did not change"
    epoch, minibatch = first_epoch + row // n_minibatches, row % n_minibatches + 1
    target = str(loss["_target_"])
    is_ours = target.startswith("ml_pipeline.")
    suspect = "" if is_ours else f"Look at agent.loss._target_={target} first. "
    raise TrainingError(
        f"epoch {epoch}, minibatch {minibatch}: {' and '.join(names)} not finite. {left}. "
        f"{suspect}Try a smaller agent.learning_rate, and look for huge observations or "
        "rewards (agent.normalize_obs, agent.scale_reward)"
    )


def plain_number(name: str, value: Any) -> int | float:
    """A metric as a plain number: callbacks may add NumPy or torch scalars."""
    try:
        number: int | float = value if type(value) in (int, float) else float(value)
    except (TypeError, ValueError) as error:
        raise TrainingError(f"metric {name}={value!r}: must be a number") from error
    return number

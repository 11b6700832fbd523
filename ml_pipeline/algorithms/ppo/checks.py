"""Checks of rollouts and gradient steps; each error names the epoch and the minibatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from ml_pipeline.algorithms.ppo.records import UpdateResult
from ml_pipeline.training.checks import TrainingError


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

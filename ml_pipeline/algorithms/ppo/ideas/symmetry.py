"""Symmetry: learn from each transition and from its mirror image (Mittal et al., 2024).

    python train_ppo.py agent.loss._target_=ml_pipeline.algorithms.ppo.ideas.symmetry.symmetric_loss
        agent.loss.mirror_obs=my_robot.mirror_obs agent.loss.mirror_action=my_robot.mirror_action

Two functions of the user mirror a batch of observations, as the env returns them, and a batch of
actions. The image keeps the advantage, the value target and the old probability of the original.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.ppo.loss import Current, LossTerms, Minibatch, Rates, ppo_loss
from ml_pipeline.errors import UserError
from ml_pipeline.targets import import_dotted


def symmetric_loss(
    now: Current,
    batch: Minibatch,
    rates: Rates,
    config: PPOConfig,
    *,
    mirror_obs: str,
    mirror_action: str,
) -> LossTerms:
    """The mean of the losses of a minibatch and of its mirror image."""
    if batch.inputs.memory is not None or batch.inputs.action_mask is not None:
        raise UserError("symmetric_loss has no mirror image of a recurrent state or of a mask")
    obs = _function(mirror_obs, "mirror_obs")(batch.inputs.obs)
    action = _function(mirror_action, "mirror_action")(batch.action)
    image = batch._replace(inputs=batch.inputs._replace(obs=obs), action=action)
    own = ppo_loss(now, batch, rates, config)
    other = ppo_loss(now.on(image), image, rates, config)
    means = [0.5 * (one + two) for one, two in zip(own[:4], other[:4], strict=True)]
    return LossTerms._make([*means, {}])


def _function(path: str, name: str) -> Callable[[Any], Any]:
    found: Callable[[Any], Any] = import_dotted(path, key=f"agent.loss.{name}")
    return found

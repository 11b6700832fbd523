"""Small tasks in JAX; they need jax alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from gymnasium import spaces

from ml_pipeline.envs.jax_env import JaxVectorEnv


class Walk(JaxVectorEnv):
    """Starts in [0, 1), moves by -1 or +1 and a little noise, and terminates at 3.

    The reward is the place. An observation is a dict of the place and of how often it moved up.
    """

    single_action_space = spaces.Discrete(2)
    reset_share = 1.0

    def begin(self, key: Any) -> Any:
        state = jax.random.uniform(key), 0
        return state, self.seen(state)

    def advance(self, key: Any, state: Any, action: Any) -> Any:
        place, n_up = state
        place = place + 2.0 * action - 1.0 + 0.1 * jax.random.normal(key)
        state = place, n_up + action
        return state, self.seen(state), place, place >= 3.0, n_up > 20

    def seen(self, state: Any) -> Any:
        return {"place": state[0], "ups": jnp.stack([state[1], -state[1]])}


class WalkResetInParts(Walk):
    reset_share = 0.25


class TypedKey(Walk):
    """Its state has a key of JAX's newer type."""

    def begin(self, key: Any) -> Any:
        state, obs = super().begin(key)
        return (state, jax.random.wrap_key_data(key, impl="threefry2x32")), obs

    def advance(self, key: Any, state: Any, action: Any) -> Any:
        inner, own_key = state
        own_key, draw_key = jax.random.split(own_key)
        inner, obs, _, *flags = super().advance(key, inner, action)
        return (inner, own_key), obs, jax.random.uniform(draw_key), *flags


class Reach(JaxVectorEnv):
    """A place that actions move; the reward is the nearness to 0. It never ends by itself."""

    single_action_space = spaces.Box(-1.0, 1.0, (2,))
    max_episode_steps = 10

    def begin(self, key: Any) -> Any:
        place = jax.random.uniform(key, (2,), minval=-1.0)
        return place, place

    def advance(self, key: Any, state: Any, action: Any) -> Any:
        place = state + 0.1 * action
        return place, place, -jnp.abs(place).sum(), False, False


class Forbidding(JaxVectorEnv):
    """Step t of an episode forbids the action t mod 3, which costs 100; others give 1."""

    single_action_space = spaces.Discrete(3)
    max_episode_steps = 5

    def begin(self, key: Any) -> Any:
        return jnp.zeros((), jnp.int32), jnp.zeros(1)

    def advance(self, key: Any, state: Any, action: Any) -> Any:
        reward = jnp.where(action == state % 3, -100.0, 1.0)
        return state + 1, (state + 1.0)[None], reward, False, False

    def action_mask(self, state: Any) -> Any:
        return jnp.arange(3) != state % 3


class Endless(Reach):
    max_episode_steps = None


class LateNan(Reach):
    """Its observations are NaN from step 8 on."""

    max_episode_steps = 20

    def begin(self, key: Any) -> Any:
        place, _ = super().begin(key)
        return (place, 0), place

    def advance(self, key: Any, state: Any, action: Any) -> Any:
        place, obs, *rest = super().advance(key, state[0], action)
        late = state[1] + 1 >= 8
        return (place, state[1] + 1), jnp.where(late, jnp.nan, obs), *rest


class ResetsNothing(Walk):
    """The start of an episode is where one ends."""

    def begin(self, key: Any) -> Any:
        return (jnp.float32(9.0), 0), self.seen((jnp.float32(9.0), 0))


class NoActions(Walk):
    single_action_space: Any = None


class ThreeValues(Walk):
    def advance(self, key: Any, state: Any, action: Any) -> Any:
        return state, self.seen(state), 0.0


class GrowingState(Walk):
    def advance(self, key: Any, state: Any, action: Any) -> Any:
        _, *rest = super().advance(key, state, action)
        return (state[0].astype(jnp.int32), state[1]), *rest


class Raising(Walk):
    def begin(self, key: Any) -> Any:
        raise KeyError("no such map")

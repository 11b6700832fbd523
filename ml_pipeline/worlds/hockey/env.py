"""Hockey: two rackets and a puck; each player wants the puck in the other's goal.

Rink, speeds, rewards and observations follow the hockey-env package, without Box2D. So a policy
trained here can play there. Each player sees its own goal on the left. ``opponent=None`` is a
two-player env; the name of a scripted opponent makes it an ordinary env for one player.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ml_pipeline.envs.kinds import AnySpace, Info
from ml_pipeline.games.two_players import both_spaces
from ml_pipeline.worlds.hockey import physics
from ml_pipeline.worlds.hockey.drawing import draw
from ml_pipeline.worlds.hockey.opponents import (
    EITHER,
    SCRIPTED,
    STRENGTH,
    drawn_opponent,
    scripted_action,
)
from ml_pipeline.worlds.hockey.physics import FLOATS, Maths, Number, Numbers

GOAL_REWARD = 10.0
MAX_STEPS = {"normal": 250, "shooting": 80, "defence": 80}
N_DRAWS = {"normal": 2, "shooting": 4, "defence": 5}  # random numbers of a start
# Force x, y, torque and shot of each discrete action.
DISCRETE = (
    (0.0, 0.0, 0.0, 0.0),
    (-1.0, 0.0, 0.0, 0.0),
    (1.0, 0.0, 0.0, 0.0),
    (0.0, -1.0, 0.0, 0.0),
    (0.0, 1.0, 0.0, 0.0),
    (0.0, 0.0, -1.0, 0.0),
    (0.0, 0.0, 1.0, 0.0),
    (0.0, 0.0, 0.0, 1.0),
)
OBSERVATIONS = spaces.Box(-np.inf, np.inf, (18,), np.float32)
ACTIONS = spaces.Box(-1.0, 1.0, (4,), np.float32)


class Hockey(gym.Env[NDArray[np.float32], Any]):
    """A game ends with a goal, +10 for player 0 or -10, or is truncated as a draw.

    ``opponent`` and ``mode`` can be set between episodes; the next reset applies them. The
    opponent ``either`` is weak or strong, drawn for each episode.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}  # noqa: RUF012 - as in Gymnasium
    scripted = SCRIPTED
    moves = DISCRETE

    def __init__(
        self,
        opponent: str | None = None,
        mode: str = "normal",
        discrete: bool = False,
        render_mode: str | None = None,
    ) -> None:
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode={render_mode!r}: unknown; use rgb_array")
        self.opponent = opponent
        self.mode = mode
        self.render_mode = render_mode
        self.discrete = discrete
        self._for_two = opponent is None
        self.observation_space, self.action_space = game_spaces(self._for_two, discrete=discrete)
        self._apply_settings()
        self.state = begin(FLOATS, mode, (0.5,) * N_DRAWS[mode])  # of hockey_physics
        self._n_steps = 0

    def reset(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[NDArray[np.float32], Info]:
        super().reset(seed=seed)
        self._apply_settings()
        self.state = begin(FLOATS, self.mode, self.np_random.random(N_DRAWS[self.mode]).tolist())
        if self.opponent == EITHER:
            self._strength = strength_of(drawn_opponent(self.np_random))
        self._n_steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, Info]:
        action = np.asarray(action).tolist()
        if self._strength is None:
            action_0, action_1 = self._forces(action[0]), self._forces(action[1])
        else:
            action_0 = self._forces(action)
            action_1 = scripted_action(FLOATS, physics.view_1(self.state), self._strength)
        self.state = physics.advance(FLOATS, self.state, action_0, action_1)
        self._n_steps += 1
        winner = physics.winner(FLOATS, self.state)
        reward = physics.distance_cost(FLOATS, self.state, self._max_steps) + GOAL_REWARD * winner
        is_over = winner != 0.0
        is_late = self._n_steps >= self._max_steps
        info = {"winner": int(winner)} if is_over or is_late else {}
        return self._observe(), reward, is_over, is_late, info

    def render(self) -> NDArray[np.uint8] | None:
        return draw(self.state) if self.render_mode == "rgb_array" else None

    def _observe(self) -> NDArray[np.float32]:
        view = physics.view_0(self.state)
        if self._strength is not None:
            return np.array(view, dtype=np.float32)
        both = view + physics.view_1(self.state)
        return np.array(both, dtype=np.float32).reshape(2, 18)

    def _forces(self, action: Any) -> Sequence[float]:
        if self.discrete:
            return DISCRETE[action]
        return [FLOATS.clip(value, -1.0, 1.0) for value in action]

    def _apply_settings(self) -> None:
        """Check ``opponent`` and ``mode``, and use them from now on."""
        if (self.opponent is None) != self._for_two:
            raise ValueError(
                f"opponent={self.opponent!r}: the number of players is fixed; make another env"
            )
        self._max_steps = steps_of(self.mode)
        self._strength = strength_of("weak" if self.opponent == EITHER else self.opponent, EITHER)


def game_spaces(for_two: bool, *, discrete: bool = False) -> tuple[AnySpace, AnySpace]:
    """The spaces of observations and actions, of one player or of both."""
    actions = spaces.Discrete(len(DISCRETE)) if discrete else ACTIONS
    if for_two:
        return both_spaces(OBSERVATIONS), both_spaces(actions)
    return OBSERVATIONS, actions


def steps_of(mode: str) -> int:
    """The time limit of a mode."""
    if mode not in MAX_STEPS:
        raise ValueError(f"mode={mode!r}: unknown; choose from {', '.join(MAX_STEPS)}")
    return MAX_STEPS[mode]


def strength_of(opponent: str | None, *more_choices: str) -> float | None:
    """The strength of a scripted opponent; None for a second player.

    ``more_choices``: other names that the caller accepts, for the error message.
    """
    if opponent is None:
        return None
    if opponent not in STRENGTH:
        names = ", ".join((*STRENGTH, *more_choices))
        raise ValueError(
            f"opponent={opponent!r}: unknown; choose from {names}, or null for two players"
        )
    return STRENGTH[opponent]


def begin(m: Maths, mode: str, draws: Sequence[Number]) -> Numbers:
    """The first state of an episode from ``N_DRAWS`` numbers in [0, 1), floats or tensors."""
    zero = 0.0 * draws[0]
    racket = (zero - 3.0, zero, zero, zero, zero, zero)
    y, vx, vy = 2.0 * draws[1] - 1.0, zero, zero
    if mode == "normal":  # in either half
        x = 2.0 * draws[0] - 1.0
        x = m.where(x < 0.0, x - 1.0, x + 1.0)
        return (*racket, *racket, x, y, vx, vy, zero, zero, zero)
    x = -1.0 - draws[0]
    # Not behind the wall; in hockey-env, some rackets start inside it.
    other_x = 1 / 3 - 5.0 * draws[2]
    other = (m.where(other_x < -3.48, -3.48, other_x), 2.0 - 4.0 * draws[3], *racket[2:])
    if mode == "defence":  # just after a shot at the goal of player 0
        x, y = 10 / 3 * draws[0], 6.2 * draws[1] - 3.1
        dx, dy = -5.0 - x, 1.5 * draws[4] - 0.75 - y
        scale = physics.SHOT_SPEED / m.sqrt(dx * dx + dy * dy)
        vx, vy = dx * scale, dy * scale
        x, y = x + vx * physics.STEP_SECONDS, y + vy * physics.STEP_SECONDS
    return (*racket, *other, x, y, vx, vy, zero, zero, zero)

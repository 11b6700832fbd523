"""TorchBreakout: Breakout on a grid of 10 x 10, by the rules of MinAtar, as a tensor env.

The ball flies along diagonals, one cell per step. It bounces off walls, bricks and the paddle, and
each brick that it breaks gives a reward of 1. A cleared wall is rebuilt when the ball arrives at
the bottom. An episode ends when the paddle misses the ball (Young and Tian 2019, "MinAtar",
arXiv:1903.03176).
"""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from ml_pipeline import counter_random
from ml_pipeline.envs.tensor_env import EnvState, TorchVectorEnv

SIDE = 10
BOTTOM = SIDE - 1  # the row of the paddle
FIRST_BRICKS, LAST_BRICKS = 1, 3  # rows of the wall
START_ROW = 3  # of the ball, at the left or the right side
START_PADDLE = 4
LEFT, RIGHT = 1, 2  # actions; 0: stay


class TorchBreakout(TorchVectorEnv):
    """State: column of the paddle; column, row, both speeds and last place of the ball, [n_envs]
    each; the bricks, [n_envs, 10, 10] bool; and whether the ball is inside a brick, [n_envs] bool.

    With sticky actions also the last action, and key and counter of the random numbers.
    """

    # Channels: paddle, ball, last place of the ball, bricks. A cell is 255 or 0.
    single_observation_space = spaces.Box(0, 255, (SIDE, SIDE, 4), np.uint8)
    single_action_space = spaces.Discrete(3)
    max_episode_steps = 1000  # MinAtar has no limit, and a good policy would never end

    def __init__(
        self,
        num_envs: int,
        *,
        sticky_actions: float = 0.0,
        device: torch.device | str = "cpu",
        seed: int | None = None,
        max_episode_steps: int | None = None,
    ) -> None:
        """``sticky_actions``: probability that a step repeats the last action, in MinAtar 0.1."""
        if not 0.0 <= sticky_actions <= 1.0:
            raise ValueError(f"sticky_actions is a probability, got {sticky_actions}")
        self.sticky_actions = sticky_actions
        self.n_draws = 3 if sticky_actions else 1
        super().__init__(num_envs, device=device, seed=seed, max_episode_steps=max_episode_steps)

    def begin(self, draws: tuple[Tensor, ...]) -> EnvState:
        side, *luck = draws
        from_right = (side >= 0.5).to(torch.int64)
        one = torch.ones_like(from_right)
        x, y = BOTTOM * from_right, START_ROW * one
        bricks = _wall(side.device).expand(len(side), SIDE, SIDE)
        is_inside = torch.zeros_like(from_right, dtype=torch.bool)
        state = START_PADDLE * one, x, y, one - 2 * from_right, one, x, y, bricks, is_inside
        if not self.sticky_actions:
            return state
        high, low = ((draw * 2**24).to(torch.int64) for draw in luck)  # a draw has 24 bits
        return *state, 0 * one, high * 2**24 + low, 0 * one

    def advance(self, state: EnvState, action: Tensor) -> tuple[EnvState, Tensor, Tensor]:
        if not self.sticky_actions:
            return self._moved(state, action)
        *state_of_game, last_action, key, number = state
        (draw,) = counter_random.uniform(key, number, 1)
        action = torch.where(draw < self.sticky_actions, last_action, action)
        after, reward, terminated = self._moved(tuple(state_of_game), action)
        return (*after, action, key, number + 1), reward, terminated

    def _moved(self, state: EnvState, action: Tensor) -> tuple[EnvState, Tensor, Tensor]:
        """One step with the action that is taken."""
        paddle, x, y, speed_x, speed_y, _, _, bricks, was_inside = state
        move = (action == RIGHT).to(torch.int64) - (action == LEFT).to(torch.int64)
        paddle = (paddle + move).clamp(0, BOTTOM)

        flown_x, new_y = x + speed_x, y + speed_y
        new_x = flown_x.clamp(0, BOTTOM)
        speed_x = torch.where(flown_x == new_x, speed_x, -speed_x)

        cell = _cell(new_x, new_y)
        hits_ceiling = new_y < 0
        is_inside = (cell & bricks).flatten(1).any(dim=1)
        breaks = is_inside & ~was_inside  # one brick at a time: from inside, it flies on
        bricks = bricks & ~(cell & breaks[:, None, None])

        is_low = new_y == BOTTOM
        is_cleared = is_low & ~bricks.flatten(1).any(dim=1)
        bricks = bricks | (is_cleared[:, None, None] & _wall(bricks.device))
        hits_top = is_low & (x == paddle)  # flies off to the other side of the paddle
        hits_corner = is_low & (x != paddle) & (new_x == paddle)  # flies back where it came from
        is_lost = is_low & ~hits_top & ~hits_corner

        bounces_up = breaks | hits_top | hits_corner
        speed_x = torch.where(hits_corner, -speed_x, speed_x)
        speed_y = torch.where(bounces_up | hits_ceiling, -speed_y, speed_y)
        new_y = torch.where(bounces_up, y, new_y.clamp(min=0))
        after = paddle, new_x, new_y, speed_x, speed_y, x, y, bricks, is_inside
        return after, breaks.to(torch.float32), is_lost

    def observe(self, state: EnvState) -> Tensor:
        paddle, x, y, _, _, last_x, last_y, bricks, *_ = state
        bottom = torch.full_like(paddle, BOTTOM)
        cells = _cell(paddle, bottom), _cell(x, y), _cell(last_x, last_y), bricks
        return torch.stack(cells, dim=3).to(torch.uint8) * 255


def _cell(x: Tensor, y: Tensor) -> Tensor:
    """[N] columns and rows -> [N, 10, 10] bool, True in one cell."""
    places = torch.arange(SIDE, device=x.device)
    column, row = places == x[:, None, None], places[:, None] == y[:, None, None]
    return column & row


def _wall(device: torch.device) -> Tensor:
    """All bricks, [10, 10] bool."""
    row = torch.arange(SIDE, device=device)[:, None].expand(SIDE, SIDE)
    return (row >= FIRST_BRICKS) & (row <= LAST_BRICKS)

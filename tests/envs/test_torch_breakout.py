"""TorchBreakout, compared step by step with the rules of MinAtar in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tensor_transitions import check_compiles_as_one_graph, check_stays_on_the_device

from ml_pipeline.envs.grids.breakout import LEFT, RIGHT, TorchBreakout

STAY = 0
# Headings of the ball, clockwise from the upper left, and what mirrors do to them.
UP_LEFT, UP_RIGHT, DOWN_RIGHT, DOWN_LEFT = range(4)
STEP_OF = {UP_LEFT: (-1, -1), UP_RIGHT: (1, -1), DOWN_RIGHT: (1, 1), DOWN_LEFT: (-1, 1)}
OFF_A_SIDE = {UP_LEFT: UP_RIGHT, UP_RIGHT: UP_LEFT, DOWN_RIGHT: DOWN_LEFT, DOWN_LEFT: DOWN_RIGHT}
OFF_A_FLOOR = {UP_LEFT: DOWN_LEFT, DOWN_LEFT: UP_LEFT, UP_RIGHT: DOWN_RIGHT, DOWN_RIGHT: UP_RIGHT}
BACK = {UP_LEFT: DOWN_RIGHT, DOWN_RIGHT: UP_LEFT, UP_RIGHT: DOWN_LEFT, DOWN_LEFT: UP_RIGHT}


class Game:
    """One game; ``events`` counts what has happened, to show that a test has seen it."""

    def __init__(self, from_right: bool, events: dict[str, int]) -> None:
        self.paddle = 4
        self.ball = (9, 3) if from_right else (0, 3)
        self.heading = DOWN_LEFT if from_right else DOWN_RIGHT
        self.trail = self.ball
        self.bricks = {(x, y) for x in range(10) for y in (1, 2, 3)}
        self.in_brick = False
        self.events = events

    def saw(self, event: str) -> None:
        self.events[event] = self.events.get(event, 0) + 1

    def step(self, action: int) -> tuple[float, bool]:
        if action == LEFT and self.paddle > 0:
            self.paddle -= 1
        if action == RIGHT and self.paddle < 9:
            self.paddle += 1
        before_x, before_y = self.trail = self.ball
        x, y = before_x + STEP_OF[self.heading][0], before_y + STEP_OF[self.heading][1]
        if x in (-1, 10):
            x = before_x
            self.heading = OFF_A_SIDE[self.heading]
            self.saw("side")
        reward, is_over, was_in_brick = 0.0, False, self.in_brick
        self.in_brick = y >= 0 and (x, y) in self.bricks
        if y == -1:
            y = 0
            self.heading = OFF_A_FLOOR[self.heading]
            self.saw("ceiling")
        elif self.in_brick and was_in_brick:
            self.saw("through a brick")
        elif self.in_brick:
            self.bricks.remove((x, y))
            y = before_y
            self.heading = OFF_A_FLOOR[self.heading]
            reward = 1.0
        elif y == 9:
            if not self.bricks:
                self.bricks = {(x, y) for x in range(10) for y in (1, 2, 3)}
                self.saw("new wall")
            if before_x == self.paddle:
                self.heading = OFF_A_FLOOR[self.heading]
                y = before_y
                self.saw("paddle")
            elif x == self.paddle:
                self.heading = BACK[self.heading]
                y = before_y
                self.saw("corner of the paddle")
            else:
                is_over = True
                self.saw("end")
        self.ball = x, y
        return reward, is_over

    def image(self) -> NDArray[np.uint8]:
        image = np.zeros((10, 10, 4), np.uint8)
        for channel, cells in enumerate([[(self.paddle, 9)], [self.ball], [self.trail]]):
            for x, y in cells:
                image[y, x, channel] = 255
        for x, y in self.bricks:
            image[y, x, 3] = 255
        return image

    def good_action(self) -> int:
        """Moves the paddle to where the ball is going."""
        aim = self.ball[0] + (STEP_OF[self.heading][0] if self.ball[1] < 8 else 0)
        return STAY if aim == self.paddle else (LEFT if aim < self.paddle else RIGHT)


@pytest.mark.parametrize("skill", [0.0, 0.9, 1.0])
def test_every_step_equals_that_of_the_reference(skill: float) -> None:
    env, random = TorchBreakout(4, seed=3, max_episode_steps=10**6), np.random.default_rng(1)
    events: dict[str, int] = {}
    obs, _ = env.reset()
    games = [Game(bool(each[3, 9, 1]), events) for each in obs]

    for _ in range(3_000):
        is_good = random.random(4) < skill
        actions = [
            game.good_action() if good else int(random.integers(3))
            for game, good in zip(games, is_good, strict=True)
        ]
        obs, reward, terminated, truncated, infos = env.step(torch.tensor(actions))
        for i, game in enumerate(games):
            wanted = game.step(actions[i])
            assert np.array_equal(infos["final_obs"][i].numpy(), game.image())
            assert (reward[i].item(), terminated[i].item()) == wanted
            if terminated[i]:
                games[i] = game = Game(bool(obs[i, 3, 9, 1]), events)
            assert np.array_equal(obs[i].numpy(), game.image())
        assert not truncated.any()

    wanted_events = {"side", "paddle", "corner of the paddle", "ceiling", "new wall"}
    wanted_events |= {"through a brick", "end"}
    assert set(events) >= (wanted_events if skill == 0.9 else {"side", "paddle"})
    assert env.observation_space.contains(obs.numpy())


def test_every_step_equals_that_of_gymnax() -> None:
    gymnax = pytest.importorskip("gymnax", reason="needs gymnax: make jax")
    jax = pytest.importorskip("jax", reason="needs the extra: make jax")
    theirs, params = gymnax.make("Breakout-MinAtar")
    step = jax.jit(theirs.step_env)
    random, n_steps = np.random.default_rng(2), 0
    for episode in range(8):
        key = jax.random.PRNGKey(episode)
        obs, state = theirs.reset_env(key, params)
        from_right = bool(obs[3, 9, 1])
        game = Game(from_right, {})  # plays well, so that walls are broken
        env = TorchBreakout(1, seed=episode)
        while bool(env.reset()[0][0, 3, 9, 1]) != from_right:
            pass
        is_over = False
        while not is_over and n_steps < 300 * (episode + 1):
            action = game.good_action() if random.random() < 0.97 else int(random.integers(3))
            obs, state, reward, is_over, _ = step(key, state, action, params)
            _, ours, terminated, _, infos = env.step(torch.tensor([action]))
            assert game.step(action) == (ours.item(), terminated.item())
            assert np.array_equal(infos["final_obs"][0].numpy() > 0, np.asarray(obs) > 0)
            assert (ours.item(), terminated.item()) == (float(reward), bool(is_over))
            n_steps += 1
    assert n_steps > 800


def test_the_ball_starts_at_either_side() -> None:
    obs, _ = TorchBreakout(1000, seed=0).reset()

    starts = obs[:, :, :, 1].nonzero()[:, 1:].tolist()

    assert {tuple(each) for each in starts} == {(3, 0), (3, 9)}
    assert 400 < starts.count([3, 0]) < 600


def columns(env: TorchBreakout, n_steps: int) -> torch.Tensor:
    """Those of the paddle, which is told to go right and left in turn: [T, n_envs]."""
    env.reset()
    found = []
    for t in range(n_steps):
        env.step(torch.full((env.num_envs,), RIGHT if t % 2 == 0 else LEFT))
        found.append(env.position.state[0])
    return torch.stack(found)


def test_sticky_actions_repeat_the_last_one_with_their_probability() -> None:
    env = TorchBreakout(2000, seed=5, sticky_actions=0.25)

    places = columns(env, 3)  # the first step may repeat "stay"; no episode ends so early

    first, second, third = places[0] - 4, places[1] - places[0], places[2] - places[1]
    assert set(first.tolist()) == {0, 1}
    assert (first == 0).float().mean() == pytest.approx(0.25, abs=0.04)
    went_left = second == -1
    assert (third[went_left] == -1).float().mean() == pytest.approx(0.25, abs=0.04)
    assert (columns(TorchBreakout(9, sticky_actions=1.0), 3) == 4).all()


def test_sticky_actions_depend_on_the_seed_of_the_env_alone() -> None:
    few, many, other = (
        columns(TorchBreakout(n, seed=seed, sticky_actions=0.5), 40)
        for n, seed in ((3, 5), (8, 5), (3, 500))
    )

    assert torch.equal(few, many[:, :3])
    assert not torch.equal(few, other)


@pytest.mark.parametrize("sticky_actions", [-0.1, 1.1])
def test_a_wrong_probability_is_refused(sticky_actions: float) -> None:
    with pytest.raises(ValueError, match=f"sticky_actions is a probability, got {sticky_actions}"):
        TorchBreakout(1, sticky_actions=sticky_actions)


@pytest.mark.parametrize("sticky_actions", [0.0, 0.1])
def test_a_saved_state_continues_bit_for_bit(sticky_actions: float) -> None:
    env, other = (TorchBreakout(8, seed=s, sticky_actions=sticky_actions) for s in (1, 2))
    env.reset()
    actions = torch.randint(3, (60, 8), generator=torch.Generator().manual_seed(3))
    for action in actions[:30]:
        env.step(action)

    other.load_state_dict(env.state_dict())

    for action in actions[30:]:
        ours, theirs = env.step(action), other.step(action)
        assert all(map(torch.equal, ours[:4], theirs[:4]))


@pytest.mark.parametrize("sticky_actions", [0.0, 0.1])
def test_a_transition_never_reads_from_the_device_and_compiles_as_one_graph(
    sticky_actions: float,
) -> None:
    env = TorchBreakout(4, seed=1, max_episode_steps=2, sticky_actions=sticky_actions)

    dtypes = check_stays_on_the_device(env)
    check_compiles_as_one_graph(env)

    assert torch.float64 not in dtypes

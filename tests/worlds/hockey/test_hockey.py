"""Hockey: its rules, its symmetry, its scripted players and its snapshots."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from conftest import TESTS
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from ml_pipeline.envs.snapshots import restore_snapshot, take_snapshot, why_no_snapshot
from ml_pipeline.games.two_players import player_space
from ml_pipeline.worlds.hockey.env import DISCRETE, Hockey
from ml_pipeline.worlds.hockey.opponents import SCRIPTED

State = tuple[float, ...]
STILL = np.zeros((2, 4), dtype=np.float32)


def state_of(
    racket_0: tuple[float, ...] = (-3.0, 0.0),
    racket_1: tuple[float, ...] = (-3.0, 0.0),
    puck: tuple[float, ...] = (0.0, 0.0),
    keep: tuple[float, float] = (0.0, 0.0),
) -> State:
    """Each body from its first numbers, the others are 0; racket 1 is in its own frame."""
    bodies = ((racket_0, 6), (racket_1, 6), (puck, 5))
    return (*(x for body, n in bodies for x in (*body, *[0.0] * (n - len(body)))), *keep)


def mirrored(state: State) -> State:
    """The same game with the players swapped."""
    x, y, vx, vy, spin, keep_0, keep_1 = state[12:]
    return (*state[6:12], *state[:6], -x, -y, -vx, -vy, spin, keep_1, keep_0)


def hockey_in(state: State, **kwargs: Any) -> Hockey:
    env = Hockey(**kwargs)
    env.reset(seed=0)
    env.state = state
    return env


def player_actions(name: str, obs: Any, random: np.random.Generator) -> Any:
    if name == "random":
        return random.uniform(-1.5, 1.5, (1, 4)).astype(np.float32)
    return SCRIPTED[name]().act_batch(obs)


def play(env: Hockey, names: tuple[str, str], seed: int) -> tuple[list[Any], int]:
    """The observations of a game between two named players, and its winner."""
    random = np.random.default_rng(seed)
    obs, _ = env.reset(seed=seed)
    seen, over, info = [obs], False, {"winner": 0}
    while not over:
        actions = [player_actions(name, obs[i : i + 1], random) for i, name in enumerate(names)]
        obs, _, terminated, truncated, info = env.step(np.concatenate(actions))
        seen.append(obs)
        over = terminated or truncated
    return seen, info["winner"]


# Steps of games between the BasicOpponents of hockey-env 2.6, eight of each kind.
RECORDED = json.loads((TESTS / "fixtures/hockey_env_steps.json").read_text())


@pytest.mark.parametrize("kind", ["free", "fast", "angle", "bounce", "catch", "keep", "shot"])
def test_steps_are_those_recorded_in_hockey_env(kind: str) -> None:
    steps = [step for step in RECORDED if step["kind"] == kind]
    assert len(steps) == 8
    for step in steps:
        x, y, angle, vx, vy, omega = step["before"][6:12]
        racket_1 = (-x, -y, angle, -vx, -vy, omega)
        puck = (*step["before"][12:16], step["spin"])
        env = hockey_in(state_of(step["before"][:6], racket_1, puck, step["before"][16:]))

        obs, *_ = env.step(np.array(step["action"], dtype=np.float32).reshape(2, 4))

        wanted = np.array(step["after"])
        # Here walls stop rackets without turning them, and impacts are resolved in one pass.
        positions, speeds, keep = [0, 1, 6, 7, 12, 13], [14, 15], [16, 17]
        np.testing.assert_allclose(obs[0, positions], wanted[positions], atol=0.06)
        np.testing.assert_allclose(obs[0, speeds], wanted[speeds], atol=0.4)
        assert obs[0, keep].tolist() == wanted[keep].tolist()
        if kind in ("free", "shot"):
            np.testing.assert_allclose(obs[0], wanted, atol=1e-3)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("opponent", [None, "weak"])
@pytest.mark.parametrize("discrete", [False, True])
def test_gymnasiums_env_checker_accepts_it(opponent: str | None, discrete: bool) -> None:
    check_env(Hockey(opponent, discrete=discrete, render_mode="rgb_array"))


@pytest.mark.parametrize("discrete", [False, True])
def test_an_opponent_leaves_the_spaces_of_one_player(discrete: bool) -> None:
    one, two = Hockey("strong", discrete=discrete), Hockey(discrete=discrete)

    assert two.observation_space.shape == (2, 18)
    assert player_space(two.observation_space) == one.observation_space
    assert player_space(two.action_space) == one.action_space
    assert one.action_space == (
        spaces.Discrete(8) if discrete else spaces.Box(-1.0, 1.0, (4,), np.float32)
    )


@pytest.mark.parametrize("players", [("strong", "random"), ("weak", "strong"), ("random",) * 2])
def test_swapped_players_play_the_mirrored_game_bit_for_bit(players: tuple[str, str]) -> None:
    random = np.random.default_rng(0)
    n_goals = n_kept = 0
    for seed in range(6):
        env = Hockey()
        obs, _ = env.reset(seed=seed)
        swapped = hockey_in(mirrored(env.state))
        over = False
        while not over:
            pairs = enumerate(players)
            actions = [player_actions(name, obs[i : i + 1], random) for i, name in pairs]
            action = np.concatenate(actions)
            obs, reward, terminated, truncated, info = env.step(action)
            other, their_reward, *ends, their_info = swapped.step(action[::-1])

            assert np.array_equal(obs, other[::-1])
            assert ends == [terminated, truncated]
            assert info.get("winner", 0) == -their_info.get("winner", 0)
            if terminated:  # the rest is the distance to the puck, of which one player has none
                assert {round(reward / 10), round(their_reward / 10)} == {1, -1}
            over = terminated or truncated
            n_goals += terminated
            n_kept += bool(obs[0, 16:].any())
    assert n_goals >= 1
    assert n_kept >= 10


def test_both_players_see_the_same_rink_turned_by_180_degrees() -> None:
    racket_0, racket_1 = (-1.0, 0.5, 0.1, 2.0, 3.0, 4.0), (-2.0, -0.5, 0.2, 5.0, 6.0, 7.0)
    env = hockey_in(state_of(racket_0, racket_1, (0.5, 0.25, -8.0, 9.0), (3.0, 0.0)))

    first, second = env._observe()

    assert first.tolist() == pytest.approx(
        [*racket_0, 2.0, 0.5, 0.2, -5.0, -6.0, 7.0, 0.5, 0.25, -8.0, 9.0, 3.0, 0.0]
    )
    assert second.tolist() == pytest.approx(
        [*racket_1, 1.0, -0.5, 0.1, -2.0, -3.0, 4.0, -0.5, -0.25, 8.0, -9.0, 0.0, 3.0]
    )


@pytest.mark.parametrize(("x", "vx", "winner"), [(3.7, 20.0, 1), (-3.7, -20.0, -1)])
def test_a_goal_ends_the_game(x: float, vx: float, winner: int) -> None:
    env = hockey_in(state_of((-3.0, 2.0), (-3.0, 2.0), (x, 0.5, vx, 0.0)))

    obs, reward, terminated, truncated, info = env.step(STILL)

    distance = np.hypot(*(obs[0, :2] - obs[0, 12:14])) if winner == -1 else 0.0
    assert reward == pytest.approx(10.0 * winner - 30.0 / (250 / 60 * 125) * distance)
    assert (terminated, truncated, info) == (True, False, {"winner": winner})


@pytest.mark.parametrize(("mode", "n_steps"), [("normal", 250), ("shooting", 80), ("defence", 80)])
def test_the_time_limit_truncates_a_draw(mode: str, n_steps: int) -> None:
    env = Hockey(mode=mode)
    for seed in range(20):
        env.reset(seed=seed)
        env.state = state_of(puck=(1.0, 0.0))
        for _ in range(n_steps - 1):
            *_, terminated, truncated, info = env.step(STILL)
            assert (terminated, truncated, info) == (False, False, {})
        *_, terminated, truncated, info = env.step(STILL)
        assert (terminated, truncated, info) == (False, True, {"winner": 0})


@pytest.mark.parametrize(
    ("puck", "after"),
    [
        ((1.0, 3.0, 0.0, 10.0), (0.0, -9.49)),  # a long wall: 95 % of 10 * 0.999
        ((3.6, 2.0, 10.0, 0.0), (-9.49, 0.0)),  # a short wall
        ((3.6, -3.05, 10.0, -10.0), (-7.64, 7.92)),  # a corner; friction takes 1.95 and 1.57
    ],
)
def test_walls_reflect_the_puck(puck: Any, after: Any) -> None:
    env = hockey_in(state_of(puck=puck))

    obs, *_ = env.step(STILL)

    assert obs[0, 14:16].tolist() == pytest.approx(after, abs=0.01)
    assert abs(obs[0, 12]) < 3.71
    assert abs(obs[0, 13]) < 3.13


def test_a_post_deflects_the_puck() -> None:
    env = hockey_in(state_of((-3.0, 2.0), puck=(-3.6, 1.3, -20.0, 0.0)))

    obs, _, terminated, *_ = env.step(STILL)

    assert not terminated
    assert obs[0, 14] > 0.0
    assert obs[0, 15] < -5.0


def test_a_racket_keeps_the_puck_until_it_shoots() -> None:
    env = hockey_in(state_of((-2.0, 0.0, 0.5), puck=(-1.75, 0.1, -5.0, 0.0)))
    keep = []
    for _ in range(3):
        obs, *_ = env.step(STILL)
        keep.append(obs[0, 16])
    assert keep == [15.0, 14.0, 13.0]
    assert obs[1, 17] == 13.0
    assert np.hypot(*(obs[0, 12:14] - obs[0, :2])) < 0.4

    shot = STILL.copy()
    shot[0, 3] = 1.0
    obs, *_ = env.step(shot)

    angle = obs[0, 2]
    assert obs[0, 16] == 0.0
    assert obs[0, 14:16].tolist() == pytest.approx([60 * np.cos(angle), 60 * np.sin(angle)], 0.01)


def test_a_racket_that_waits_shoots_after_15_steps() -> None:
    env = hockey_in(state_of((-2.0, 0.0), puck=(-2.0, 0.0), keep=(15.0, 0.0)))

    keep = [env.step(STILL)[0][0, 16] for _ in range(14)]

    assert keep == [*range(14, 1, -1), 0]
    assert env.state[14] == pytest.approx(60.0, rel=0.01)


def test_rackets_stay_in_their_half_and_do_not_pass_each_other() -> None:
    forwards = np.array([[1.0, 0.0, 1.0, 0.0]] * 2, dtype=np.float32)
    env = hockey_in(state_of((-1.0, 0.1, 0.9), (-1.0, 0.1, 0.9), puck=(0.0, 3.0)))
    for _ in range(60):
        obs, *_ = env.step(forwards)
        assert obs[0, 0] < -0.1
        assert obs[0, 6] > 0.1


def test_walls_stop_rackets() -> None:
    for force in ([-1.0, 1.0], [-1.0, -1.0], [0.0, 1.0], [-1.0, 0.0]):
        env = hockey_in(state_of((-1.0, 0.3)))
        action = STILL.copy()
        action[0, :2] = force
        for _ in range(100):
            obs, *_ = env.step(action)
        x, y = obs[0, :2]
        assert x > -3.66
        assert abs(y) < 2.94
        assert np.abs(obs[0, 3:5]).max() < 0.1


def test_discrete_actions_are_rows_of_the_continuous_ones() -> None:
    env, discrete = Hockey(), Hockey(discrete=True)
    env.reset(seed=3)
    discrete.reset(seed=3)
    random = np.random.default_rng(0)
    for _ in range(100):
        pair = random.integers(8, size=2)
        obs, *_ = env.step(np.array(DISCRETE, dtype=np.float32)[pair])
        assert np.array_equal(discrete.step(pair)[0], obs)


def test_a_seed_determines_the_game() -> None:
    games = [play(Hockey(), ("random", "strong"), seed) for seed in (1, 1, 2)]

    assert np.array_equal(games[0][0], games[1][0])
    assert not np.array_equal(games[0][0][0], games[2][0][0])


@pytest.mark.parametrize("mode", ["normal", "shooting", "defence"])
def test_starts_are_those_of_the_mode(mode: str) -> None:
    env = Hockey(mode=mode)
    starts = np.array([env.reset(seed=seed)[0][0] for seed in range(300)])
    puck_x, puck_y, puck_vx, puck_vy = starts[:, 12:16].T

    assert (starts[:, :2] == [-3.0, 0.0]).all()
    if mode == "defence":
        speed = np.hypot(puck_vx, puck_vy)
        assert np.allclose(speed, 60.0)
        at_goal = puck_y - puck_vy / puck_vx * (puck_x + 5.0)
        assert np.abs(at_goal).max() <= 0.7501
    else:
        assert (starts[:, 14:16] == 0.0).all()
        assert np.abs(puck_x).min() >= 1.0
        assert np.abs(puck_x).max() <= 2.0
        assert np.abs(puck_y).max() <= 1.0
        assert (puck_x < 0).mean() == 1.0 if mode == "shooting" else abs(np.mean(puck_x)) < 0.3
    is_random = starts[:, 6:8].std(0) > 0.5
    assert is_random.tolist() == [mode != "normal"] * 2


def test_either_draws_weak_or_strong_for_each_episode() -> None:
    def games(opponent: str) -> list[list[float]]:
        env, views = Hockey(opponent), []
        for seed in range(12):
            env.reset(seed=seed)
            views.append([env.step(np.zeros(4))[0].tolist() for _ in range(20)][-1])
        return views

    weak, strong, either = games("weak"), games("strong"), games("either")

    triples = list(zip(either, weak, strong, strict=True))
    kinds = {"weak" if one == w else "strong" for one, w, s in triples}
    assert all(one in (w, s) and w != s for one, w, s in triples)
    assert kinds == {"weak", "strong"}


@pytest.mark.parametrize("name", ["weak", "strong"])
def test_an_opponent_inside_plays_like_the_policy_outside(name: str) -> None:
    inside, outside = Hockey(name), Hockey()
    policy, random = SCRIPTED[name](), np.random.default_rng(0)
    for seed in range(5):
        mine, _ = inside.reset(seed=seed)
        both, _ = outside.reset(seed=seed)
        for _ in range(40):
            np.testing.assert_allclose(mine, both[0], atol=1e-2)
            action = random.uniform(-1.0, 1.0, 4).astype(np.float32)
            mine, *ours = inside.step(action)
            both, *theirs = outside.step(np.stack([action, policy.act_batch(both[1:])[0]]))
            assert ours[1:3] == theirs[1:3]


@pytest.mark.slow
def test_strong_beats_weak_and_weak_beats_random_and_a_still_player_does_not_win() -> None:
    def balance(names: tuple[str, str]) -> int:
        return sum(play(env, names, seed)[1] for seed in range(100))

    env = Hockey()
    assert balance(("strong", "weak")) >= 5
    assert balance(("random", "weak")) <= -5
    for opponent in ("weak", "strong"):
        env, wins = Hockey(opponent), 0
        for seed in range(20):
            env.reset(seed=seed)
            over = False
            while not over:
                *_, terminated, truncated, info = env.step(STILL[0])
                over = terminated or truncated
            wins += info["winner"]
        assert wins < 0


def test_settings_apply_at_the_next_reset() -> None:
    env = Hockey("weak")
    env.reset(seed=0)
    env.opponent, env.mode = "strong", "defence"
    for _ in range(100):
        assert not env.step(STILL[0])[3]  # still 250 steps, not 80

    obs, _ = env.reset()

    assert np.hypot(obs[14], obs[15]) == pytest.approx(60.0)
    n_steps = 1
    while not any(env.step(STILL[0])[2:4]):
        n_steps += 1
    assert n_steps <= 80


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("mode", "defense", "mode='defense': unknown; choose from normal, shooting, defence"),
        (
            "opponent",
            "best",
            "opponent='best': unknown; choose from weak, strong, basic, either, or",
        ),
        ("opponent", None, "opponent=None: the number of players is fixed; make another env"),
    ],
)
def test_settings_that_do_not_fit_are_refused(name: str, value: Any, error: str) -> None:
    env = Hockey("weak")
    setattr(env, name, value)

    with pytest.raises(ValueError, match=error):
        env.reset()


def test_a_game_continues_from_a_snapshot() -> None:
    env, other = Hockey(), Hockey()
    obs, _ = env.reset(seed=1)
    for _ in range(30):
        action = np.concatenate([SCRIPTED["strong"]().act_batch(obs)])
        obs, *_ = env.step(action)

    other, saved = restore_snapshot(other, take_snapshot(env, obs))  # type: ignore[assignment]

    assert np.array_equal(saved, obs)
    for _ in range(100):
        action = SCRIPTED["strong"]().act_batch(obs)
        obs, *rest = env.step(action)
        theirs, *their_rest = other.step(action)
        assert np.array_equal(obs, theirs)
        assert rest == their_rest
    assert why_no_snapshot(Hockey("weak"), lambda: Hockey("weak")) is None


def test_the_picture_shows_rackets_and_puck() -> None:
    env = hockey_in(state_of((-2.0, 1.0), (-1.0, 0.5), (1.0, 2.0)), render_mode="rgb_array")

    image = env.render()

    assert image is not None
    assert (image.shape, image.dtype) == ((384, 480, 3), np.uint8)
    red, _, blue = (int(part) for part in image[192 - 48, 240 - 98])
    assert red > 200 > blue
    red, _, blue = (int(part) for part in image[192 + 24, 240 + 50])
    assert blue > 150 > red
    assert image[192 - 96, 240 + 48].max() < 40
    assert Hockey().render() is None

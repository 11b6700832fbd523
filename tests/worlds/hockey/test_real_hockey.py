"""RealHockey: the game of hockey-env, without the faults of that package."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from ml_pipeline.assembly.compose import checked_config, compose_config
from ml_pipeline.assembly.players import load_player, open_arena
from ml_pipeline.envs.snapshots import why_no_snapshot
from ml_pipeline.envs.vec_env import ParallelEnv, SerialEnv, WorkerError
from ml_pipeline.worlds.hockey.real_hockey import RealHockey, _Game, _Start

pytest.importorskip("Box2D", reason="needs make box2d")
hockey_env = pytest.importorskip(
    "hockey.hockey_env", reason="needs the package hockey-env: docs/hockey.md"
)

KINDS: list[dict[str, Any]] = [
    {},
    {"opponent": "weak", "mode": "defence"},
    {"opponent": "strong", "discrete": True},
    {"discrete": True, "mode": "shooting"},
    {"opponent": "either"},
]


def play(env: Any, n_steps: int) -> list[Any]:
    """The results of some steps, over the ends of episodes; goals need long moves."""
    results, action = [], None
    for step in range(n_steps):
        if step % 10 == 0:
            action = env.action_space.sample()
        obs, *rest = env.step(action)
        results.append((obs.tolist(), *rest))
        if rest[1] or rest[2]:
            results.append(env.reset()[0].tolist())
    return results


def started(seed: int = 0, **kwargs: Any) -> RealHockey:
    env = RealHockey(**kwargs)
    env.action_space.seed(seed)
    env.reset(seed=seed)
    return env


def long_moves(seed: int) -> Any:
    moves = np.random.default_rng(seed).uniform(-1, 1, (25, 8))
    return np.repeat(moves, 10, axis=0).astype(np.float32)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kwargs", KINDS)
def test_gymnasiums_checker_and_the_snapshot_trial_accept_every_kind(kwargs: Any) -> None:
    make = partial(RealHockey, **kwargs)

    check_env(make(), skip_render_check=True)
    assert why_no_snapshot(make(), make) is None


def test_both_players_see_and_move_as_in_the_package() -> None:
    env, package = started(seed=4), hockey_env.HockeyEnv()
    start = env._game._start
    package.reset(one_starting=start.player_0_starts, seed=start.seed)

    for action in long_moves(1)[:100]:
        obs, reward, *_, info = env.step(action.reshape(2, 4))
        first, their_reward, _, _, their_info = package.step(action)

        assert obs.dtype == np.float32
        assert obs[0].tolist() == first.astype(np.float32).tolist()
        assert obs[1].tolist() == package.obs_agent_two().astype(np.float32).tolist()
        assert reward == their_reward
        second = package.get_reward_agent_two(package.get_info_agent_two())
        del their_info["winner"]  # only our last step has one
        assert info == {**their_info, "reward_opponent": second}


def test_a_goal_terminates_and_the_time_limit_truncates() -> None:
    shots = started(opponent="weak", mode="shooting")
    shots._game.env.puck.position = (8.5, 4.0)  # just before the goal of player 1
    shots._game.env.puck.linearVelocity = (20.0, 0.0)
    is_over = False
    while not is_over:
        _, reward, is_over, truncated, info = shots.step(np.zeros(4))
    assert (truncated, info["winner"], reward) == (False, 1, 10.0)

    idle = started()
    ends = [idle.step(np.zeros((2, 4)))[2:] for _ in range(251)]
    assert [end[:2] for end in ends] == [(False, False)] * 250 + [(False, True)]
    assert ends[-1][2]["winner"] == 0


def test_an_episode_depends_on_its_seed_alone() -> None:
    for kwargs in ({"opponent": "weak"}, {"mode": "defence"}):
        used, new = started(**kwargs), RealHockey(**kwargs)
        play(used, 300)
        used._game.env.player1_has_puck = 5  # an episode can end like this
        for env in (used, new):
            env.action_space.seed(7)
            env.reset(seed=7)

        assert play(used, 60) == play(new, 60)


def test_contacts_of_the_last_episode_do_not_change_the_next_one() -> None:
    used, new = _Game(), _Game()
    used.start(_Start("normal", True, 0))
    for action in long_moves(118)[:40]:
        used.step(action)

    for game in (used, new):
        game.start(_Start("normal", True, 18))
        for action in long_moves(18):
            game.step(action)

    assert used.view.tolist() == new.view.tolist()


def test_who_starts_and_the_puck_differ_between_episodes() -> None:
    env = started()
    pucks = np.array([env.reset()[0][0, 12] for _ in range(20)])

    assert len(set(pucks)) == 20
    assert 0 < (pucks > 0).sum() < 20


def test_numpys_global_generator_is_neither_used_nor_changed() -> None:
    results = []
    for seed in (1, 2):
        np.random.seed(seed)
        expected = np.random.RandomState(seed).standard_normal(3).tolist()
        results.append(play(started(opponent="strong"), 100))
        assert np.random.standard_normal(3).tolist() == expected

    assert results[0] == results[1]


@pytest.mark.parametrize("kwargs", [{"opponent": "strong"}, {"discrete": True}])
def test_a_pickle_continues_the_episode_and_the_next_ones_exactly(kwargs: Any) -> None:
    env = started(seed=3, **kwargs)
    play(env, 330)

    copy = pickle.loads(pickle.dumps(env))

    assert play(copy, 400) == play(env, 400)


def test_an_env_that_cannot_be_restored_exactly_says_so() -> None:
    env = started()
    env.step(env.action_space.sample())
    env._game.view = env._game.view + 1e-12  # as if another Box2D had computed it

    with pytest.raises(RuntimeError, match="does not repeat the saved episode exactly"):
        pickle.loads(pickle.dumps(env))


def test_the_eighth_discrete_action_shoots() -> None:
    left = {}
    for move in (0, 7):
        env = started(discrete=True)
        env._game.env.player1_has_puck = env._game.env.player2_has_puck = 9
        left[move] = env.step([move, 0])[0][:, 16].tolist()

    assert left == {0: [8.0, 8.0], 7: [0.0, 8.0]}


def test_one_player_plays_the_game_of_two_against_the_opponents_actions() -> None:
    one, two = started(seed=5, opponent="strong"), started(seed=5)

    for _ in range(100):
        obs, reward, *rest = one.step(one.action_space.sample())
        both, *same = two.step(one._game._actions[-1].reshape(2, 4))
        assert (both[0].tolist(), *same) == (obs.tolist(), reward, *rest)


def test_mode_and_opponent_change_at_the_next_reset() -> None:
    env = started(opponent="weak")
    env.set_wrapper_attr("mode", "defence")
    env.set_wrapper_attr("opponent", "basic")
    assert env._game.env.max_timesteps == 250

    env.reset()
    assert env._game.env.max_timesteps == 80
    assert env._rival is not None
    assert not env._rival.weak


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("opponent", "hard", "opponent=hard: unknown; choose weak, strong, basic, either"),
        ("opponent", None, "opponent=None: the number of players is fixed; make another env"),
        ("mode", "attack", "mode=attack: unknown; choose normal, shooting, defence"),
    ],
)
def test_wrong_values_are_refused(key: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        setattr(RealHockey(opponent="weak"), key, value)
    with pytest.raises(ValueError, match="render_mode=window: unknown"):
        RealHockey(render_mode="window")


def test_scripted_players_follow_the_opponents_of_the_package() -> None:
    env = started(mode="defence")
    obs = np.stack([env.reset()[0] for _ in range(10)]).reshape(20, 18)
    obs[::3, 16] = 5.0  # has the puck

    for name, make in RealHockey.scripted.items():
        theirs = hockey_env.BasicOpponent(weak=name == "weak")
        expected = np.array([theirs.act(row.astype(np.float64)) for row in obs])

        # The package turns its racket at random; x, y and the shot must be equal.
        actions = make().act_batch(obs)[:, [0, 1, 3]]
        assert actions == pytest.approx(expected[:, [0, 1, 3]], abs=1e-5)


def test_evaluations_play_against_the_opponents_of_the_package() -> None:
    config = checked_config(compose_config(["env=real_hockey"]))
    arena = open_arena(config.env)
    obs = np.stack([started().reset(seed=seed)[0] for seed in range(3)]).reshape(6, 18)
    obs[:, 16] = 5.0  # has the puck

    strong = load_player("strong", arena, noise_seed=0).policy
    actions = np.array([strong.act_batch(obs) for _ in range(40)])

    theirs = hockey_env.BasicOpponent(weak=False)
    expected = np.array([theirs.act(row.astype(np.float64)) for row in obs])
    assert actions[0][:, [0, 1, 3]] == pytest.approx(expected[:, [0, 1, 3]], abs=1e-5)
    assert len(np.unique(actions[..., 2])) > 2  # swings its racket at random


def test_spawned_workers_play_the_same_games() -> None:
    makers = [partial(RealHockey, opponent="weak")] * 2
    serial = SerialEnv(makers, seed=2)
    parallel = ParallelEnv(makers, seed=2, start_method="spawn", n_workers=2)
    actions = np.random.default_rng(0).uniform(-1, 1, (260, 2, 4)).astype(np.float32)

    ours, theirs = ([env.reset()[0].tolist()] for env in (serial, parallel))
    for action in actions:
        ours.append(serial.step(action)[0].tolist())
        theirs.append(parallel.step(action)[0].tolist())
    with pytest.raises(WorkerError, match="mode=attack: unknown"):
        parallel.set_attr("mode", "attack")
    parallel.close()

    assert ours == theirs


def test_a_frame_is_drawn_without_a_window() -> None:
    pytest.importorskip("pygame", reason="the package renders with pygame")
    env = started(render_mode="rgb_array")

    frame = env.render()

    assert (frame.shape, frame.dtype) == ((480, 600, 3), np.uint8)
    assert len(np.unique(frame.reshape(-1, 3), axis=0)) > 5
    env.close()


def test_a_window_shows_the_game_without_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    pygame = pytest.importorskip("pygame", reason="the package renders with pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    env = started(opponent="weak", render_mode="human")

    env.step(env.action_space.sample())

    assert pygame.display.get_surface().get_size() == (600, 480)
    assert pygame.mixer.get_init() is None
    env.close()
    assert not pygame.display.get_init()

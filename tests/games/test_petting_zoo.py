"""PettingZoo: its games as two-player envs, and two-player envs as its games."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import REPOSITORY, Capture
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from two_player_games import TugOfWar

from ml_pipeline.envs.factory import EnvError, EnvFactory
from ml_pipeline.envs.snapshots import why_no_snapshot
from ml_pipeline.envs.vec_env import ParallelEnv, SerialEnv
from ml_pipeline.games.petting_zoo import PettingZoo
from ml_pipeline.worlds.hockey.env import Hockey

pettingzoo = pytest.importorskip(
    "pettingzoo", reason="needs the extra: pip install -e '.[pettingzoo]'"
)
# These import pettingzoo.
from petting_zoo_games import parallel_tug_of_war  # noqa: E402
from pettingzoo.test import parallel_api_test, parallel_seed_test  # noqa: E402

from ml_pipeline.games.parallel_api import TwoPlayerParallelEnv  # noqa: E402

ROCK_PAPER_SCISSORS = {"_target_": "pettingzoo.classic.rps.rps.parallel_env", "max_cycles": 5}
TUG_OF_WAR = {"_target_": "petting_zoo_games.parallel_tug_of_war"}
UNEQUAL_SIDES = {"_target_": "petting_zoo_games.UnequalSides"}


def side(obs: Any) -> list[float]:
    """Which agent each player is: 0 is left, 1 is right."""
    return list(obs[:, 0])


def moves(first: float, second: float) -> Any:
    return np.array([[first], [second]], dtype=np.float32)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gymnasiums_checker_accepts_a_game_of_pettingzoo() -> None:
    pytest.importorskip("pygame", reason="PettingZoo's classic games import pygame")
    env = PettingZoo(ROCK_PAPER_SCISSORS)

    check_env(env, skip_render_check=True)

    assert env.observation_space == spaces.MultiDiscrete([4, 4])
    assert env.action_space == spaces.MultiDiscrete([3, 3])
    env.reset(seed=0)
    obs, reward, *_, info = env.step(np.array([1, 0]))  # paper beats rock
    assert (obs.tolist(), reward, info) == ([0, 1], 1.0, {"reward_opponent": -1.0})
    ends = [env.step(np.array([2, 2])) for _ in range(4)]
    assert [end[2:4] for end in ends] == [(False, False)] * 3 + [(False, True)]
    assert ends[-1][4]["winner"] == 1


def test_agents_swap_sides_with_their_observations_actions_and_rewards() -> None:
    env = PettingZoo(UNEQUAL_SIDES)
    obs, _ = env.reset(seed=1)
    rewards = {}
    for _ in range(2):
        _, *rest = env.step(moves(0.5, 0.25))
        rewards[side(obs)[0]] = rest[0], rest[-1]["reward_opponent"]
        obs, _ = env.reset()

    # As left, player 0 is paid twice its 0.5; as right, player 1 is paid twice its 0.25.
    assert rewards == {0.0: (1.0, 0.25), 1.0: (0.5, 0.5)}


def test_sides_alternate_from_a_first_one_that_the_seed_decides() -> None:
    env, fixed = PettingZoo(UNEQUAL_SIDES), PettingZoo(UNEQUAL_SIDES, swap_sides=False)

    first = [side(env.reset(seed=seed)[0]) for seed in range(20)]
    again = [side(env.reset(seed=seed)[0]) for seed in range(20)]
    following = [side(env.reset()[0]) for _ in range(4)]

    assert first == again
    assert [0.0, 1.0] in first
    assert [1.0, 0.0] in first
    assert following[0] == following[2] == following[1][::-1] == following[3][::-1]
    assert following[0] != first[-1]
    assert {tuple(side(fixed.reset(seed=seed)[0])) for seed in range(9)} == {(0.0, 1.0)}


def test_unseeded_episodes_repeat_after_the_same_seed_and_differ() -> None:
    noise = []
    for _ in range(2):
        env = PettingZoo(UNEQUAL_SIDES)
        noise.append([env.reset(seed=seed)[0][0, 1] for seed in (5, None, None)])

    assert noise[0] == noise[1]
    assert len(set(noise[0])) == 3


def test_episode_ends_with_the_first_agent_and_the_larger_sum_wins() -> None:
    env = PettingZoo(UNEQUAL_SIDES, swap_sides=False)
    env.reset(seed=0)
    env.step(moves(-0.5, -0.75))  # sums: -1.0 and -0.75
    *_, terminated, truncated, info = env.step(moves(0.0, 1.0))
    assert (terminated, truncated, info["winner"]) == (True, False, -1)

    env.reset()
    ends = [env.step(moves(0.25, 0.5))[2:] for _ in range(3)]
    assert [end[:2] for end in ends] == [(False, False)] * 2 + [(False, True)]
    assert ends[-1][2]["winner"] == 0


@pytest.mark.parametrize(
    ("game", "words"),
    [
        (
            {**UNEQUAL_SIDES, "agents": ["left", "middle", "right"]},
            "game._target_=petting_zoo_games.UnequalSides: has 3 agents; choose a game for two",
        ),
        (
            {"_target_": "petting_zoo_games.UnequalSpaces"},
            r"the action spaces of the agents differ, Box\(.*\(1,\).*\(2,\)",
        ),
        (
            {"_target_": "two_player_games.TugOfWar"},
            "TugOfWar: returned TugOfWar, not a ParallelEnv; games that take turns often have",
        ),
        ({"length": 3}, "env.kwargs.game needs a _target_"),
    ],
)
def test_other_games_are_refused_in_one_line(game: Any, words: str) -> None:
    target = "ml_pipeline.games.petting_zoo.PettingZoo"
    with pytest.raises(EnvError, match=words) as caught:
        EnvFactory(None, target=target, kwargs={"game": game})()
    assert "\n" not in str(caught.value)


def test_episodes_continue_exactly_or_the_env_says_why_not() -> None:
    pytest.importorskip("pygame", reason="PettingZoo's classic games import pygame")
    for game, words in (
        (UNEQUAL_SIDES, "None"),
        (TUG_OF_WAR, "None"),
        (ROCK_PAPER_SCISSORS, "TypeError: raw_env is an EzPickle, which is unpickled as a new env"),
    ):
        make = partial(PettingZoo, game)
        assert str(why_no_snapshot(make(), make)) == words


def test_spawned_workers_play_the_same_games() -> None:
    makers = [partial(PettingZoo, TUG_OF_WAR)] * 2
    serial = SerialEnv(makers, seed=2)
    parallel = ParallelEnv(makers, seed=2, start_method="spawn", n_workers=2)
    actions = np.random.default_rng(0).uniform(-1, 1, (50, 2, 2, 1)).astype(np.float32)

    ours, theirs = ([env.reset()[0].tolist()] for env in (serial, parallel))
    for action in actions:
        ours.append([each.tolist() for each in serial.step(action)[:4]])
        theirs.append([each.tolist() for each in parallel.step(action)[:4]])
    parallel.close()

    assert ours == theirs


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("game", [TugOfWar, Hockey])
def test_two_player_env_passes_pettingzoos_own_tests(game: Any, discrete: bool) -> None:
    def make() -> TwoPlayerParallelEnv:
        return TwoPlayerParallelEnv(game(discrete=discrete))

    parallel_api_test(make(), num_cycles=300)
    parallel_seed_test(make, num_cycles=300)


def test_two_player_env_survives_the_way_to_pettingzoo_and_back() -> None:
    there_and_back: Any = PettingZoo(TUG_OF_WAR, swap_sides=False)
    direct = TugOfWar()
    there_and_back.reset(seed=3)
    direct.reset(seed=3)
    direct.rope = there_and_back._game._env.rope  # the other env draws its seed
    actions = np.random.default_rng(1).uniform([[0.5], [0.0]], [[1.0], [0.5]], (20, 2, 1))

    for action in actions.astype(np.float32):
        theirs, ours = there_and_back.step(action), direct.step(action)

        assert theirs[0].tolist() == ours[0].tolist()
        assert theirs[1:4] == ours[1:4]
        assert theirs[4]["reward_opponent"] == -ours[1]
        if ours[2] or ours[3]:
            assert theirs[4]["winner"] == ours[4]["winner"] == 1
            break
    else:
        pytest.fail("no episode ended")


def test_both_agents_get_their_view_their_reward_and_their_winner() -> None:
    game = parallel_tug_of_war()
    game.reset(seed=0)
    pull = {"player_0": np.ones(1, np.float32), "player_1": np.zeros(1, np.float32)}

    obs, rewards, *_ = game.step(pull)

    assert obs["player_0"][0] == -obs["player_1"][0] != 0.0
    assert rewards == {"player_0": 0.0, "player_1": 0.0}
    assert game.agents == ["player_0", "player_1"]
    while game.agents:
        _, rewards, terminated, truncated, infos = game.step(pull)
    assert rewards == {"player_0": 1.0, "player_1": -1.0}
    assert infos == {"player_0": {"winner": 1}, "player_1": {"winner": -1}}
    assert terminated == {"player_0": True, "player_1": True}
    assert truncated == {"player_0": False, "player_1": False}


def test_env_for_one_player_is_refused() -> None:
    with pytest.raises(ValueError, match="not the space of two equal players"):
        TwoPlayerParallelEnv(gym.make("CartPole-v1"))


def test_render_mode_reaches_the_game() -> None:
    env = PettingZoo(UNEQUAL_SIDES, render_mode="rgb_array")

    assert env.render().shape == (4, 4, 3)
    assert env.metadata["render_modes"] == ["rgb_array"]


def test_example_of_the_docs_prints_what_it_says(capsys: Capture) -> None:
    page = (REPOSITORY / "docs" / "hockey.md").read_text()
    example = page.partition("```python\n")[2].partition("```")[0]

    exec(example, {})

    assert f"# {capsys.readouterr().out}" == example[example.rindex("# ") :]

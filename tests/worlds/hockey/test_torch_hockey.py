"""TorchHockey, compared step by step with its reference: Hockey, which uses Python floats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensor_transitions import check_compiles_as_one_graph, check_stays_on_the_device
from torch import Tensor

from ml_pipeline.worlds.hockey.env import Hockey, steps_of
from ml_pipeline.worlds.hockey.opponents import SCRIPTED
from ml_pipeline.worlds.hockey.physics import GOAL_X, PUCK_X, PUCK_Y
from ml_pipeline.worlds.hockey.tensor_env import TorchHockey

MODES = ["normal", "shooting", "defence"]


def states_of(references: list[Hockey]) -> tuple[Tensor, ...]:
    columns = zip(*(reference.state for reference in references), strict=True)
    return tuple(torch.tensor(column, dtype=torch.float32) for column in columns)


def put(env: TorchHockey, references: list[Hockey]) -> None:
    n_steps = torch.tensor([reference._n_steps for reference in references])
    env.position = env.position._replace(state=states_of(references), n_steps=n_steps)


def compare_one_step(
    env: TorchHockey, references: list[Hockey], action: Any, seen: dict[str, int]
) -> None:
    """Step both from the same state, and compare. Rounding may decide otherwise at a threshold."""
    before = [reference.state for reference in references]
    put(env, references)
    _, reward, terminated, truncated, infos = env.step(torch.as_tensor(action))
    winner = infos["final_info"]["winner"]
    for i, reference in enumerate(references):
        obs, their_reward, *ends, info = reference.step(action[i])
        difference = np.abs(infos["final_obs"][i].numpy() - obs) / (1.0 + np.abs(obs))
        seen["steps"] += 1
        if difference.max() > 2e-4 or ends != [terminated[i].item(), truncated[i].item()]:
            seen["different"] += 1
        else:
            assert reward[i].item() == pytest.approx(their_reward, abs=2e-4)
            assert winner[i].item() == info.get("winner", 0)
        count(before[i], reference.state, seen)
        if any(ends):
            seen["goals" if ends[0] else "draws"] += 1
            reference.reset()


def count(before: tuple[float, ...], after: tuple[float, ...], seen: dict[str, int]) -> None:
    """Count what happened, so that a test can tell that it has seen everything."""
    seen["catches"] += max(after[17:]) == 15.0
    seen["shots"] += max(before[17:]) > 0.0 and max(after[17:]) == 0.0
    x, y, vx, vy = after[12:16]
    seen["long walls"] += before[15] * vy < 0.0 and abs(y) > PUCK_Y - 1.0
    seen["short walls"] += before[14] * vx < 0.0 and PUCK_X - 1.0 < abs(x) < GOAL_X
    seen["hits"] += abs(before[16] - after[16]) > 0.1
    seen["rackets"] += after[3] + after[9] == 0.0 and before[3] + before[9] > 0.0


@pytest.mark.parametrize(
    "mode", ["normal", *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES[1:])]
)
def test_every_step_equals_that_of_the_reference(mode: str) -> None:
    n = 60
    names = ("steps", "different", "goals", "draws", "catches", "shots")
    seen = dict.fromkeys((*names, "long walls", "short walls", "hits", "rackets"), 0)
    references = [Hockey(mode=mode) for _ in range(n)]
    for seed, reference in enumerate(references):
        reference.reset(seed=seed)
        reference._n_steps = steps_of(mode) - 70 + seed  # so that some end as a draw
    env = TorchHockey(n, mode=mode, seed=0)
    env.reset()
    random = np.random.default_rng(0)
    policies = [SCRIPTED["weak"](), SCRIPTED["strong"]()]
    action = np.zeros((n, 2, 4), dtype=np.float32)
    for t in range(80):
        obs = np.stack([reference._observe() for reference in references])
        for player in range(2):
            for part, policy in enumerate(policies):
                rows = slice(part * n // 2, (part + 1) * n // 2)
                action[rows, player] = policy.act_batch(obs[rows, player])
        if t % 8 == 0:
            noise = random.uniform(-1.5, 1.5, (n, 2, 4)).astype(np.float32)
        action[::3] += noise[::3]
        compare_one_step(env, references, action, seen)

    # A float32 may fall on the other side of a threshold, but rarely.
    assert seen.pop("different") <= 0.002 * seen["steps"]
    del seen["rackets"]  # these rarely meet
    assert min(seen.values()) >= 1, seen


def test_rackets_that_meet_move_like_those_of_the_reference() -> None:
    reference = Hockey()
    reference.reset(seed=0)
    racket = (-0.52, 0.0, 0.9, 9.5, 1.0, 2.0)
    reference.state = (*racket, *racket, 0.0, 3.0, *[0.0] * 5)
    env = TorchHockey(1, seed=0)
    env.reset()
    seen = dict.fromkeys(("steps", "different", "catches", "shots", "hits", "rackets"), 0)
    seen |= {"long walls": 0, "short walls": 0}
    action = np.array([[[1.0, 0.5, 1.0, 0.0]] * 2], dtype=np.float32)

    for _ in range(20):
        compare_one_step(env, [reference], action, seen)

    assert seen["different"] == 0
    assert seen["rackets"] >= 1


@pytest.mark.parametrize("opponent", ["weak", "strong"])
def test_an_opponent_plays_like_the_policy_of_two_players(opponent: str) -> None:
    n = 32
    one, two = TorchHockey(n, opponent=opponent, seed=3), TorchHockey(n, seed=3)
    obs, _ = one.reset()
    both, _ = two.reset()
    random = np.random.default_rng(0)
    policy = SCRIPTED[opponent]()
    for _ in range(50):
        np.testing.assert_allclose(obs, both[:, 0], rtol=1e-3, atol=1e-3)
        action = torch.as_tensor(random.uniform(-1.0, 1.0, (n, 4)).astype(np.float32))
        two.position = one.position  # differences of one step, not of a whole game
        both = two.observe(two.position.state)
        theirs = torch.as_tensor(policy.act_batch(both[:, 1].numpy()))
        obs, *_ = one.step(action)
        both, *_ = two.step(torch.stack((action, theirs), dim=1))


@pytest.mark.parametrize("mode", MODES)
def test_starts_equal_those_of_the_reference(mode: str) -> None:
    n = 2000
    env = TorchHockey(n, mode=mode, seed=0)
    ours = env.reset()[0].numpy().reshape(n, -1)
    reference = Hockey(mode=mode)
    theirs = np.stack([reference.reset(seed=seed)[0] for seed in range(n)]).reshape(n, -1)

    for statistic in (np.mean, np.std, np.min, np.max):
        a, b = statistic(ours, axis=0), statistic(theirs, axis=0)
        np.testing.assert_allclose(a, b, atol=0.15 + 0.1 * theirs.std(0).max())


def test_a_reset_gives_every_number_of_the_state_its_own_tensor() -> None:
    env = TorchHockey(2, seed=0)
    env.reset()

    assert len({part.data_ptr() for part in env.position.state}) == 19


def test_spaces_and_single_env_are_those_of_hockey() -> None:
    for opponent in (None, "weak"):
        env, reference = TorchHockey(2, opponent=opponent), Hockey(opponent)
        assert env.single_observation_space == reference.observation_space
        assert env.single_action_space == reference.action_space
    single = TorchHockey.single_env(opponent="strong", mode="defence", render_mode="rgb_array")
    single.reset(seed=0)
    assert isinstance(single, Hockey)
    assert (single.opponent, single.mode) == ("strong", "defence")
    assert single.render() is not None


def test_final_info_has_the_winner_of_every_ended_game() -> None:
    env = TorchHockey(3, seed=0)
    env.reset()
    state = list(env.position.state)
    state[12], state[14] = torch.tensor([3.8, -3.8, 1.0]), torch.tensor([20.0, -20.0, 0.0])
    state[13] = torch.zeros(3)
    env.position = env.position._replace(state=tuple(state))

    _, reward, terminated, _, infos = env.step(torch.zeros(3, 2, 4))

    assert terminated.tolist() == [True, True, False]
    assert infos["final_info"]["winner"].tolist() == [1, -1, 0]
    assert infos["final_info"]["_winner"].tolist() == [True, True, False]
    assert reward[0] == 10.0
    assert -11.0 < reward[1] < -10.0


@pytest.mark.parametrize("opponent", [None, "strong"])
def test_a_transition_never_reads_from_the_device_and_has_no_float64(opponent: str | None) -> None:
    dtypes = check_stays_on_the_device(TorchHockey(4, opponent=opponent, seed=1))

    assert torch.float64 not in dtypes


@pytest.mark.slow  # tracing takes seconds
@pytest.mark.parametrize("opponent", [None, "strong"])
def test_a_transition_compiles_as_one_graph(opponent: str | None) -> None:
    check_compiles_as_one_graph(TorchHockey(4, opponent=opponent, seed=1))


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"mode": "attack"}, "mode='attack': unknown; choose from normal, shooting, defence"),
        ({"opponent": "me"}, "opponent='me': unknown; choose from weak, strong, basic, or null"),
    ],
)
def test_unknown_settings_are_refused(kwargs: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        TorchHockey(2, **kwargs)

"""RewardShaping: hand arithmetic of its terms, and returns that stay those of the env."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import read_rows, small
from staged_envs import Duel, Line

from ml_pipeline.analysis.evaluate import evaluate
from ml_pipeline.assembly.run import train
from ml_pipeline.assembly.trust import check_names
from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.envs.snapshots import restore_snapshot, take_snapshot
from ml_pipeline.envs.wrappers.reward_shaping import RewardShaping
from ml_pipeline.errors import UserError
from ml_pipeline.runs.signatures import UntrustedError
from ml_pipeline.worlds.hockey import shaping_terms as hockey_terms

POTENTIAL = {"_target_": "staged_envs.position", "kind": "potential"}
PLAIN = {"_target_": "staged_envs.moved", "kind": "plain"}
SHAPING = "ml_pipeline.envs.wrappers.reward_shaping.RewardShaping"


def rewards(env: gym.Env[Any, Any], actions: list[Any]) -> list[float]:
    env.reset(seed=1)
    return [float(env.step(action)[1]) for action in actions]


def test_a_potential_term_adds_the_discounted_difference_and_is_zero_at_a_terminal_state() -> None:
    env = RewardShaping(Line(length=3), {"position": {**POTENTIAL, "weight": 2.0}}, gamma=0.5)

    shaped = rewards(env, [2, 2, 0])  # x = 0, 1, 2, and 1 where it ends

    # 1 + 2 * (0.5 * phi(next) - phi); phi = 10 x
    assert shaped == [1 + 2 * (5 - 0), 1 + 2 * (10 - 10), 1 + 2 * (0 - 20)]


def test_a_truncated_episode_ends_with_the_potential_of_its_final_observation() -> None:
    line = Line(length=2, ending="truncated")
    env = RewardShaping(line, {"position": {**POTENTIAL, "weight": 1.0}}, gamma=0.5)

    assert rewards(env, [2, 2]) == [1 + 0.5 * 10 - 0, 1 + 0.5 * 20 - 10]


@pytest.mark.parametrize("actions", [[2, 2, 2, 2], [0, 0, 2, 1], [1, 1, 1, 1]])
def test_what_potential_terms_add_to_a_return_does_not_depend_on_the_actions(
    actions: list[int],
) -> None:
    terms = {"position": {**POTENTIAL, "weight": 3.0}}
    env = RewardShaping(Line(length=4, start=7), terms, gamma=0.5)

    added = [0.5**t * (reward - 1.0) for t, reward in enumerate(rewards(env, actions))]

    assert sum(added) == -3.0 * 70.0  # - weight * phi(first observation)


def test_a_plain_term_sees_both_observations_although_the_env_reuses_its_buffer() -> None:
    env = RewardShaping(Line(), {"moved": {**PLAIN, "weight": 0.5}})

    assert rewards(env, [2, 0, 1]) == [1.5, 0.5, 1.0]


def test_a_new_weight_counts_from_the_next_reset_on() -> None:
    env = RewardShaping(Line(), {"moved": {**PLAIN, "weight": 0.0}})
    env.reset(seed=1)
    env.set_wrapper_attr("weight_moved", 4.0)

    before = env.step(2)[1]

    assert (before, rewards(env, [2])) == (1.0, [5.0])


def test_terms_see_the_row_of_player_0() -> None:
    terms = {
        "position": {**POTENTIAL, "weight": 1.0},
        "action": {"_target_": "staged_envs.first_action", "weight": 1.0},
    }
    both = RewardShaping(Duel(), terms, gamma=1.0)
    one = RewardShaping(Duel(opponent="weak"), terms, gamma=1.0)
    action = np.array([[0.25, 0.5], [-1.0, -1.0]], dtype=np.float32)

    expected = [10.25, 10.25, 1.0 - 20.0 + 0.25]
    assert rewards(both, [action] * 3) == expected
    assert rewards(one, [action[0]] * 3) == expected


class GoesRight:
    """A policy that always takes action 2."""

    def act_batch(self, obs: Any, *_: Any, **__: Any) -> Any:
        return np.full(len(obs), 2)

    def new_memory(self, n_envs: int) -> None: ...

    def mask_of(self, infos: Any) -> None: ...


def test_an_evaluation_reports_the_return_of_the_env() -> None:
    terms = {"moved": {**PLAIN, "weight": 100.0}}

    for length, max_steps, n_cut in [(3, 10, 0), (30, 3, 1)]:
        env = RewardShaping(Line(length), terms)
        how: Any = {"n_episodes": 1, "seed": 5, "deterministic": True}
        result = evaluate(GoesRight(), env, **how, max_episode_steps=max_steps)

        (episode,) = result.episodes
        assert (episode.episode_return, episode.length, result.n_cut) == (3.0, 3, n_cut)


def test_a_time_limit_around_the_wrapper_keeps_the_return() -> None:
    limited = gym.wrappers.TimeLimit(RewardShaping(Line(99), {"moved": PLAIN}), 2)
    limited.reset(seed=1)
    limited.step(2)

    *_, truncated, info = limited.step(2)

    assert truncated
    assert info["episode"] == {"r": 2.0, "l": 2}
    assert info["shaping_return"] == 2.0


def test_a_snapshot_continues_with_the_same_rewards() -> None:
    terms = {"position": {**POTENTIAL, "weight": 1.0}, "moved": {**PLAIN, "weight": 1.0}}
    env = RewardShaping(Line(9), terms)
    env.reset(seed=1)
    obs = env.step(2)[0]
    other, _ = restore_snapshot(RewardShaping(Line(9), terms), take_snapshot(env, obs))

    assert other.step(2)[1:] == env.step(2)[1:]


@pytest.mark.parametrize("agent", ["ppo", "dqn"])
def test_a_run_logs_the_return_of_the_env_and_what_shaping_added(here: Path, agent: str) -> None:
    shaping = f"{{_target_: {SHAPING}, terms: {{position: {{_target_: staged_envs.position, "
    shaping += "kind: potential, weight: 1000.0}}, gamma: '${agent.gamma}'}"
    dqn = ["agent=dqn", "n_envs=2", "total_steps=64", "agent.learning_starts=16"]
    dqn += ["agent.batch_size=8", "device=cpu", "logger=none", "vec_env=serial"]
    settings = small() if agent == "ppo" else dqn

    run = train([*settings, "env.target=staged_envs.Line", f"+env.wrappers.shaping={shaping}"])

    last = read_rows(run.run_dir)[-1]
    assert last["rollout/episode_return_mean_100"] == "4.0"
    assert last["eval/episode_return"] == "4.0"
    assert run.mean_reward == 4.0
    assert abs(float(last["rollout/info/shaping_return"])) > 1.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"terms": {"a": {**PLAIN, "kind": "odd"}}}, r"terms.a.kind=odd: must be potential or"),
        ({"terms": {"a": {**PLAIN, "kind": "potential"}}}, r"calls it with \(obs\)"),
        ({"terms": {"a": {**POTENTIAL, "kind": "plain"}}}, r"\(obs, action, next_obs, info\)"),
        ({"terms": {"a": {**PLAIN, "scale": 2}}}, r"terms.a.scale is unknown"),
        ({"terms": {"a": {"weight": 2}}}, r"terms.a needs a _target_"),
        ({"terms": {"a": {"_target_": "staged_envs.mooved"}}}, "did you mean moved"),
        ({"terms": {"a": {**PLAIN, "weight": "much"}}}, "weight_a=much: must be a finite number"),
        ({"terms": {"a": PLAIN}, "gamma": 2}, "gamma=2: must be between 0 and 1"),
        ({"terms": {"a": PLAIN}, "gama": 1}, "env.wrappers.shaping.gama is unknown"),
    ],
)
def test_wrong_terms_are_refused_with_one_line(settings: dict[str, Any], words: str) -> None:
    shaping = {"_target_": SHAPING, **settings}
    make_env = EnvFactory(None, "staged_envs.Line", wrappers={"shaping": shaping})

    with pytest.raises(UserError, match=words) as refused:
        make_env()

    assert "\n" not in str(refused.value)


def test_a_term_that_is_not_finite_is_named() -> None:
    terms = {"odd": {"_target_": "staged_envs.not_a_number", "kind": "potential"}}
    env = RewardShaping(Line(), terms)

    with pytest.raises(ValueError, match="the reward term odd returned nan; it must be finite"):
        env.reset(seed=1)


def test_hockey_terms_read_the_observation_of_a_player() -> None:
    obs = np.zeros(18, dtype=np.float32)
    obs[:2], obs[12:14] = (-3.0, 0.0), (0.0, 4.0)  # 5 metres apart
    held = obs.copy()
    held[14], held[16] = -12.5, 15.0

    assert hockey_terms.closeness(obs) == -0.5
    assert hockey_terms.touch(obs, None, held, {}) == 1.0
    assert hockey_terms.touch(held, None, held, {}) == 0.0
    assert hockey_terms.direction(obs, None, held, {}) == -0.5


def test_a_config_of_another_user_may_name_our_terms_and_no_other_function() -> None:
    def config(target: str) -> dict[str, Any]:
        terms = {"a": {"_target_": target}}
        return {"env": {"wrappers": {"shaping": {"_target_": SHAPING, "terms": terms}}}}

    check_names(config("ml_pipeline.worlds.hockey.shaping_terms.touch"), "config.yaml")
    for target in ("staged_envs.moved", "os.system", "ml_pipeline.targets.import_module"):
        with pytest.raises(UntrustedError, match="can run any code"):
            check_names(config(target), "config.yaml")

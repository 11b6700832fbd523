"""ForeignVectorEnv: vector envs of other libraries, in all three autoreset modes."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from small_agents import Played, agent_in
from vector_transitions import in_infos, shown, transitions

from ml_pipeline import train
from ml_pipeline.analysis.check_env import check_env
from ml_pipeline.config.train import VecEnvConfig
from ml_pipeline.envs.factory import EnvFactory
from ml_pipeline.envs.foreign_vector_env import ForeignVectorEnv
from ml_pipeline.errors import BrokenEnvError, UserError

HERE = "test_foreign_vector_env"
CARTPOLE = "gymnasium.envs.classic_control.cartpole.CartPoleVectorEnv"
NEXT_STEP, SAME_STEP, DISABLED = (
    AutoresetMode.NEXT_STEP,
    AutoresetMode.SAME_STEP,
    AutoresetMode.DISABLED,
)


class Wandering(gym.Env[Any, Any]):
    """A random walk that starts anywhere, terminates beyond 2 and is truncated after 7 steps.

    Every other action is forbidden by a mask in its infos; a final info allows none.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-9.0, 9.0, (1,), np.float32)
        self.action_space = spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.time = self.np_random.uniform(-1.0, 1.0), 0
        return self._seen(), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        self.place += self.np_random.normal() * 0.5 + 0.1 * int(action)
        terminated, truncated = abs(self.place) > 2.0, self.time >= 7
        info = self._info()
        if terminated or truncated:
            info = {"action_mask": np.zeros(4, np.int8), "is_success": terminated}
        return self._seen(), float(self.place), terminated, truncated, info

    def _seen(self) -> Any:
        return np.array([self.place], np.float32)

    def _info(self) -> dict[str, Any]:
        return {"action_mask": (np.arange(4) % 2 == self.time % 2).astype(np.int8)}


def make_wandering(num_envs: int, mode: str = "NextStep") -> SyncVectorEnv:
    return SyncVectorEnv([Wandering] * num_envs, autoreset_mode=AutoresetMode(mode))


def make_async(num_envs: int) -> AsyncVectorEnv:
    return AsyncVectorEnv([Wandering] * num_envs, context="fork")


def make_cartpole(num_envs: int, max_episode_steps: int = 12) -> CartPoleVectorEnv:
    return CartPoleVectorEnv(num_envs, max_episode_steps=max_episode_steps)


def wrong_number(num_envs: int) -> Any:
    return make_wandering(num_envs + 1)


def no_parameter() -> Any:
    return make_wandering(2)


def no_mode(num_envs: int) -> Any:
    env = make_wandering(num_envs)
    env.metadata = {}
    return env


class Dying(CartPoleVectorEnv):
    def step(self, action: Any) -> Any:
        if self.num_envs > 1 and self.steps[0] == 20:
            raise RuntimeError("simulator lost")
        return super().step(action)


class Strange(CartPoleVectorEnv):
    """Its observations are not in its space."""

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return obs[:, :3], *rest


@pytest.mark.parametrize(
    ("make", "mode", "has_reset_rows"),
    [
        (partial(make_wandering, 3, "SameStep"), SAME_STEP, False),
        (partial(make_wandering, 3, "Disabled"), DISABLED, False),
        (partial(make_wandering, 3), NEXT_STEP, False),
        (partial(make_async, 3), NEXT_STEP, False),
        (partial(make_cartpole, 3), NEXT_STEP, True),
    ],
    ids=["same step", "disabled", "next step", "next step, async", "CartPoleVectorEnv"],
)
def test_transitions_are_those_of_the_loop_of_the_library(
    make: Any, mode: AutoresetMode, has_reset_rows: bool
) -> None:
    theirs, ours = make(), ForeignVectorEnv(make(), "env")
    final_row = in_infos if mode is SAME_STEP else shown
    expected = transitions(theirs, 1000, final_row, mode is NEXT_STEP, mode is DISABLED)

    found = transitions(ours, 1000, in_infos, ours.has_reset_rows, False)

    assert ours.has_reset_rows == has_reset_rows
    for i in range(3):
        n = min(len(expected[i]), len(found[i]))
        assert n > 800
        assert found[i][:n] == expected[i][:n]
        assert sum(each[3] for each in found[i]) > 1 or has_reset_rows
        assert sum(each[4] and not each[3] for each in found[i]) > 1
    theirs.close()
    ours.close()


def test_all_autoreset_modes_give_the_same_rollout() -> None:
    # Masks in infos included: CartPole's own reset rows are in the tests below.
    buffers = []
    for mode in ("SameStep", "Disabled", "NextStep"):
        env = ForeignVectorEnv(make_wandering(4, mode), "env")
        played = Played(env, 40, agent_in(env, action_mask="info"))
        played.collect()
        buffers.append(played.buffer)

    for buffer in buffers[1:]:
        assert buffer.is_reset is None
        for field in ("action", "reward", "terminated", "truncated", "action_mask"):
            assert np.array_equal(getattr(buffer, field), getattr(buffers[0], field)), field
        assert np.array_equal(buffer.obs[""], buffers[0].obs[""])
        assert str(buffer.final_steps) == str(buffers[0].final_steps)


def cartpole_rollout() -> Played:
    env = ForeignVectorEnv(make_cartpole(4), "env")
    played = Played(env, 64, agent_in(env))
    played.collect()
    return played


def test_a_truncated_episode_bootstraps_from_its_true_final_observation() -> None:
    played = cartpole_rollout()
    buffer = played.buffer
    cut = buffer.truncated & ~buffer.terminated

    played.finish(gamma=0.5, lam=0.0)

    rows, envs = np.nonzero(cut)
    assert len(rows) > 5
    assert set(buffer.final_steps) == set(zip(rows.tolist(), envs.tolist(), strict=True))
    # CartPole shows the final observation until its next step, which resets it.
    final = torch.from_numpy(buffer.obs[""][rows + 1, envs])
    final_value = played.agent.value_batch(played.agent.inputs({"": final.numpy()}))
    expected = 1.0 + 0.5 * final_value.numpy() - buffer.value[rows, envs]
    np.testing.assert_allclose(buffer.advantage[rows, envs], expected, rtol=1e-5)


def test_steps_that_only_reset_an_env_are_left_out_of_everything() -> None:
    played = cartpole_rollout()
    buffer = played.buffer
    done = buffer.terminated | buffer.truncated
    assert np.array_equal(buffer.is_reset[1:], done[:-1])
    assert not buffer.is_reset[0].any()

    order = buffer.transitions_in(torch.randperm(buffer.n_items))

    used = torch.bincount(order, minlength=buffer.n_items).view(64, 4).numpy()
    assert len(order) == buffer.n_items  # minibatches keep their size
    assert (used[buffer.is_reset] == 0).all()
    assert ((used[~buffer.is_reset] >= 1) & (used[~buffer.is_reset] <= 2)).all()
    lengths = [each.length for each in played.collector.episodes]
    assert max(lengths) == 12
    returns = [each.episode_return for each in played.collector.episodes]
    assert returns == lengths  # a reward of 1 per step

    played.finish(gamma=0.9, lam=0.9)
    before = buffer.advantage[~buffer.is_reset].copy()
    buffer.reward[buffer.is_reset] = 1e6  # as a hook might
    played.finish(gamma=0.9, lam=0.9)

    np.testing.assert_array_equal(buffer.advantage[~buffer.is_reset], before)
    n_transitions = int((~buffer.is_reset).sum())
    assert buffer.arrays()["rollout/advantages"].shape == (1, n_transitions)
    assert buffer.observations().shape == (1, n_transitions, 4)


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("prioritised", [False, True])
def test_replay_draws_no_step_that_only_resets_an_env(
    n_step: int, prioritised: bool, here: Path
) -> None:
    # A small ring, so that all of it is written several times.
    agent = {
        "buffer_size": 200,
        "learning_starts": 40,
        "n_step": n_step,
        "priority_exponent": 0.6 if prioritised else 0.0,
    }
    drawn: list[Any] = []
    result = train(
        "agent=dqn",
        f"env.target={CARTPOLE}",
        "+env.kwargs.max_episode_steps=8",
        "logger=none",
        n_envs=4,
        total_steps=1024,
        agent=agent,
        callbacks={"look": _look(drawn)},
        quiet=True,
    )

    assert result.env_steps == 1024
    (trainer,) = drawn
    replay = trainer.replay
    uniform = torch.linspace(0, 1, 4001)[:-1]
    index, weight = replay.draw(uniform)
    batch = replay.batch(index, weight)
    obs, reward = replay.tables["obs "], replay.tables["reward"]
    is_reset = reward[index] == 0.0  # CartPole gives 1 for every real step
    assert not is_reset.any()
    assert (reward == 0.0).any()
    if not prioritised:
        assert torch.equal(weight, torch.ones_like(weight))
        newest = {int(each) for each in index}
        n_real = int((reward[replay_rows(replay)] == 1.0).sum())
        assert len(newest) == n_real
    # After a truncation the true final observation follows, which the row after it shows.
    cut = replay.tables["final"][index] >= 0
    at = index[cut]
    if n_step == 1:
        assert cut.any()
        following = batch.next_inputs.obs[cut]
        assert torch.equal(following, obs[(at + replay.n_envs) % replay.size])


def replay_rows(replay: Any) -> Any:
    """Indices of everything that may be drawn."""
    rows = np.arange(replay.first_drawn, replay.n_written) % replay.n_rows
    return torch.from_numpy((rows[:, None] * replay.n_envs + np.arange(replay.n_envs)).ravel())


def _look(found: list[Any]) -> Any:
    from ml_pipeline.training.contracts import Callback

    class Look(Callback):
        def on_train_end(self, loop: Any) -> None:
            found.append(loop.trainer)

    return Look()


@pytest.mark.parametrize(
    ("words", "how"),
    [
        ([f"env.target={CARTPOLE}"], "4 envs in one CartPoleVectorEnv, whose step after"),
        (["env.id=CartPole-v1", "env.vector=true"], "4 envs in one CartPoleVectorEnv"),
        ([f"env.target={HERE}.make_wandering"], "4 envs in one SyncVectorEnv,"),
    ],
    ids=["class", "id", "function"],
)
def test_ppo_trains_evaluates_and_resumes_in_a_vector_env(
    words: list[str], how: str, here: Path, capsys: Any
) -> None:
    agent = {"n_steps": 32, "normalize_obs": True, "scale_reward": True}
    words = [*words, "callbacks.evaluation.n_episodes=2", "logger=none"]

    first = train(words, n_envs=4, total_steps=256, agent=agent)
    train(resume=str(first.run_dir), total_steps=512)

    said = capsys.readouterr().out
    assert how in said
    assert "its episodes cannot be saved and its dead envs are not restarted" in said
    assert "resumed at env step 256 with new episodes" in said
    with (first.run_dir / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert any(row["eval/episode_return"] for row in rows)


@pytest.mark.parametrize(
    ("target", "words", "error"),
    [
        ("wrong_number", [], r"has num_envs=2, but 1 were asked for; use the argument"),
        ("no_parameter", [], r"returned a SyncVectorEnv; give the function the parameter"),
        ("no_mode", [], r"metadata\['autoreset_mode'\] is None; set it to an"),
        ("Dying", [], r"Dying raised in step: RuntimeError: simulator lost \(test_foreign"),
        ("Strange", [], r"failed in its trial before training: ValueError: .*shape"),
        ("make_cartpole", ["network=lstm"], r"does not support network; use one"),
        ("make_cartpole", ["n_envs=auto"], r"not support n_envs=auto; give a number"),
        ("make_cartpole", ["vec_env=serial"], r"not support vec_env; leave vec_env=auto"),
        ("make_cartpole", ["+env.kwargs.num_envs=3"], r"kwargs.num_envs: n_envs sets it; remove"),
        (
            "make_cartpole",
            ["+env.wrappers.time._target_=gymnasium.wrappers.TimeAwareObservation"],
            r"env.wrappers.time: TimeAwareObservation wraps single envs, but .* is a vector env",
        ),
    ],
)
def test_mistakes_are_named_in_one_line(
    target: str, words: list[str], error: str, here: Path
) -> None:
    with pytest.raises(UserError, match=error) as caught:
        train(
            f"env.target={HERE}.{target}",
            "n_envs=4",
            "logger=none",
            *words,
            total_steps=2048,
            quiet=True,
        )

    assert "\n" not in str(caught.value)


def test_an_env_that_resets_others_with_those_that_ended_is_named() -> None:
    class ResetsAll(CartPoleVectorEnv):
        metadata = {**CartPoleVectorEnv.metadata, "autoreset_mode": DISABLED}  # noqa: RUF012

    env = ForeignVectorEnv(ResetsAll(2, max_episode_steps=30), "env.target=X")
    env.reset(seed=1)
    env.env.steps[0] = 29

    with pytest.raises(UserError, match="changed env 1, which had not ended; make it reset only"):
        env.step(np.array([0, 1]))


def test_a_dead_worker_of_an_async_env_is_one_line() -> None:
    env = ForeignVectorEnv(make_async(2), "env.target=X")
    env.reset(seed=1)
    env.env.processes[0].kill()
    env.env.processes[0].join()

    with pytest.raises(BrokenEnvError, match=r"env.target=X raised in step: \w+"):
        env.step(np.zeros(2, int))


def test_wrappers_of_vector_envs_are_applied_inside() -> None:
    scaled = {"_target_": "gymnasium.wrappers.vector.RescaleObservation"}
    scaled |= {"min_obs": -1.0, "max_obs": 1.0}  # type: ignore[dict-item]
    factory = EnvFactory(None, "test_foreign_vector_env.make_wandering", {}, {"scaled": scaled})

    env = factory.make_batch(2)

    assert env.single_observation_space.high.tolist() == [1.0]
    assert env.has_reset_rows  # how a wrapper takes a reset by mask is not known


def test_check_env_tries_a_vector_env_with_processes_of_its_own() -> None:
    factory = EnvFactory(None, "test_foreign_vector_env.make_async")

    found = check_env(factory, "Env", VecEnvConfig(), mask_key="action_mask", seconds=0.05)

    assert found.faults == []
    assert "its episodes cannot be saved" in found.remarks[-1]

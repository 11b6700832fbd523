"""ForeignDeviceEnv: tensors of another library's vector env, without a copy to the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from small_agents import Played
from test_foreign_vector_env import Wandering
from tiny_torch_envs import Bare
from vector_transitions import in_infos, shown, transitions

from ml_pipeline import train
from ml_pipeline.algorithms.ppo.agent import PPOAgent
from ml_pipeline.algorithms.ppo.algorithm import make_trainer
from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.envs.classic_control.cartpole import TorchCartPole
from ml_pipeline.envs.foreign_device_env import ForeignDeviceEnv, why_on_host
from ml_pipeline.envs.foreign_vector_env import ForeignVectorEnv
from ml_pipeline.errors import BrokenEnvError, UserError
from ml_pipeline.policy.contracts import Spaces
from ml_pipeline.policy.networks import MLP
from ml_pipeline.training.contracts import Envs, RunContext

CPU = torch.device("cpu")


def make_bare(num_envs: int) -> VectorEnv[Any, Any, Any]:
    return Bare(num_envs, "cuda" if torch.cuda.is_available() else "cpu")


def make_wandering(mode: AutoresetMode, device: str = "cpu") -> VectorEnv[Any, Any, Any]:
    reason = "Gymnasium's NumpyToTorch needs it: pip install array-api-compat"
    pytest.importorskip("array_api_compat", reason=reason)
    from gymnasium.wrappers.vector import NumpyToTorch

    return NumpyToTorch(SyncVectorEnv([Wandering] * 3, autoreset_mode=mode), device)


def number_of(action: Any) -> Any:
    return torch.from_numpy(action % 2)


def test_transitions_of_numpy_to_torch_are_those_of_the_env_inside() -> None:
    # In SAME_STEP mode, Gymnasium's wrapper fails to convert the final observations.
    mode = AutoresetMode.DISABLED
    inside = ForeignVectorEnv(SyncVectorEnv([Wandering] * 3, autoreset_mode=mode), "env")
    expected = transitions(inside, 1000, in_infos, False, False)
    env = ForeignDeviceEnv(ForeignVectorEnv(make_wandering(mode), "env"), device="cpu")

    found = transitions(env, 1000, in_infos, False, False, choose=number_of)

    for mine, theirs in zip(found, expected, strict=True):
        assert sum(each[3] for each in mine) > 1
        assert sum(each[4] and not each[3] for each in mine) > 1
        for ours, own in zip(mine, theirs, strict=True):
            assert (*ours[:2], *ours[3:]) == (*own[:2], *own[3:])
            assert ours[2] == pytest.approx(own[2], rel=1e-6)  # float32 here


def test_tensors_with_steps_that_only_reset_an_env_go_through_the_host() -> None:
    mode = AutoresetMode.NEXT_STEP
    inside = SyncVectorEnv([Wandering] * 3, autoreset_mode=mode)
    expected = transitions(inside, 1000, shown, True, False)
    env = ForeignVectorEnv(make_wandering(mode), "env")

    found = transitions(env, 1000, in_infos, True, False)

    assert env.has_reset_rows
    for mine, theirs in zip(found, expected, strict=True):
        assert [(*each[:2], *each[3:]) for each in mine] == [
            (*each[:2], *each[3:]) for each in theirs
        ]


def test_transitions_of_a_bare_tensor_env_are_its_own() -> None:
    own = TorchCartPole(3, max_episode_steps=15)
    expected = transitions(own, 1000, in_infos, False, False, choose=number_of)
    env = ForeignDeviceEnv(ForeignVectorEnv(Bare(3), "env"), device="cpu")

    assert transitions(env, 1000, in_infos, False, False, choose=number_of) == expected


def test_a_rollout_is_made_of_tensors_and_counts_episodes() -> None:
    env = ForeignDeviceEnv(ForeignVectorEnv(Bare(4), "env"), device="cpu")
    played = Played(env, 64)

    episodes = played.collect().episodes

    buffer = played.buffer
    done = buffer.terminated | buffer.truncated
    assert isinstance(buffer.obs[""], torch.Tensor)
    assert sum(each.n for each in episodes) == int(done.sum()) > 10
    ended = buffer.truncated & ~buffer.terminated
    assert not torch.equal(buffer.final_obs[ended], buffer.obs[""][1:][ended])
    assert torch.equal(buffer.final_obs[~done], buffer.obs[""][1:][~done])


@pytest.mark.parametrize(
    ("make", "device", "reason"),
    [
        (lambda: CartPoleVectorEnv(2), "cpu", "they are arrays"),
        (lambda: Bare(2), "cuda", "they are on cpu, the agent on cuda"),
        (lambda: make_wandering(AutoresetMode.NEXT_STEP), "cpu", "some steps only reset an env"),
        (lambda: Bare(2), "cpu", None),
    ],
)
def test_tensors_that_cannot_stay_go_through_the_host(make: Any, device: str, reason: Any) -> None:
    env = ForeignVectorEnv(make(), "env")
    env.reset(seed=1)

    why = why_on_host(env, torch.device(device))

    assert why is None if reason is None else reason in why


def test_mistakes_are_named_in_one_line() -> None:
    lost = ForeignDeviceEnv(ForeignVectorEnv(Bare(2, keeps_finals=False), "env"), device="cpu")
    lost.reset(seed=1)
    for t in range(14):
        lost.step(torch.full((2,), t % 2))
    with pytest.raises(UserError, match="truncated, but infos have no final_obs"):
        lost.step(torch.zeros(2, dtype=torch.int64))

    broken: Any = Bare(2)
    env = ForeignDeviceEnv(ForeignVectorEnv(broken, "env"), device="cpu")
    env.reset(seed=1)
    broken._env = None
    with pytest.raises(BrokenEnvError, match="env raised in step: AttributeError"):
        env.step(torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("agent", ["ppo", "dqn"])
def test_training_takes_the_tensors_of_a_bare_env(agent: str, here: Path, capsys: Any) -> None:
    words = [f"agent={agent}", "env.target=test_foreign_device_env.make_bare", "logger=none"]

    result = train(words, n_envs=4, total_steps=2048, callbacks={})

    assert result.env_steps == 2048
    said = capsys.readouterr().out
    place = ", with tensors on cuda" if torch.cuda.is_available() else ", cpu"
    assert f"4 envs in one Bare{place}" in said
    assert "its episodes cannot be saved" in said
    assert np.isfinite(result.mean_reward)


def test_ppo_learns_from_tensors_that_stay() -> None:
    env = ForeignDeviceEnv(ForeignVectorEnv(Bare(8), "env"), device="cpu")
    context = RunContext.alone("cpu", seed=1)
    config = PPOConfig(n_steps=32)
    spaces = Spaces(env.single_observation_space, env.single_action_space)
    agent = PPOAgent(spaces, MLP, config, context)
    trainer = make_trainer(agent, Envs([env], 1, False), config, context)

    metrics = [trainer.train_episode_vectorized() for _ in range(40)]

    lengths = [each["rollout/episode_length"] for each in metrics]
    assert max(lengths[:3]) < 14.9  # random actions lose the pole before the limit
    assert min(lengths[-3:]) > 14.5

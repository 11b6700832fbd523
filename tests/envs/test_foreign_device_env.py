"""ForeignDeviceEnv: tensors of another library's vector env, without a copy to the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from small_agents import Played, agent_in
from test_foreign_vector_env import Wandering
from tiny_torch_envs import Bare, Forbidding
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


class Masking(Bare):
    """It returns action masks, also those of final observations if ``has_final_info``."""

    def __init__(self, num_envs: int, *, has_final_info: bool = True) -> None:
        super().__init__(num_envs)
        self._env: Any = Forbidding(num_envs)
        self._has_final_info = has_final_info
        for name in ("observation_space", "action_space"):
            setattr(self, name, getattr(self._env, name))
            setattr(self, f"single_{name}", getattr(self._env, f"single_{name}"))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._env.reset(seed=seed)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        *outcome, infos = self._env.step(actions)
        names = ["final_obs", "action_mask", *(["final_info"] * self._has_final_info)]
        return (*outcome, {name: infos[name] for name in names})  # type: ignore[return-value]


class ChoiceOfMasks(Masking):
    """Its masks have one array per choice."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, infos = super().reset(seed=seed)
        parts = np.full(self.num_envs, None, dtype=object)
        for env, mask in enumerate(infos["action_mask"].numpy()):
            parts[env] = (mask,)
        return obs, {"action_mask": parts}


class ResetByMask(VectorEnv[Any, Any, Any]):
    """Three envs that the caller resets; step t of an episode allows the action t mod 3 alone."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012

    def __init__(self) -> None:
        self.num_envs = 3
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.single_action_space = spaces.Discrete(3)
        self.observation_space = batch_space(self.single_observation_space, 3)
        self.action_space = batch_space(self.single_action_space, 3)
        self._t = torch.zeros(3, dtype=torch.int64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        which = (options or {}).get("reset_mask", np.ones(3, dtype=bool))
        self._t[torch.from_numpy(which)] = 0
        return self._shown()

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        reward = torch.where(actions == self._t % 3, 1.0, -100.0)
        self._t += 1
        terminated = self._t > torch.arange(3)
        obs, infos = self._shown()
        return obs, reward, terminated, torch.zeros_like(terminated), infos

    def _shown(self) -> tuple[Any, dict[str, Any]]:
        mask = torch.nn.functional.one_hot(self._t % 3, 3)
        return self._t.float().unsqueeze(1), {"action_mask": mask}


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


def test_action_masks_in_the_infos_are_those_of_the_env() -> None:
    own = Forbidding(3)
    given, silent = (
        ForeignDeviceEnv(ForeignVectorEnv(Masking(3, has_final_info=has), "env"), device="cpu")
        for has in (True, False)
    )
    first = [env.reset(seed=1)[1]["action_mask"] for env in (own, given, silent)]
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], first[2])

    actions = torch.zeros(3, dtype=torch.int64)
    for _ in range(12):
        _, wanted = own.transition(own.position, actions)
        *_, infos = own.step(actions)
        done = infos["_final_obs"]
        _, result = given.transition(given.position, actions)
        _, without = silent.transition(silent.position, actions)
        assert torch.equal(result.action_mask, infos["action_mask"])
        assert torch.equal(result.final_mask[done], wanted.final_mask[done])
        assert without.final_mask.all()  # a missing mask allows everything


def test_envs_that_are_reset_by_a_mask_show_the_action_masks_of_their_next_episode() -> None:
    env = ForeignDeviceEnv(ForeignVectorEnv(ResetByMask(), "env"), device="cpu")
    env.reset(seed=1)

    for t in range(1, 7):
        _, result = env.transition(env.position, torch.zeros(3, dtype=torch.int64))
        length = torch.arange(3) + 1  # of the episodes of each env
        assert result.action_mask.int().argmax(dim=1).tolist() == (t % length % 3).tolist()
        last = torch.where(result.terminated, length, t % length)
        assert result.final_mask.int().argmax(dim=1).tolist() == (last % 3).tolist()


@pytest.mark.parametrize("make", [lambda: Masking(4), ResetByMask])
def test_an_agent_uses_the_masks_of_another_library(make: Any) -> None:
    env = ForeignDeviceEnv(ForeignVectorEnv(make(), "env"), device="cpu")
    played = Played(env, 32, agent_in(env, action_mask="info"))

    played.collect()

    assert (played.buffer.reward == 1.0).all()


def test_a_rollout_is_made_of_tensors_and_counts_episodes() -> None:
    env = ForeignDeviceEnv(ForeignVectorEnv(Bare(4), "env"), device="cpu")
    played = Played(env, 64)

    episodes = played.collect().episodes

    buffer = played.buffer
    done = buffer.terminated | buffer.truncated
    assert isinstance(buffer.obs[""], torch.Tensor)
    assert sum(each.n for each in episodes) == int(done.sum()) > 10
    ended = buffer.truncated & ~buffer.terminated
    assert not torch.equal(buffer.final_obs[""][ended], buffer.obs[""][1:][ended])
    assert torch.equal(buffer.final_obs[""][~done], buffer.obs[""][1:][~done])


@pytest.mark.parametrize(
    ("make", "device", "reason"),
    [
        (lambda: CartPoleVectorEnv(2), "cpu", "they are arrays"),
        (lambda: Bare(2), "cuda", "they are on cpu, the agent on cuda"),
        (lambda: make_wandering(AutoresetMode.NEXT_STEP), "cpu", "some steps only reset an env"),
        (lambda: ChoiceOfMasks(2), "cpu", "action masks are not one array"),
        (lambda: Masking(2), "cpu", None),
        (lambda: Bare(2), "cpu", None),
    ],
)
def test_tensors_that_cannot_stay_go_through_the_host(make: Any, device: str, reason: Any) -> None:
    env = ForeignVectorEnv(make(), "env")
    _, infos = env.reset(seed=1)

    why = why_on_host(env, torch.device(device), infos)

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

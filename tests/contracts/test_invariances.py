"""What must not change what is learnt: units of actions and rewards, and the order of things."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import read_rows, small
from gymnasium import spaces
from small_agents import agent_for, minibatch

from ml_pipeline.algorithms.ppo.loss import Rates
from ml_pipeline.algorithms.sac.agent import SACAgent
from ml_pipeline.algorithms.sac.config import SACConfig
from ml_pipeline.assembly.run import train
from ml_pipeline.policy.contracts import Spaces
from ml_pipeline.policy.networks import MLP
from ml_pipeline.training.contracts import RunContext
from ml_pipeline.training.returns import gae

PPO = [*small(), "agent=ppo", "env=pendulum", "network.hidden_sizes=[8]"]
SAC = [
    *("agent=sac", "env=pendulum", "n_envs=4", "total_steps=128", "vec_env=serial", "device=cpu"),
    *("logger=none", "network.hidden_sizes=[8]", "agent.learning_starts=32", "agent.batch_size=8"),
    *("agent.iteration_length=16", "agent.updates_per_env_step=0.25"),
    *("callbacks.evaluation.n_episodes=2", "callbacks.checkpoints.final_episodes=2"),
]


class OtherUnits(gym.Wrapper[Any, Any, Any, Any]):
    """Actions and rewards in other units; powers of two are exact."""

    def __init__(self, env: Any, action: float = 1.0, reward: float = 1.0) -> None:
        super().__init__(env)
        self._action, self._reward = action, reward
        bounds = env.action_space.low * action, env.action_space.high * action
        self.action_space = spaces.Box(*bounds)

    def step(self, action: Any) -> Any:
        obs, reward, *rest = self.env.step(action / self._action)
        return obs, float(reward) * self._reward, *rest


def rows_of(settings: list[str], **units: float) -> list[dict[str, str]]:
    given = {"_target_": "test_invariances.OtherUnits", **units}
    options = ", ".join(f"{name}: {value}" for name, value in given.items())
    return read_rows(train([*settings, f"+env.wrappers.units={{{options}}}"]).run_dir)


@pytest.mark.parametrize(
    ("box_policy", "factor"), [("squashed", 2.0**-9), ("squashed", 2.0**7), ("gsde", 2.0**-4)]
)
def test_sac_learns_the_same_in_any_unit_of_actions(
    here: Path, box_policy: str, factor: float
) -> None:
    settings = [*SAC, f"agent.box_policy={box_policy}"]

    assert rows_of(settings, action=factor) == rows_of(settings)


@pytest.mark.parametrize("factor", [2.0**-9, 2.0**7])
def test_squashed_ppo_learns_the_same_in_any_unit_of_actions(here: Path, factor: float) -> None:
    settings = [*PPO, "agent.box_policy=squashed"]

    ours, theirs = rows_of(settings, action=factor)[-1], rows_of(settings)[-1]

    moved = float(ours.pop("policy/entropy")) - float(theirs.pop("policy/entropy"))
    assert moved == pytest.approx(np.log(factor), abs=1e-4)  # the entropy is in the env's units
    assert_close(ours, theirs)


@pytest.mark.parametrize("factor", [0.01, 1000.0])
def test_ppo_with_scaled_rewards_learns_the_same_in_any_unit_of_rewards(
    here: Path, factor: float
) -> None:
    settings = [*PPO, "agent.scale_reward=true", "callbacks.evaluation.eval_every_steps=10_000"]

    ours, theirs = rows_of(settings, reward=factor)[-1], rows_of(settings)[-1]

    for name in ("eval/episode_return", "eval/episode_return_std"):
        assert float(ours.pop(name)) == pytest.approx(factor * float(theirs.pop(name)), rel=1e-3)
    assert_close(ours, theirs)


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_the_order_of_dict_keys_does_not_change_a_policy(algorithm: str) -> None:
    leaves: list[tuple[str, Any]] = [
        ("speed", spaces.Box(-1, 1, (2,), np.float32)),
        ("angle", spaces.Box(-1, 1, (3,), np.float32)),
        ("gear", spaces.Discrete(4)),
    ]
    observed = {"angle": np.ones((1, 3)), "gear": np.array([2]), "speed": np.full((1, 2), 0.5)}
    actions, outcomes = spaces.Box(-2.0, 2.0, (2,), np.float32), []

    for order in (leaves, leaves[::-1], sorted(leaves)):
        space: Any = spaces.Dict(dict(order))
        agent: Any = agent_for(space, actions)
        if algorithm == "sac":
            context = RunContext.alone(seed=1)
            agent = SACAgent(Spaces(space, actions), MLP, SACConfig(), context)
        outcomes.append(agent.act_batch(observed, True).tolist())

    assert outcomes[1:] == outcomes[:-1]


def test_the_order_of_envs_does_not_change_an_update() -> None:
    observations, actions = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(3)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    weights = []
    for index in (torch.arange(32), order):
        agent = agent_for(observations, actions)
        agent.update(minibatch(agent).take(index), Rates(1e-2, 0.2, 0.01))
        weights.append(agent.adam.values)

    torch.testing.assert_close(*weights)

    steps = torch.rand(3, 5, 4, generator=torch.Generator().manual_seed(0))
    ongoing, swapped = steps[0] < 0.8, torch.tensor([2, 0, 3, 1])
    whole = gae(steps[0], steps[1], steps[2], ongoing, gamma=0.9, lam=0.8)
    moved = steps[..., swapped]
    columns = gae(moved[0], moved[1], moved[2], ongoing[:, swapped], gamma=0.9, lam=0.8)
    assert torch.equal(columns, whole[:, swapped])


def assert_close(ours: dict[str, str], theirs: dict[str, str]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        expected = pytest.approx(float(theirs[name] or 0), rel=1e-3, abs=1e-4)
        assert float(value or 0) == expected, name

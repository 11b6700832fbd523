"""TD3, a shelf item in one file: its arithmetic, and that the rest of the package takes it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import only_run, read_rows
from gymnasium import spaces

from ml_pipeline.algorithms.replay.contracts import ReplayBatch
from ml_pipeline.algorithms.td3.agent import TD3Agent, TD3Config
from ml_pipeline.assembly.run import train
from ml_pipeline.policy.contracts import Obs, PolicyInput, Spaces
from ml_pipeline.policy.distributions import ActionSpaceError
from ml_pipeline.policy.networks import MLP
from ml_pipeline.training.contracts import RunContext

OBS = spaces.Box(-1, 1, (3,), np.float32)


def made(action: spaces.Space[object] | None = None, **settings: float) -> TD3Agent:
    config = TD3Config(**settings)  # type: ignore[arg-type]
    network = partial(MLP, hidden_sizes=[8], activation="relu")
    box = spaces.Box(-2, 2, (2,), np.float32) if action is None else action
    return TD3Agent(Spaces(OBS, box), network, config, RunContext.alone())


def batch_of(n: int) -> ReplayBatch:
    generator = torch.Generator().manual_seed(0)
    obs, following = torch.randn(2, n, 3, generator=generator)
    action = torch.rand(n, 2, generator=generator) * 2.0 - 1.0
    reward, weight = torch.randn(n, generator=generator), torch.ones(n)
    inputs = (PolicyInput(each, None, None, None) for each in (obs, following))
    first, second = inputs
    return ReplayBatch(first, action, reward, second, torch.full((n,), 0.9), weight)


def test_target_is_the_lower_value_of_the_target_actors_action() -> None:
    agent, batch = made(target_noise=0.0), batch_of(4)

    target = agent._target(batch)

    obs = batch.next_inputs.obs
    action = agent.target_actor(obs, None).tanh()
    values = [critic(obs, action) for critic in agent.target_critics]
    expected = batch.reward + 0.9 * torch.minimum(*values)
    torch.testing.assert_close(target, expected)


def test_actor_and_targets_move_in_every_second_update_only() -> None:
    agent, batch = made(policy_delay=2), batch_of(16)
    moved = []
    for _ in range(4):
        before = agent.adams["actor"].values.clone(), agent._targets["critics"].clone()
        agent.update(batch, agent.rates(0.0, 1e-2))
        after = agent.adams["actor"].values, agent._targets["critics"]
        moved.append([not torch.equal(*each) for each in zip(before, after, strict=True)])

    assert moved == [[False, False], [True, True]] * 2


@pytest.mark.parametrize("bound", [0.1, 1.0, 200.0])
def test_actions_are_scaled_to_the_bounds(bound: float) -> None:
    agent = made(spaces.Box(-bound, bound, (2,), np.float32))
    for part in agent.actor.parameters():
        part.data.fill_(5.0)

    action = agent.act_batch(np.ones((1, 3), np.float32), deterministic=True)

    np.testing.assert_allclose(action, np.full((1, 2), bound), rtol=1e-5)


def test_dropout_does_not_act_in_evaluations() -> None:
    class Dropping(MLP):
        def forward(self, obs: Obs) -> torch.Tensor:
            return torch.nn.functional.dropout(super().forward(obs), 0.5, self.training)

    box = spaces.Box(-2, 2, (2,), np.float32)
    agent = TD3Agent(Spaces(OBS, box), Dropping, TD3Config(), RunContext.alone())
    obs = np.ones((4, 3), np.float32)

    first, second = (agent.act_batch(obs, deterministic=True) for _ in range(2))

    np.testing.assert_array_equal(first, second)


def test_discrete_actions_are_refused() -> None:
    with pytest.raises(ActionSpaceError, match=r"td3: action space Discrete\(2\) is not a Box"):
        made(spaces.Discrete(2))


def test_yaml_that_names_only_the_algorithm_accepts_every_key_of_its_class(here: Path) -> None:
    settings = [
        *("agent=td3", "env=pendulum", "n_envs=2", "device=cpu", "logger=none", "vec_env=serial"),
        *("agent.gamma=0.98", "agent.learning_starts=64", "agent.batch_size=16"),
        *("agent.iteration_length=16", "~callbacks.evaluation"),
    ]
    whole = train([*settings, "total_steps=192", "run_root=whole"]).run_dir

    train([*settings, "total_steps=128"])
    resumed = train([f"resume={only_run(here)}", "total_steps=192"]).run_dir

    assert "gamma: 0.98" in (resumed / "config.yaml").read_text()
    assert read_rows(resumed) == read_rows(whole)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_td3_learns_pendulum(here: Path) -> None:
    run = train(
        [
            *("agent=td3", "env=pendulum", "n_envs=1", "device=cpu", "logger=none", "seed=1"),
            *("total_steps=6000", "callbacks.evaluation.eval_every_steps=6000"),
        ]
    ).run_dir

    # Random actions reach -1200.
    assert float(read_rows(run)[-1]["eval/episode_return"]) > -600.0

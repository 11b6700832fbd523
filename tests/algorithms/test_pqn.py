"""PQN: its targets, its masks, and that the rest of the package takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import Capture, error_line, read_rows, small, small_auto
from gymnasium import spaces

from ml_pipeline.__main__ import main
from ml_pipeline.algorithms.pqn.agent import PQNAgent, PQNBatch, PQNConfig
from ml_pipeline.algorithms.pqn.trainer import PQNTrainer, QRollout
from ml_pipeline.assembly.run import train
from ml_pipeline.envs.foreign_vector_env import ForeignVectorEnv
from ml_pipeline.policy.contracts import Spaces
from ml_pipeline.policy.networks import MLP
from ml_pipeline.training.contracts import Envs, RunContext
from ml_pipeline.training.env_batch import FinalObservation

OBS = spaces.Box(-100, 100, (1,), np.float32)
PQN = ["agent=pqn", "network=mlp", "network.layer_norm=true"]


class Shown(MLP):
    """The features are the observation."""

    def __init__(self, observation_space: Any) -> None:
        super().__init__(observation_space)
        self.layers = torch.nn.Identity()
        self.out_features = 1


def agent_of() -> PQNAgent:
    return PQNAgent(Spaces(OBS, spaces.Discrete(2)), Shown, PQNConfig(), RunContext.alone())


def rollout_whose_values_are_the_observations() -> QRollout:
    """Rewards 1, 2, 3, 4 and observations 10, 20, 30, 40, 50; the other action is worth less."""
    agent = agent_of()
    agent.model["head"].weight.data = torch.tensor([[1.0], [-1.0]])
    agent.model["head"].bias.data.zero_()
    rollout = QRollout(4, 1, agent, on_host=True)
    rollout.obs[""][:] = np.array([10, 20, 30, 40, 50]).reshape(5, 1, 1)
    rollout.reward[:] = np.array([[1.0], [2.0], [3.0], [4.0]])
    return rollout


def targets_of(rollout: QRollout, td_lambda: float) -> list[float]:
    found = rollout.targets(rollout.inputs(), gamma=0.5, td_lambda=td_lambda)
    values: list[float] = found.flatten().tolist()
    return values


def test_target_of_one_step_adds_the_best_value_of_the_next_observation() -> None:
    assert targets_of(rollout_whose_values_are_the_observations(), 0.0) == [11, 17, 23, 29]


def test_lambda_mixes_the_next_value_with_the_next_target() -> None:
    found = targets_of(rollout_whose_values_are_the_observations(), 0.5)

    third = 3 + 0.5 * (0.5 * 40 + 0.5 * 29)
    second = 2 + 0.5 * (0.5 * 30 + 0.5 * third)
    first = 1 + 0.5 * (0.5 * 20 + 0.5 * second)
    assert found == [first, second, third, 29]


def test_target_stops_at_a_termination_and_continues_from_a_final_observation() -> None:
    rollout = rollout_whose_values_are_the_observations()
    rollout.terminated[1], rollout.truncated[2] = True, True
    rollout.finals = [(2, FinalObservation(0, {"": np.array([70.0], np.float32)}, None))]

    assert targets_of(rollout, 1.0) == [1 + 0.5 * 2, 2, 3 + 0.5 * 70, 29]


def test_update_moves_the_value_of_the_action_that_was_taken_towards_the_target() -> None:
    agent = agent_of()
    agent.model["head"].weight.data.zero_()
    inputs = agent.inputs({"": np.ones((1, 1), np.float32)})
    before = agent.values(inputs).detach().flatten()

    agent.update(PQNBatch(inputs, torch.tensor([1]), before[1:] + 5.0), 1e-2)

    after = agent.values(inputs).detach().flatten()
    assert after[1] > before[1]
    assert after[0] == before[0]


@pytest.mark.parametrize("where", ["info", "observation"])
def test_forbidden_actions_are_never_taken(where: str, here: Path) -> None:
    # The env raises if one is.
    mask = "info" if where == "info" else "auto"
    words = ["env.target=tiny_envs.ForbiddingEnv", f"+env.kwargs.where={where}"]

    train([*small(), *PQN, *words, f"agent.action_mask={mask}"])


def test_network_without_layer_norm_is_reported(here: Path, capsys: Capture) -> None:
    train([*small(), "agent=pqn", "env=cartpole"])

    assert "the network has no LayerNorm, which PQN needs to be stable" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["env=pendulum"], "agent=pqn: action space Box(-2.0, 2.0, (1,), float32) is not Discrete"),
        (["env=cartpole", "network=lstm"], "network Recurrent is recurrent"),
        (["env=cartpole", "agent.n_minibatches=33"], "a rollout has only agent.n_steps=16"),
        (["env=cartpole", "agent.td_lambda=2"], "agent.td_lambda=2"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(
    words: list[str], message: str, here: Path, capsys: Capture
) -> None:
    assert main(["train", *small(), "agent=pqn", *words]) == 1

    assert message in error_line(capsys)


def test_tensor_envs_train_too(here: Path) -> None:
    run = train([*small_auto(n_envs=8), *PQN, "env=torch_cartpole"]).run_dir

    rows = read_rows(run)
    assert all(float(row["loss/value"]) > 0 for row in rows)


def test_steps_that_only_reset_an_env_are_not_learned_from() -> None:
    env = ForeignVectorEnv(gym.make_vec("CartPole-v1", 4, "vector_entry_point"), "env")
    env_spaces = Spaces(env.single_observation_space, env.single_action_space)
    config, context = PQNConfig(n_steps=64), RunContext.alone()
    agent = PQNAgent(env_spaces, MLP, config, context)
    trainer = PQNTrainer(agent, Envs([env], 1, False), config, context)
    trainer._collect(epsilon=1.0)
    rollout = trainer._rollout
    assert rollout.is_reset.any()

    rollout.reward[rollout.is_reset] = 1e6
    metrics = trainer._learn(1e-3)

    assert metrics["loss/value"] < 1e3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pqn_learns_cartpole(here: Path) -> None:
    words = ["experiment=pqn_cartpole", "seed=1", "logger=none", "device=cpu", "vec_env=serial"]
    run = train([*words, "callbacks.evaluation.eval_every_steps=100_000"]).run_dir

    assert float(read_rows(run)[-1]["eval/episode_return"]) > 400.0

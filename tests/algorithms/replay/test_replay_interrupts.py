"""An interrupt in the middle of an iteration: training goes on in the same process."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Any

import pytest
import torch
from tiny_envs import CountingEnv
from vec_envs import forked

from ml_pipeline.algorithms.dqn.agent import DQNAgent
from ml_pipeline.algorithms.dqn.config import DQNConfig
from ml_pipeline.algorithms.replay.audit import audit
from ml_pipeline.algorithms.replay.trainer import OffPolicyTrainer
from ml_pipeline.envs.vec_env import SerialEnv
from ml_pipeline.policy.contracts import Spaces
from ml_pipeline.policy.networks import MLP
from ml_pipeline.training.contracts import Envs, RunContext


class InterruptingEnv(CountingEnv):
    """Its step number ``at`` interrupts the process that trains."""

    def __init__(self, trainer: int, at: int) -> None:
        super().__init__(9)
        self._trainer = trainer
        self._left = at

    def step(self, action: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            os.kill(self._trainer, signal.SIGINT)
            time.sleep(0.3)
        return super().step(action)


def trainer_in(env: Any) -> OffPolicyTrainer:
    spaces = Spaces(env.single_observation_space, env.single_action_space)
    config = DQNConfig(learning_starts=8, batch_size=4, iteration_length=8, buffer_size=200)
    context = RunContext.alone(seed=1)
    agent = DQNAgent(spaces, MLP, config, context)
    return OffPolicyTrainer(agent, Envs([env], 1, False), config, context)


def check_transitions(trainer: OffPolicyTrainer) -> None:
    """In ``CountingEnv`` each observation is followed by the next number, also at an end."""
    batch = trainer.replay.sample(torch.linspace(0, 1, 300)[:-1]).batch
    seen, after = (each.obs[:, 0] for each in (batch.inputs, batch.next_inputs))  # type: ignore[index]
    ongoing = batch.discount > 0
    assert torch.equal(after[ongoing], seen[ongoing] + 1)
    assert audit(trainer.replay).fault == ""


@pytest.mark.parametrize("make", [SerialEnv, forked], ids=["serial", "parallel"])
@pytest.mark.parametrize("n_before", [0, 2])
def test_an_interrupt_while_envs_step_leaves_true_transitions(make: Any, n_before: int) -> None:
    at = 8 * n_before + 3
    env = make([partial(InterruptingEnv, os.getpid(), at), partial(CountingEnv, 9)])
    trainer = trainer_in(env)
    for _ in range(n_before):
        trainer.train_episode_vectorized()
    with pytest.raises(KeyboardInterrupt):
        trainer.train_episode_vectorized()

    for _ in range(4):
        trainer.train_episode_vectorized()

    check_transitions(trainer)
    env.close()


@pytest.mark.parametrize("make", [SerialEnv, forked], ids=["serial", "parallel"])
def test_an_interrupt_while_the_agent_learns_leaves_true_transitions(make: Any) -> None:
    env = make([partial(CountingEnv, 9)] * 2)
    trainer = trainer_in(env)
    trainer.train_episode_vectorized()
    real, calls = trainer.agent.gradient_step, iter(range(99))

    def interrupted(*given: Any) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return real(*given)

    trainer.agent.gradient_step = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.train_episode_vectorized()
    trainer.agent.gradient_step = real  # type: ignore[method-assign]

    for _ in range(4):
        trainer.train_episode_vectorized()

    check_transitions(trainer)
    env.close()

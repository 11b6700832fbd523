"""A stop signal ends a long update, and the update leaves no trace."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TESTS, door_command, read_rows, small
from small_agents import CPU, agent_in
from stopped_runs import checkpoint_numbers
from tiny_envs import CountingEnv
from tiny_torch_envs import Drift

from ml_pipeline.algorithms.ppo.collect import Collector
from ml_pipeline.algorithms.ppo.trainer import PPOTrainer
from ml_pipeline.assembly.run import train
from ml_pipeline.envs.vec_env import SerialEnv
from ml_pipeline.training.contracts import RunContext

SIZES: dict[str, Any] = {"n_steps": 8, "n_minibatches": 2, "n_epochs": 3}


def trainer_of(kind: str) -> PPOTrainer:
    options = {**SIZES, "normalize_obs": True, "scale_reward": True}
    seeds = {"env_seed": 1, "noise_seed": 2}
    if kind == "tensor env, long update":
        env = Drift(2, device=CPU)
        agent = agent_in(env, **{**options, "n_epochs": 101})
        collector = Collector([env], **seeds)
    else:
        host = SerialEnv([CountingEnv] * 2, seed=1)
        agent = agent_in(host, **options, learning_rate_schedule="adaptive", fast=kind == "NumPy")
        collector = Collector([host], **seeds)
    return PPOTrainer(agent, collector, RunContext.alone(seed=3))


def numbers(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: numbers(part) for name, part in state.items()}
    return state.tolist() if isinstance(state, torch.Tensor) else str(state)


@pytest.mark.parametrize("kind", ["NumPy", "torch", "tensor env, long update"])
def test_interrupt_during_an_update_restores_everything_that_it_changed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(kind)
    trainer.train_episode_vectorized()
    before = copy.deepcopy(numbers(trainer.state_dict()))
    epoch, n_epochs = trainer.agent.epoch, 0

    def interrupted(*given: Any) -> Any:
        nonlocal n_epochs
        n_epochs += 1
        table = epoch(*given)
        if n_epochs == 2:
            raise KeyboardInterrupt
        return table

    monkeypatch.setattr(trainer.agent, "epoch", interrupted)

    with pytest.raises(KeyboardInterrupt):
        trainer.train_episode_vectorized()

    after = numbers(trainer.state_dict())
    before["collector"].pop("position")
    assert after["collector"].pop("position") == "None"  # a resume starts new episodes
    assert after == before


@pytest.mark.slow
def test_two_signals_end_an_update_of_a_million_epochs(here: Path) -> None:
    settings = small(total_steps=640, vec_env="serial", callbacks__checkpoints__every_steps=1)
    first = train([*settings, "total_steps=64"]).run_dir
    saved = checkpoint_numbers(first)
    endless = [f"resume={first}", "total_steps=640", "agent.n_epochs=1000000"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    process = subprocess.Popen(
        door_command(*endless), cwd=here, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("resumed"):
            break
    time.sleep(3)  # into the update, which takes hours

    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)

    assert process.wait(30) == 143
    assert len(read_rows(first)) == 2
    changed = {name for name, value in checkpoint_numbers(first).items() if saved[name] != value}
    assert changed == set()

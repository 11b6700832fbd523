"""Out of memory: how much a run needs, and the one line that a user gets."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Capture, only_run, small
from gymnasium import spaces
from small_agents import agent_for

from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.ppo.memory import memory_advice, rollout_bytes
from ml_pipeline.assembly.run import train
from ml_pipeline.envs.vec_env import WorkerError
from ml_pipeline.policy.networks import MLP
from ml_pipeline.policy.recurrent import Recurrent
from ml_pipeline.training.out_of_memory import (
    DeviceMemoryError,
    memory_explained,
    ran_out_of_memory,
    shown_bytes,
)

VECTOR, THREE = spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(3)
CAMERA = spaces.Dict(
    {"camera": spaces.Box(0, 255, (8, 8, 3), np.uint8), "arm": spaces.Box(-1, 1, (2,), np.float64)}
)


def test_a_rollout_needs_the_bytes_of_its_fields() -> None:
    agent = agent_for(VECTOR, THREE)

    # Observation, action, five floats, three flags and the noise.
    assert rollout_bytes(agent, n_steps=10, n_envs=7) == 10 * 7 * (4 * 4 + 8 + 5 * 4 + 3 + 4)
    of_tensor_envs = rollout_bytes(agent, n_steps=10, n_envs=7, tensor_envs=True)
    assert of_tensor_envs == 10 * 7 * (2 * 4 * 4 + 8 + 5 * 4 + 3 + 4)


def test_tensor_envs_keep_the_recurrent_state_of_every_step() -> None:
    agent = agent_for(VECTOR, THREE, partial(Recurrent, cell="gru", size=5))

    extra = [rollout_bytes(agent, n_steps=10, n_envs=7, tensor_envs=each) for each in (False, True)]

    assert extra[1] - extra[0] == 10 * 7 * (4 * 4 + 4 * 2 * 5)  # two networks of five units


def test_images_need_bytes_float64_becomes_float32_and_masks_count() -> None:
    agent = agent_for(CAMERA, spaces.MultiDiscrete([3, 2]), action_mask="info")

    fields = (8 * 8 * 3 + 2 * 4) + 2 * 8 + (3 + 2) + 5 * 4 + 3
    assert rollout_bytes(agent, n_steps=10, n_envs=7) == 10 * 7 * (fields + 2 * 4)


def test_noise_of_several_steps_is_counted_once() -> None:
    network = partial(MLP, hidden_sizes=[6])
    options = {"box_policy": "gsde", "gsde_every_steps": 4}
    agent = agent_for(VECTOR, spaces.Box(-1, 1, (2,)), network, **options)

    fields = 4 * 4 + 2 * 4 + 5 * 4 + 3
    assert rollout_bytes(agent, n_steps=10, n_envs=7) == 7 * (10 * fields + 3 * (6 * 2 * 4))


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: np.zeros((10**14, 16)),
        lambda: np.zeros((2**40, 2**40)),
        lambda: torch.zeros(10**14, 16),
        lambda: torch.zeros(10**15, 10**5),
    ],
)
def test_a_failed_allocation_is_recognised(allocate: Any) -> None:
    with pytest.raises((MemoryError, RuntimeError, ValueError)) as caught:
        allocate()

    assert ran_out_of_memory(caught.value)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 18.50 GiB, ...)"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (WorkerError("env 3 raised: MemoryError: out of memory"), False),
        (KeyError("out of memory"), False),
    ],
)
def test_only_missing_memory_counts_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert ran_out_of_memory(error) is expected


def test_a_kept_error_keeps_no_tensor_alive() -> None:
    tensors = []

    class Tracked:
        def __del__(self) -> None:
            tensors.append("gone")

    def update() -> None:
        activation = Tracked()
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 2.00 GiB {activation}")

    with (
        pytest.raises(DeviceMemoryError, match=r"on cuda \(tried to allocate 2.00 GiB\): x"),
        memory_explained("cuda", lambda: "x"),
    ):
        update()

    assert tensors == ["gone"]


def test_the_advice_names_the_needs_and_the_settings_to_change() -> None:
    agent = agent_for(VECTOR, THREE)
    config = PPOConfig(n_steps=1_000, n_minibatches=4)

    advice = memory_advice(agent, config, n_envs=100, tensor_envs=False)

    assert "n_steps=1000 x n_envs=100 needs about 5.1 MB, 51 bytes per env and step" in advice
    assert "; cpu has " in advice
    assert "Lower n_envs or agent.n_steps" in advice
    assert "raise agent.n_minibatches=4" in advice


@pytest.mark.parametrize("agent", ["dqn", "sac"])
def test_a_replay_buffer_that_is_too_large_is_explained(here: Path, agent: str) -> None:
    words = (
        r"out of memory on cpu.*: a replay buffer of agent.buffer_size=100000000000000 needs about "
        r"\d.* TB, .* per transition; cpu has .* Lower agent.buffer_size; lower agent.batch_size="
    )

    settings = [f"agent={agent}", "n_envs=2", "vec_env=serial", "device=cpu", "logger=none"]
    with pytest.raises(DeviceMemoryError, match=words):
        # Beyond the address space, so nothing is allocated.
        train([*settings, "agent.buffer_size=100000000000000"])


@pytest.mark.parametrize(
    ("n_bytes", "shown"),
    [(47, "47 bytes"), (2_500_000, "2.5 MB"), (80e9, "80 GB"), (1.5e15, "1,500.0 TB")],
)
def test_bytes_are_shown_in_a_fitting_unit(n_bytes: float, shown: str) -> None:
    assert shown_bytes(n_bytes) == shown


def test_a_rollout_that_is_too_large_is_explained_and_the_last_checkpoint_is_kept(
    here: Path, capsys: Capture
) -> None:
    run = train(small()).run_dir
    kept = (run / "checkpoints" / "latest.pt").read_bytes()
    words = r"out of memory on cpu \(tried to allocate 2.84 PiB\): a rollout of .*point is kept"

    with pytest.raises(DeviceMemoryError, match=words) as caught:
        # Beyond the address space, so nothing is allocated.
        train([f"resume={run}", "agent.n_steps=100000000000000", "total_steps=1e15"])

    assert "\n" not in str(caught.value)
    assert "failed with DeviceMemoryError" in capsys.readouterr().out
    assert (only_run(here) / "checkpoints" / "latest.pt").read_bytes() == kept

"""Devices: one word of config, refused where it is not there, and the same numbers on each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import read_rows, small

from ml_pipeline.build import load_agent, train
from ml_pipeline.device import DeviceError, resolve_device

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")


def test_auto_takes_what_is_there() -> None:
    if torch.cuda.is_available():
        expected = "cuda"
    else:
        expected = "mps" if torch.backends.mps.is_available() else "cpu"

    assert resolve_device("auto").type == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(DeviceError, match=f"device={name} asked for, but this torch sees no GPU"):
        resolve_device(name)


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_beyond_the_last_is_refused() -> None:
    with pytest.raises(DeviceError, match="from cuda:0 on"):
        resolve_device("cuda:99")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "overrides",
    [
        ["env=cartpole", "agent.normalize_obs=true", "agent.scale_reward=true"],
        ["env=pendulum", "agent.box_policy=squashed"],
        ["env=pendulum", "agent.box_policy=gsde", "network=lstm"],
        ["env=crowded_keys", "network=lstm", "network.cell=gru", "agent.shared_trunk=true"],
        ["experiment=camera_and_flag", "agent.max_kl=1.0"],
        ["env.target=tiny_envs.MixedEnv", "collector=double"],
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_training_on_the_gpu_gives_the_numbers_of_the_cpu(here: Path, overrides: list[str]) -> None:
    size = {"n_envs": 8, "total_steps": 128}
    runs = {
        device: train([*overrides, *small(device=device, **size)]).run_dir
        for device in ("cpu", "cuda:0")
    }

    first, other = (read_rows(run)[0] for run in runs.values())

    assert first.keys() == other.keys()
    for name in first:
        if first[name]:
            assert float(first[name]) == pytest.approx(float(other[name]), rel=1e-3, abs=1e-4), name
    assert load_agent(runs["cuda:0"], "latest").agent.device.type == "cpu"


@pytest.mark.gpu
@needs_gpu
def test_a_run_of_the_gpu_can_be_resumed_on_the_cpu_and_back(here: Path) -> None:
    run = train(small(device="cuda")).run_dir
    train([f"resume={run}", "total_steps=128", "device=cpu"])

    assert train([f"resume={run}", "total_steps=192", "device=cuda"]).env_steps == 192

"""Devices: how a run chooses one, its precision, and the torch kernels that training needs."""

from __future__ import annotations

import dataclasses
import mmap
import os
import platform
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
import yaml
from conftest import read_rows, small_auto
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ml_pipeline.algorithms.ppo.agent import PPOAgent
from ml_pipeline.algorithms.ppo.collect import Collector
from ml_pipeline.algorithms.ppo.trainer import PPOTrainer
from ml_pipeline.assembly.agent import build_network, with_mask_source
from ml_pipeline.assembly.build import build_env_factory
from ml_pipeline.assembly.compose import checked_config, compose_config
from ml_pipeline.assembly.run import train
from ml_pipeline.device import (
    DeviceError,
    precision_of_products,
    program_mode,
    resolve_device,
    total_memory,
)
from ml_pipeline.envs.trial import try_env
from ml_pipeline.envs.vec_env import SerialEnv
from ml_pipeline.policy.contracts import Spaces
from ml_pipeline.training.contracts import RunContext
from ml_pipeline.training.loop import Loop

# Spaces, policies, networks, normalisation and masks of all kinds.
KINDS = [
    ["env=cartpole", "agent.normalize_obs=true", "agent.scale_reward=true"],
    ["env=pendulum", "agent.dual_clip=3.0", "agent.clip_value_loss=true"],
    ["env=pendulum", "agent.box_policy=squashed", "agent.on_nonfinite=skip"],
    ["env=pendulum", "agent.box_policy=gsde", "network=lstm", "network.cell=gru"],
    ["env=crowded_keys", "network=lstm", "agent.shared_trunk=true"],
    ["env.target=tiny_envs.ForbiddingEnv"],
    ["env=lanes", "agent.box_policy=squashed"],
    ["env.target=tiny_envs.MixedEnv", "agent.normalize_obs=true", "agent.scale_reward=true"],
    ["experiment=camera_and_flag", "agent.max_kl=1.0"],
]


class Watch(TorchDispatchMode):
    """Records every torch kernel, also of the backward pass, and those that use float64."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: set[str] = set()
        self.with_float64: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func._schema.name).removeprefix("aten::")
        name += f".{func._schema.overload_name}" if func._schema.overload_name else ""
        self.kernels.add(name)
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor) and leaf.dtype == torch.float64:
                self.with_float64.add(name)
        return result


def watched(overrides: list[str]) -> Watch:
    """Two iterations in plain torch on the CPU, as other devices run them."""
    config = checked_config(compose_config([*overrides, *small_auto(n_envs=4)]))
    make_env = build_env_factory(config.env)
    trial = try_env(make_env, "test")
    config = with_mask_source(config, trial)
    network = partial(build_network, config)
    spaces = Spaces(trial.observation_space, trial.action_space)
    plain = dataclasses.replace(config.agent, fast="off")
    agent = PPOAgent(spaces, network, plain, RunContext.alone())
    env = SerialEnv([make_env] * 4, seed=1)
    skips = config.agent.on_nonfinite == "skip"
    collector = Collector([env], env_seed=1, noise_seed=2, allow_nonfinite=skips)
    with Watch() as watch:
        Loop(PPOTrainer(agent, collector, RunContext.alone())).train(128)
    return watch


@cache
def torchs_kernels() -> dict[str, dict[str, Any]]:
    path = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C one is much faster
    entries = yaml.load(path.read_text(), loader)  # both are safe
    return {entry["func"].partition("(")[0]: entry for entry in entries}


def is_on_mps(name: str) -> bool:
    entry = torchs_kernels()[name]
    if "structured_delegate" in entry:
        return is_on_mps(entry["structured_delegate"])
    keys = " ".join(entry.get("dispatch", {"Composite": ""}))  # composite kernels call others
    return "MPS" in keys or "Composite" in keys


@pytest.mark.parametrize("overrides", KINDS, ids=" ".join)
@pytest.mark.slow
def test_training_needs_no_float64_and_no_kernel_that_mps_lacks(overrides: list[str]) -> None:
    watch = watched(overrides)

    assert len(watch.kernels) > 30
    assert watch.with_float64 == set()
    # Each device has its own LSTM kernel; that of MPS is _lstm_mps.
    missing = {name for name in watch.kernels if not is_on_mps(name)}
    assert missing <= {"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"}


def test_auto_prefers_a_gpu_then_mps_then_the_cpu() -> None:
    if torch.cuda.is_available():
        expected = "cuda"
    else:
        expected = "mps" if torch.backends.mps.is_available() else "cpu"

    assert resolve_device("auto").type == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_missing_gpu_is_refused(name: str) -> None:
    with pytest.raises(DeviceError, match=f"device={name}: this torch sees no GPU"):
        resolve_device(name)


def test_the_cpu_has_the_memory_of_the_machine() -> None:
    total = total_memory(torch.device("cpu"))

    assert total is None or total > 1e8


@pytest.mark.parametrize(
    ("wanted", "device", "mode"),
    [
        ("auto", "cpu", "eager"),
        ("off", "cpu", "eager"),
        ("auto", "cuda", "graph"),
        ("graph", "cuda:1", "graph"),
        ("off", "cuda", "eager"),
        ("auto", "mps", "eager"),
    ],
)
def test_graphs_are_used_on_a_gpu_unless_they_are_off(wanted: str, device: str, mode: str) -> None:
    assert program_mode(wanted, torch.device(device)) == mode


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_graphs_on_another_device_are_refused(device: str) -> None:
    with pytest.raises(DeviceError, match=f"compile=graph: device={device} has no CUDA graphs"):
        program_mode("graph", torch.device(device))


def allows_tf32() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_the_precision_changes_nothing_for_a_cpu(precision: str) -> None:
    before = allows_tf32()

    with precision_of_products(precision, torch.device("cpu")):
        assert allows_tf32() == before


def test_the_precision_is_restored_after_an_error() -> None:
    before = allows_tf32()

    def fail() -> None:
        with precision_of_products("tf32", torch.device("cuda")):  # needs no GPU
            assert allows_tf32() == (True, True)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert allows_tf32() == before


@pytest.mark.slow
def test_a_low_precision_changes_no_run_on_the_cpu(here: Path) -> None:
    overrides = ["env=torch_cartpole", *small_auto(), "~callbacks.evaluation"]

    exact, coarse = (
        read_rows(train([*overrides, f"precision={each}"]).run_dir) for each in ("float32", "bf16")
    )

    assert exact == coarse


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting belongs to glibc")
def test_a_cpu_run_uses_freed_memory_again_without_new_pages() -> None:
    code = """
import resource, sys, torch
from ml_pipeline.device import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def step():
    held = [torch.ones(2**18) for _ in range(8)]  # 1 MiB each
for n_steps in (3, 20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(n_steps):
        step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    # glibc's own setting changes with the tensors freed before, so fix it.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}

    def faults(word: str) -> int:
        words = [sys.executable, "-c", code, word]
        return int(subprocess.run(words, env=environment, capture_output=True, check=True).stdout)

    n_pages = 20 * 8 * 2**20 // mmap.PAGESIZE
    if platform.machine() == "x86_64":  # elsewhere torch may bring an allocator of its own
        assert faults("do not") > 0.8 * n_pages
    assert faults("keep") < 0.1 * n_pages

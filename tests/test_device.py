"""Devices: one word of config, refused where it is not there, and the same numbers on each."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
import yaml
from conftest import read_rows, small
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ml_pipeline import build
from ml_pipeline.agents.ppo import PPOAgent
from ml_pipeline.build import load_agent, train
from ml_pipeline.device import DeviceError, resolve_device, total_memory
from ml_pipeline.envs.vec_env import SerialEnv
from ml_pipeline.runs.loggers import read_metrics
from ml_pipeline.training.collectors import Collector
from ml_pipeline.training.memory import DeviceMemoryError
from ml_pipeline.training.ppo_trainer import PPOTrainer

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")

# All that a run may be made of: spaces, policies, networks, normalisation, masks.
KINDS = [
    ["env=cartpole", "agent.normalize_obs=true", "agent.scale_reward=true"],
    ["env=pendulum", "agent.dual_clip=3.0", "agent.clip_value_loss=true"],
    ["env=pendulum", "agent.box_policy=squashed", "agent.on_nonfinite=skip"],
    ["env=pendulum", "agent.box_policy=gsde", "network=lstm", "network.cell=gru"],
    ["env=crowded_keys", "network=lstm", "agent.shared_trunk=true"],
    ["env.target=tiny_envs.ForbiddingEnv"],
    ["env.target=tiny_envs.MixedEnv", "agent.normalize_obs=true", "agent.scale_reward=true"],
    ["experiment=camera_and_flag", "agent.max_kl=1.0"],
]


class Watch(TorchDispatchMode):
    """Notes every kernel that torch calls, also in the backward pass, and those with doubles."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: set[str] = set()
        self.with_doubles: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func._schema.name).removeprefix("aten::")
        name += f".{func._schema.overload_name}" if func._schema.overload_name else ""
        self.kernels.add(name)
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor) and leaf.dtype == torch.float64:
                self.with_doubles.add(name)
        return result


def watched(overrides: list[str]) -> Watch:
    """Two iterations on the CPU of what other devices run: torch, and nothing by hand."""
    config = build.checked_config(build.compose_config([*overrides, *small(n_envs=4)]))
    make_env = build.build_env_factory(config)
    first = make_env()
    config = build.with_mask_source(config, first, first.reset(seed=1)[1], {})
    network = partial(build.build_network, config)
    spaces = first.observation_space, first.action_space
    device = torch.device("cpu")
    agent = PPOAgent(*spaces, network, config.agent, device=device, seed=1, by_hand=False)
    env = SerialEnv([make_env] * 4, seed=1)
    skips = config.agent.on_nonfinite == "skip"
    collector = Collector([env], env_seed=1, noise_seed=2, allow_nonfinite=skips)
    with Watch() as watch:
        PPOTrainer(agent, collector, seed=1).train(128)
    return watch


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


@pytest.mark.parametrize("overrides", KINDS, ids=" ".join)
def test_no_double_reaches_torch_in_training(overrides: list[str]) -> None:
    watch = watched(overrides)

    assert len(watch.kernels) > 30
    assert watch.with_doubles == set()


@pytest.mark.parametrize("overrides", KINDS, ids=" ".join)
def test_mps_has_every_kernel_that_training_calls(overrides: list[str]) -> None:
    path = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    known = {entry["func"].partition("(")[0]: entry for entry in yaml.safe_load(path.read_text())}

    def on_mps(name: str) -> bool:
        entry = known[name]
        if "structured_delegate" in entry:
            return on_mps(entry["structured_delegate"])
        keys = " ".join(entry.get("dispatch", {"Composite": ""}))  # made of others, if it has none
        return "MPS" in keys or "Composite" in keys

    kernels = watched(overrides).kernels

    # An LSTM has a kernel of its own on each device: _lstm_mps is the one there.
    missing = {name for name in kernels if not on_mps(name)}
    assert missing <= {"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"}


def test_the_cpu_has_the_memory_of_the_machine() -> None:
    total = total_memory(torch.device("cpu"))

    assert total is None or total > 1e8


@pytest.mark.gpu
@needs_gpu
def test_a_run_on_the_gpu_tells_what_it_holds_of_it(here: Path) -> None:
    rows = read_metrics(train(small(device="cuda", total_steps=320)).run_dir / "metrics.csv")

    assert 0.0 < float(rows[0]["gpu/memory_mb"]) < (total_memory(torch.device("cuda")) or 0) / 1e6
    busy = [float(row["gpu/utilization"]) for row in rows if row.get("gpu/utilization")]
    assert all(0.0 <= share <= 1.0 for share in busy)  # none, where nvidia-ml-py is missing


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("hidden_sizes", "words"),
    [
        ("[1024,1024]", r"minibatch of 65536 about .* GB in the network; cuda has .* GB, of which"),
        ("[8388608]", "the network alone does not fit"),
    ],
)
def test_running_out_of_the_memory_of_the_gpu_is_one_line(
    here: Path, hidden_sizes: str, words: str
) -> None:
    size = {"n_envs": 8, "agent__n_steps": 8192, "agent__n_minibatches": 1, "total_steps": 65536}
    total = total_memory(torch.device("cuda")) or 0
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(256e6 / total)
    try:
        with pytest.raises(DeviceMemoryError, match=words):
            train([*small(device="cuda", **size), f"network.hidden_sizes={hidden_sizes}"])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


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

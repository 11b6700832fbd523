"""TritonPPO and the kernel for advantages: the numbers of plain torch, on a GPU and interpreted."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import partial
from typing import Any

import fused_against_plain
import numpy as np
import pytest
import torch
from conftest import REPOSITORY, TESTS
from fused_against_plain import BOX, CASES, TWO, broken_differences, differences, gae_differences
from gymnasium import spaces

from ml_pipeline.agents.networks import MLP
from ml_pipeline.agents.ppo import PPOAgent
from ml_pipeline.config.ppo import PPOConfig

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton, which has the kernels, is missing"
)

BROKEN = ["obs", "advantage", "value_target"]

# How far apart is still the same.
TOLERANCES = {"float32": 1e-4, "tf32": 1e-2, "bf16": 5e-2}
# A row beyond its clip has no gradient: where rounding moves one there, the difference is large.
GRADIENT_TOLERANCES = {"float32": 1e-4, "tf32": 5e-2, "bf16": 1.5e-1}
# A draw near the border between two choices may fall on the other side.
SHARE_OF_DRAWS = {"float32": 0.005, "tf32": 0.02, "bf16": 0.06}


def too_far(found: dict[str, float], precision: str = "float32") -> dict[str, float]:
    """Those differences that are too large; whatever is no number among them."""
    gradient = GRADIENT_TOLERANCES[precision]
    most = {
        "gradient": gradient,
        "moment 0": gradient,
        "moment 1": gradient,
        "weights": min(TOLERANCES[precision], 5e-3),  # one step of Adam's is not much more
        "sample": max(SHARE_OF_DRAWS[precision], TOLERANCES[precision]),
        "steps": 0.0,
    }
    usual = TOLERANCES[precision]
    return {name: value for name, value in found.items() if not value <= most.get(name, usual)}


@gpu
@needs_gpu
@needs_triton
@pytest.mark.parametrize("precision", list(TOLERANCES))
@pytest.mark.parametrize("name", list(CASES))
def test_on_a_gpu_the_kernels_give_the_numbers_of_plain_torch(name: str, precision: str) -> None:
    assert too_far(differences(CASES[name], torch.device("cuda"), precision), precision) == {}


@gpu
@needs_gpu
@needs_triton
@pytest.mark.parametrize("field", BROKEN)
@pytest.mark.parametrize("name", ["discrete", "box", "relu", "box, all at once"])
def test_on_a_gpu_a_minibatch_that_is_not_finite_changes_nothing(name: str, field: str) -> None:
    assert too_far(broken_differences(CASES[name], torch.device("cuda"), field)) == {}


@gpu
@needs_gpu
@needs_triton
def test_on_a_gpu_an_agent_takes_the_kernels_and_the_trial_changes_no_weight() -> None:
    network = partial(MLP, hidden_sizes=(20, 32), activation="tanh")
    obs_space, device = spaces.Box(-1.0, 1.0, (4,), np.float32), torch.device("cuda")
    same: Any = {"device": device, "seed": 1}
    fused, plain = (
        PPOAgent(obs_space, TWO, network, PPOConfig(), by_hand=by_hand, **same)
        for by_hand in (True, False)
    )

    assert fused.remark == ""
    assert fused.fused is not None
    assert plain.fused is None
    assert torch.equal(fused.adam.values, plain.adam.values)
    assert fused.adam.n_steps.item() == 0
    assert not any(each.any() for each in fused.adam.moments)


@gpu
@needs_gpu
@needs_triton
def test_on_a_gpu_the_advantages_of_one_kernel_are_those_of_the_loop() -> None:
    assert too_far(gae_differences(torch.device("cuda"))) == {}


def interpreted(*names: str) -> dict[str, dict[str, float]]:
    """What Triton's interpreter finds, which must be chosen before Triton is imported."""
    path = os.pathsep.join([str(REPOSITORY), str(TESTS), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, fused_against_plain.__file__, *names],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, dict[str, float]] = json.loads(result.stdout)
    return found


@needs_triton
@pytest.mark.parametrize(
    "names",
    [
        ["gae", "one minibatch of few", "box"],
        pytest.param(["discrete", "relu", "normalised"], marks=pytest.mark.slow),
        pytest.param(["box, all at once", "wide"], marks=pytest.mark.slow),
        pytest.param([f"broken {field}" for field in BROKEN], marks=pytest.mark.slow),
    ],
    ids=", ".join,
)
def test_interpreted_the_kernels_give_the_numbers_of_plain_torch(names: list[str]) -> None:
    found = interpreted(*names)

    assert list(found) == names
    assert {name: too_far(each) for name, each in found.items()} == {name: {} for name in names}


@needs_triton
@pytest.mark.parametrize(
    ("fits", "action_space", "hidden_sizes", "options"),
    [
        (True, TWO, (64, 64), {}),
        (True, BOX, (20, 7), {"normalize_obs": True}),
        (False, TWO, (65, 64), {}),
        (False, TWO, (64,), {}),
        (False, TWO, (32, 32, 32), {}),
        (False, spaces.Discrete(65), (32, 32), {}),
        (False, spaces.MultiDiscrete([2, 2]), (32, 32), {}),
        (False, BOX, (32, 32), {"box_policy": "squashed"}),
        (False, BOX, (32, 32), {"box_policy": "gsde"}),
        (False, TWO, (32, 32), {"shared_trunk": True}),
    ],
)
def test_the_kernels_cover_two_narrow_layers_of_a_plain_policy(
    fits: bool, action_space: Any, hidden_sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    from ml_pipeline.agents.fast.triton_ppo import TritonPPO

    network = partial(MLP, hidden_sizes=hidden_sizes, activation="tanh")
    obs_space, device = spaces.Box(-1.0, 1.0, (4,), np.float32), torch.device("cpu")
    agent = PPOAgent(obs_space, action_space, network, PPOConfig(**options), device=device, seed=1)

    assert TritonPPO.fits(agent.model) is fits


def test_on_the_cpu_there_are_no_kernels_and_nothing_is_said() -> None:
    agent = PPOAgent(
        spaces.Box(-1.0, 1.0, (4,), np.float32),
        TWO,
        MLP,
        PPOConfig(),
        device=torch.device("cpu"),
        seed=1,
    )

    assert agent.fused is None
    assert agent.remark == ""

"""Every backend of PPO computes the same numbers as ``TorchPPO``, up to rounding.

NumPy runs on the CPU, Triton on a GPU or in its interpreter, torch.compile on both.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from functools import partial
from typing import Any

import differences as measured
import numpy as np
import pytest
import torch
from conftest import REPOSITORY, TESTS
from differences import BOX, CASES, FIVE, MASKED_CASES, OPTIONS, TWO, Pair
from gymnasium import spaces
from small_agents import CPU, agent_for, minibatch, seen
from torch import Tensor, nn

from ml_pipeline.algorithms.ppo.agent import PPOAgent
from ml_pipeline.algorithms.ppo.loss import Minibatch, Rates
from ml_pipeline.policy.networks import MLP
from ml_pipeline.training.graphs import Programs

OBS = spaces.Box(-1, 1, (3,), np.float32)
RATES = Rates(learning_rate=1e-2, clip_range=0.2, entropy_coef=0.01)

slow = pytest.mark.slow
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU"),
    needs_triton,
]

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8),
    reason="torch.compile needs g++ and torch 2.8",
)

TOLERANCES = {"float32": 1e-4, "tf32": 1e-2, "bf16": 5e-2}
# A clipped row has no gradient. If rounding clips another row, the difference is large.
GRADIENT_TOLERANCES = {"float32": 1e-4, "tf32": 5e-2, "bf16": 1.5e-1}
# Share of draws that rounding moves to a neighbouring action.
SHARE_OF_DRAWS = {"float32": 0.005, "tf32": 0.02, "bf16": 0.06}
NAN_FIELDS = ["obs", "advantage", "value_target", "log_prob"]


def too_large(found: dict[str, float], precision: str = "float32") -> dict[str, float]:
    """The differences beyond their tolerance; NaN is one of them."""
    usual, gradient = TOLERANCES[precision], GRADIENT_TOLERANCES[precision]
    limits = {
        "gradient": gradient,
        "moment 0": gradient,
        "moment 1": gradient,
        "weights": min(usual, 5e-3),  # about one step of Adam
        "sample": max(SHARE_OF_DRAWS[precision], usual),
        "steps": 0.0,
    }
    return {name: value for name, value in found.items() if not value <= limits.get(name, usual)}


def on_each_device(cases: list[str], precisions: list[str]) -> list[Any]:
    """Parameters: backend, case and precision."""
    numpy_cases = [
        pytest.param("numpy", case, "float32", marks=slow if case == "many rows" else ())
        for case in cases
    ]
    return numpy_cases + [
        pytest.param("triton", case, precision, marks=on_gpu)
        for case in cases
        if case in CASES and max(CASES[case].hidden_sizes) <= 64
        for precision in precisions
    ]


def device_of(backend: str) -> torch.device:
    return torch.device("cuda" if backend == "triton" else "cpu")


ALL_CASES = {**CASES, **MASKED_CASES}
PRECISE_ONLY = [name for name in ALL_CASES if name.endswith(tuple(OPTIONS))]


@pytest.mark.parametrize(
    ("device", "case"),
    [
        pytest.param("cpu", "box, all options", marks=[slow, needs_compiler]),
        *(
            pytest.param("cuda", case, marks=on_gpu)
            for case in ("discrete", "box, all options", "masked")
        ),
    ],
)
def test_compiled_code_equals_torchs(device: str, case: str) -> None:
    found = measured.differences(ALL_CASES[case], "compiled", torch.device(device))

    assert too_large(found) == {}


@pytest.mark.gpu
@on_gpu[1]
@needs_triton
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("case", ["chains", "relu chains"])
def test_dense_layers_in_fused_kernels_equal_torchs(case: str, precision: str) -> None:
    found = measured.differences(CASES[case], "compiled", torch.device("cuda"), precision)

    assert too_large(found, precision) == {}


@pytest.mark.gpu
@on_gpu[1]
@needs_triton
@pytest.mark.parametrize(("kind", "limit"), [(torch.float16, 3e-2), (torch.bfloat16, 1e-1)])
@pytest.mark.parametrize("name", list(measured.CHAINS))
def test_dense_chains_equal_float64_up_to_rounding(
    name: str, kind: torch.dtype, limit: float
) -> None:
    found = measured.chain_differences(name, kind, torch.device("cuda"))

    assert max(found.values()) < limit, found


@slow
@needs_compiler
def test_a_loss_that_cannot_be_compiled_runs_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    compiled, plain = (agent_with(TWO) for _ in range(2))
    compiled.fast = plain.fast = None
    standard = plain.plain.loss

    def waiting(now: Any, batch: Minibatch, rates: Rates, config: Any) -> Any:
        assert math.isfinite(now.value.mean().item())
        return standard(now, batch, rates, config)

    for agent in (compiled, plain):
        monkeypatch.setattr(agent.plain, "loss", waiting)
    compiled.compile(Programs(CPU, "compiled", tell=lines.append))
    batch = minibatch(plain, 8)
    for agent in (compiled, plain):
        agent.update(batch, RATES)

    torch.testing.assert_close(compiled.adam.values, plain.adam.values)
    (line,) = lines
    assert line.startswith("the loss is not compiled and runs slower")


@pytest.mark.parametrize(
    ("backend", "case", "precision"),
    [
        *on_each_device([name for name in ALL_CASES if name not in PRECISE_ONLY], [*TOLERANCES]),
        *on_each_device(PRECISE_ONLY, ["float32"]),
    ],
)
def test_actions_scores_values_and_an_epoch_equal_torchs(
    backend: str, case: str, precision: str
) -> None:
    found = measured.differences(ALL_CASES[case], backend, device_of(backend), precision)

    assert too_large(found, precision) == {}


@pytest.mark.parametrize("field", NAN_FIELDS)
@pytest.mark.parametrize(
    ("backend", "case", "precision"),
    on_each_device(["discrete", "box", "relu", "box, all options"], ["float32"]),
)
def test_a_minibatch_with_a_nan_changes_nothing(
    backend: str, case: str, precision: str, field: str
) -> None:
    found = measured.broken_differences(CASES[case], backend, device_of(backend), field)

    assert too_large(found) == {}


@pytest.mark.parametrize("precision", [*TOLERANCES])
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=on_gpu) for name in ("discrete", "box, all options")]
)
def test_tiles_for_little_shared_memory_compute_the_same(
    case: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ml_pipeline.algorithms.ppo.fast.triton_ppo._ENOUGH_MEMORY", 2**30)

    found = measured.differences(CASES[case], "triton", device_of("triton"), precision)

    assert too_large(found, precision) == {}


@needs_triton
@pytest.mark.parametrize(
    "names",
    [
        [
            "gae 1x1",
            "gae 9x5",
            "gae 4x130",
            "linear 1x1",
            "linear 9x5",
            "linear 4x300",
            "product",
            "tf32 tiny minibatches",
            "box",
        ],
        pytest.param(["infinite tf32", "infinite float32"], marks=slow),
        [f"chain {name}" for name in measured.CHAINS],
        pytest.param(["tiny minibatches", "single transitions"], marks=slow),
        pytest.param(["tf32 discrete", "tf32 box"], marks=slow),
        pytest.param(["discrete", "relu", "normalised"], marks=slow),
        pytest.param(["box, all options", "wide"], marks=slow),
        pytest.param([f"broken {field}" for field in NAN_FIELDS], marks=slow),
        pytest.param([f"discrete, {option}" for option in OPTIONS], marks=slow),
        pytest.param([f"box, {option}" for option in OPTIONS], marks=slow),
    ],
    ids=lambda names: "; ".join(names),
)
def test_tritons_interpreter_computes_the_same_numbers(names: list[str]) -> None:
    # In a new process: Triton reads the variable when it is imported.
    path = os.pathsep.join([str(REPOSITORY), str(TESTS), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, measured.__file__, *names],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=110,
    )

    assert result.returncode == 0, result.stderr
    found: dict[str, dict[str, float]] = json.loads(result.stdout)
    assert {name: too_large(each) for name, each in found.items()} == {name: {} for name in names}


# The rest compares NumPy and torch on the CPU.
both = pytest.mark.parametrize("fast", [True, False], ids=["numpy", "torch"])


def agent_with(action_space: spaces.Space[Any], **more: Any) -> PPOAgent:
    return agent_for(OBS, action_space, partial(MLP, hidden_sizes=(8,)), **more)


def textbook_step(agent: PPOAgent, batch: Minibatch) -> Tensor:
    """The formulas of the paper, with torch's distributions and torch's Adam."""
    model, obs = agent.model, batch.inputs.obs
    outputs = model.policy_head(model.actor(obs))
    if hasattr(model.distribution, "log_std"):
        normal = torch.distributions.Normal(outputs, model.distribution.log_std.exp())
        policy: Any = torch.distributions.Independent(normal, 1)
    else:
        policy = torch.distributions.Categorical(logits=outputs)
    ratio = torch.exp(policy.log_prob(batch.action) - batch.log_prob)
    advantage = batch.advantage - batch.advantage.mean()
    advantage = advantage / (batch.advantage.std(correction=0) + 1e-8)
    surrogate = torch.minimum(ratio * advantage, ratio.clip(0.8, 1.2) * advantage)
    value = model.value_head(model.critic(obs)).squeeze(1)
    value_loss = nn.functional.mse_loss(value, batch.value_target) / 2
    loss = -surrogate.mean() + 0.5 * value_loss - 0.01 * policy.entropy().mean()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-5)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    return loss.detach()


@both
@pytest.mark.parametrize("action_space", [FIVE, BOX], ids=["discrete", "box"])
def test_one_update_equals_a_textbook_ppo(action_space: spaces.Space[Any], fast: bool) -> None:
    agent = agent_with(action_space, fast=fast, max_grad_norm=0.3)
    textbook = agent_with(action_space, fast=False)
    batch = minibatch(agent)

    result = agent.update(batch, RATES)
    loss = textbook_step(textbook, batch)

    for ours, theirs in zip(agent.model.parameters(), textbook.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    total = result.policy_loss + 0.5 * result.value_loss - 0.01 * result.entropy
    assert float(total) == pytest.approx(float(loss), rel=1e-4)
    assert 0.1 < float(result.clip_fraction) < 0.9


@both
def test_an_update_is_an_epoch_of_one_minibatch(fast: bool) -> None:
    one, other = (agent_with(FIVE, fast=fast, n_minibatches=1) for _ in range(2))
    batch = minibatch(one)

    update = one.update(batch, RATES)
    epoch = other.epoch(batch, torch.arange(32).view(1, 32), RATES)

    assert torch.equal(torch.tensor([*map(float, update[:-1])], dtype=epoch.dtype), epoch[0])
    assert torch.equal(one.adam.values, other.adam.values)


@both
@pytest.mark.parametrize("action_space", [FIVE, BOX], ids=["discrete", "box"])
def test_each_option_and_each_rate_changes_the_update(
    action_space: spaces.Space[Any], fast: bool
) -> None:
    rates = {"learning_rate": 1e-3, "clip_range": 0.01, "entropy_coef": 0.5}
    changes = [({}, RATES), *((options, RATES) for options in OPTIONS.values())]
    changes += [({}, RATES._replace(**{name: value})) for name, value in rates.items()]
    results = set()
    for options, changed in changes:
        agent = agent_with(action_space, fast=fast, **options)
        agent.update(minibatch(agent), changed)
        results.add(tuple(agent.adam.values.tolist()))

    assert len(results) == len(changes)


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_forbidden_action_gets_no_gradient(backend: str) -> None:
    pair = Pair(MASKED_CASES["masked"], "numpy", CPU, "float32")
    agent = pair.fast if backend == "numpy" else pair.plain

    agent.epoch(pair.rollout, pair.order, pair.rates)

    assert agent.adam.views["policy_head.bias"][1][4] == 0.0


@both
def test_the_split_of_a_batch_changes_no_draw(fast: bool) -> None:
    agent = agent_with(FIVE, fast=fast)
    obs = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    noise = agent.draw_noise(1, 8, torch.Generator().manual_seed(2))[0]

    whole = agent.sample_batch(seen(obs), noise).action.tolist()
    halves = [agent.sample_batch(seen(obs[half]), noise[half]) for half in (slice(4), slice(4, 8))]

    assert [action for half in halves for action in half.action.tolist()] == whole


@pytest.mark.parametrize(("space", "is_masked"), [(FIVE, False), (FIVE, True), (BOX, False)])
def test_arrays_get_the_same_actions_and_values_as_tensors(
    space: spaces.Space[Any], is_masked: bool
) -> None:
    agent = agent_with(space)
    obs = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    noise = agent.draw_noise(1, 8, torch.Generator().manual_seed(2))[0]
    mask = torch.arange(5).expand(8, 5) % 2 == 0 if is_masked else None
    arrays: Any = seen(obs, mask).mapped(lambda field: field.numpy(), None)  # type: ignore[arg-type,return-value]

    from_tensors = agent.sample_batch(seen(obs, mask), noise).action
    from_arrays: Any = agent.sample_batch(arrays, noise.numpy()).action  # type: ignore[arg-type]

    assert agent.takes_arrays
    assert not agent_with(space, fast=False).takes_arrays
    assert isinstance(from_arrays, np.ndarray)
    assert from_arrays.tolist() == from_tensors.tolist()
    assert agent.value_batch(arrays).equal(agent.value_batch(seen(obs, mask)))
    assert agent.backend.outputs(arrays)[0].equal(agent.backend.outputs(seen(obs, mask))[0])


@pytest.mark.parametrize("n_rows", [1, 2, 8, 32, 33])
def test_wide_layers_equal_torchs_for_any_number_of_rows(n_rows: int) -> None:
    network = partial(MLP, hidden_sizes=(256, 300))
    fast, plain = (agent_for(OBS, BOX, network, fast=each) for each in (True, False))
    for agent in (fast, plain):
        agent.model.policy_head.weight.data.mul_(100.0)
    batch = minibatch(plain, size=n_rows)
    noise = plain.draw_noise(1, n_rows, torch.Generator().manual_seed(2))[0]

    actions = [agent.sample_batch(batch.inputs, noise).action for agent in (fast, plain)]
    torch.testing.assert_close(*actions, rtol=1e-5, atol=1e-5)
    for agent in (fast, plain):
        agent.update(batch, RATES._replace(learning_rate=1e-5))

    direction, expected = (agent.adam.grad / agent.adam.grad.norm() for agent in (fast, plain))
    torch.testing.assert_close(direction, expected, rtol=1e-3, atol=1e-5)


@both
def test_an_edited_distribution_decides_the_greedy_action(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agent_with(FIVE, fast=fast)
    monkeypatch.setattr(agent.distribution, "mode", lambda outputs: outputs.argmin(dim=-1))
    obs = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))

    actions = agent.act_batch(obs.numpy(), deterministic=True)

    with torch.no_grad():
        outputs, _ = agent.backend.outputs(seen(obs))
    assert actions.tolist() == outputs.argmin(dim=1).tolist()


@both
def test_a_loaded_agent_continues_like_the_saved_one(fast: bool) -> None:
    saved, loaded = (agent_with(FIVE, seed=seed, fast=fast) for seed in (1, 2))
    batch = minibatch(saved)
    saved.update(batch, RATES)
    loaded.load_state_dict(saved.state_dict())

    for agent in (saved, loaded):
        agent.update(batch, RATES)

    obs = np.ones((50, 3), dtype=np.float32)
    assert saved.act_batch(obs).tolist() == loaded.act_batch(obs).tolist()
    assert torch.equal(saved.adam.values, loaded.adam.values)


@both
def test_observations_are_not_clipped_before_the_first_moments(fast: bool) -> None:
    agent = agent_with(BOX, fast=fast, normalize_obs=True, clip_obs=1.0)
    plain = agent_with(BOX, fast=fast)
    obs = np.array([[5.0, -30.0, 0.5]], dtype=np.float32)

    assert agent.act_batch(obs, True) == pytest.approx(plain.act_batch(obs, True), abs=1e-6)


@both
@pytest.mark.parametrize("field", ["advantage", "value_target", "log_prob"])
@pytest.mark.parametrize(("on_nonfinite", "n_steps"), [("stop", 1), ("skip", 2)])
def test_an_epoch_ends_at_a_nan_or_skips_its_minibatch(
    field: str, on_nonfinite: str, n_steps: int, fast: bool
) -> None:
    agent = agent_with(FIVE, fast=fast, on_nonfinite=on_nonfinite, n_minibatches=2)
    batch = minibatch(agent)
    getattr(batch, field)[5] = torch.nan
    before = agent.adam.values.clone()

    assert not agent.update(batch, RATES).finite
    assert torch.equal(agent.adam.values, before)
    finite = agent.epoch(batch, torch.arange(32).view(2, 16), RATES)[:, -1]
    assert [bool(each) for each in finite] == [False, True][:n_steps]


@both
def test_a_minibatch_of_one_stays_finite(fast: bool) -> None:
    agent = agent_with(FIVE, fast=fast)

    result = agent.update(minibatch(agent, size=1), RATES)

    assert all(math.isfinite(field) for field in result[:-1])
    assert result.finite


# Which backend an agent gets.


@pytest.mark.parametrize(
    ("backend", "action_space", "options"),
    [
        ("NumpyPPO", TWO, {}),
        ("NumpyPPO", BOX, {}),
        ("TorchPPO", BOX, {"shared_trunk": True}),
        ("TorchPPO", BOX, {"box_policy": "gsde"}),
        ("TorchPPO", BOX, {"box_policy": "squashed"}),
        ("TorchPPO", spaces.MultiDiscrete([2, 2]), {}),
    ],
)
def test_on_the_cpu_numpy_is_used_where_it_covers_the_model(
    backend: str, action_space: Any, options: dict[str, Any]
) -> None:
    agent = agent_with(action_space, fast=True, **options)

    assert type(agent.backend).__name__ == backend
    assert agent.check_fast() == ""


@pytest.mark.parametrize("action_space", [TWO, BOX], ids=["discrete", "box"])
@pytest.mark.parametrize(
    "obs_space",
    [
        spaces.Discrete(16),
        spaces.Discrete(3, start=-1),
        spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [-2, 3]]),
        spaces.MultiBinary((2, 3)),
    ],
    ids=str,
)
def test_numpy_equals_torch_for_observations_that_are_choices(
    obs_space: Any, action_space: Any
) -> None:
    fast, plain = (agent_for(obs_space, action_space, fast=fast) for fast in (True, False))
    batch = minibatch(plain)
    assert type(fast.backend).__name__ == "NumpyPPO"

    ours, theirs = (agent.score_batch(batch.inputs, batch.action) for agent in (fast, plain))
    torch.testing.assert_close(ours, theirs)
    results = [agent.update(batch, RATES) for agent in (fast, plain)]

    for one, other in zip(*(each[:-1] for each in results), strict=True):
        assert float(one) == pytest.approx(float(other), abs=1e-4)
    torch.testing.assert_close(fast.adam.values, plain.adam.values, rtol=1e-4, atol=1e-4)


def test_a_choice_below_its_space_is_refused_by_numpy() -> None:
    agent = agent_for(spaces.Discrete(4, start=2), TWO)

    with pytest.raises(IndexError, match="below the first choice"):
        agent.value_batch(seen(torch.tensor([2, 1])))


@needs_triton
@pytest.mark.parametrize(
    ("is_covered", "action_space", "hidden_sizes", "options"),
    [
        (True, TWO, (64, 64), {}),
        (True, BOX, (20, 7), {"normalize_obs": True}),
        (True, TWO, (64, 64), {"n_obs": 63}),
        (False, TWO, (64, 64), {"n_obs": 64}),
        (False, TWO, (65, 64), {}),
        (False, TWO, (64,), {}),
        (False, TWO, (32, 32, 32), {}),
        (False, spaces.Discrete(65), (32, 32), {}),
        (False, spaces.MultiDiscrete([2, 2]), (32, 32), {}),
        (False, BOX, (32, 32), {"box_policy": "squashed"}),
        (False, BOX, (32, 32), {"box_policy": "gsde"}),
        (False, TWO, (32, 32), {"shared_trunk": True}),
        (False, TWO, (32, 32), {"obs_space": spaces.Discrete(4)}),
    ],
)
def test_triton_covers_two_narrow_layers_of_a_plain_policy(
    is_covered: bool, action_space: Any, hidden_sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    from ml_pipeline.algorithms.ppo.fast.triton_ppo import TritonPPO

    network = partial(MLP, hidden_sizes=hidden_sizes)
    options = {"n_obs": 3, **options}
    box = spaces.Box(-1, 1, (options.pop("n_obs"),), np.float32)
    agent = agent_for(options.pop("obs_space", box), action_space, network, **options)

    assert TritonPPO.covers(agent.model) is is_covered


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
@needs_triton
def test_on_a_gpu_triton_is_used_and_its_trial_changes_no_weight() -> None:
    network = partial(MLP, hidden_sizes=(20, 32), activation="tanh")
    make = partial(agent_for, OBS, TWO, network, device=torch.device("cuda"))
    triton, plain = make(fast=True), make(fast=False)

    assert triton.check_fast() == ""
    assert type(triton.backend).__name__ == "TritonPPO"
    assert type(plain.backend).__name__ == "TorchPPO"
    assert torch.equal(triton.adam.values, plain.adam.values)
    assert triton.adam.n_steps.item() == 0
    assert not any(each.any() for each in triton.adam.moments)

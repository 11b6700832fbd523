"""How far fast implementations are from their references, as numbers by name.

As a script it takes names of cases, runs them in Triton and prints a JSON object. With
TRITON_INTERPRET=1 Triton interprets its kernels, which needs no GPU.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from small_agents import agent_for
from torch import Tensor

from ml_pipeline.algorithms.ppo.agent import PPOAgent
from ml_pipeline.algorithms.ppo.loss import COLUMNS, Minibatch, Rates, UpdateResult
from ml_pipeline.policy.contracts import PolicyInput
from ml_pipeline.policy.min_gru import linear_steps
from ml_pipeline.policy.networks import MLP
from ml_pipeline.training.graphs import Programs
from ml_pipeline.training.returns import RolloutOutcome, gae

TWO, FIVE = spaces.Discrete(2), spaces.Discrete(5)
BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)
RATES = Rates(learning_rate=1e-3, clip_range=0.2, entropy_coef=0.02)


class Case(NamedTuple):
    action_space: spaces.Space[Any]
    n_obs: int
    hidden_sizes: tuple[int, int]
    activation: str
    options: dict[str, Any]
    n_rows: int = 70  # in two minibatches; neither fills its last tile
    is_masked: bool = False


CASES = {
    "discrete": Case(TWO, 4, (20, 32), "tanh", {}),
    "box": Case(BOX, 16, (32, 20), "relu", {"clip_value_loss": True}),
    "relu": Case(FIVE, 17, (20, 20), "relu", {"dual_clip": 1.5, "normalize_advantage": False}),
    "normalised": Case(FIVE, 15, (20, 32), "tanh", {"normalize_obs": True, "clip_obs": 1.5}),
    "box, all options": Case(
        BOX,
        5,
        (20, 32),
        "tanh",
        {
            "normalize_obs": True,
            "clip_value_loss": True,
            "dual_clip": 1.2,
            "normalize_advantage": False,
            "on_nonfinite": "skip",
            "value_coef": 2.0,
            "max_grad_norm": 10.0,
        },
    ),
    "wide": Case(TWO, 63, (64, 64), "tanh", {"clip_value_loss": True}, 530),
    "tiny minibatches": Case(TWO, 1, (16, 16), "tanh", {}, 6),
    "single transitions": Case(TWO, 3, (16, 16), "tanh", {}, 2),
    "single Gaussian transitions": Case(BOX, 3, (16, 16), "tanh", {}, 2),
    "chains": Case(BOX, 40, (130, 72), "tanh", {"normalize_obs": True}, 1400),
    "relu chains": Case(FIVE, 5, (32, 200), "relu", {"clip_value_loss": True}, 1400),
    "many rows": Case(BOX, 8, (64, 64), "tanh", {"normalize_obs": True}, 100_000),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "adam_eps": {"adam_eps": 1e-2},
    "value_coef": {"value_coef": 2.0},
    "max_grad_norm": {"max_grad_norm": 0.01},
    "no advantage normalisation": {"normalize_advantage": False},
    "clipped value loss": {"clip_value_loss": True},
    "dual clip": {"dual_clip": 1.05},
}
for _name, _options in OPTIONS.items():
    CASES[f"discrete, {_name}"] = Case(FIVE, 3, (16, 16), "tanh", _options)
    CASES[f"box, {_name}"] = Case(BOX, 3, (16, 16), "tanh", _options)
# Triton has no masks.
MASKED_CASES = {
    "masked": Case(FIVE, 3, (16, 16), "tanh", {}, is_masked=True),
    "masked, relu": Case(FIVE, 3, (16, 16), "relu", {"normalize_obs": True}, is_masked=True),
}


class Pair:
    """Two agents with the same weights, one of them with a fast backend, and a rollout."""

    def __init__(self, case: Case, backend: str, device: torch.device, precision: str) -> None:
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        def chosen(*steps: float) -> Tensor:
            """Far from a clip range of 0.2, also after a gradient step.

            So rounding does not change what is clipped.
            """
            numbers = torch.randint(len(steps), (n_rows,), generator=generator)
            return torch.tensor(steps)[numbers].to(device)

        n_rows = case.n_rows
        self.obs = 2.0 * drawn(n_rows, case.n_obs) + 1.0
        self.plain = self._agent(case, device)
        self.plain.fast = None
        self.fast = self._agent(case, device, precision=precision)
        if backend == "triton":
            from ml_pipeline.algorithms.ppo.fast.triton_ppo import TritonPPO

            assert TritonPPO.covers(self.fast.model)
            self.fast.fast = TritonPPO(self.fast.plain)
        if backend == "compiled":
            self.fast.fast = None
            self.fast.compile(Programs(device, "compiled", tell=_unexpected))
        assert backend in type(self.fast.backend).__name__.lower()
        mask = None
        if case.is_masked:
            mask = torch.rand(n_rows, 5, generator=torch.Generator().manual_seed(1)) < 0.6
            mask[:, 0], mask[:, 4] = True, False
            mask = mask.to(device)
        self.inputs = PolicyInput(self.obs, mask, None, None)
        self.noise = self.plain.draw_noise(1, n_rows, generator)[0]
        self.action = self.plain.sample_batch(self.inputs, self.noise).action
        log_prob, value = self.plain.score_batch(self.inputs, self.action)
        self.rollout = Minibatch(
            self.inputs,
            self.action,
            log_prob + chosen(-0.5, -0.01, 0.01, 0.5),
            value + chosen(-0.6, -0.01, 0.01, 0.6),
            3.0 * drawn(n_rows) + 1.0,
            drawn(n_rows),
        )
        order = torch.randperm(n_rows, generator=generator).to(device)
        self.order = order.view(2, -1)
        self.rates = Rates(*torch.tensor(RATES, device=device).unbind())

    def _agent(self, case: Case, device: torch.device, **more: Any) -> PPOAgent:
        obs_space = spaces.Box(-np.inf, np.inf, (case.n_obs,), np.float32)
        network = partial(MLP, hidden_sizes=case.hidden_sizes, activation=case.activation)
        options = {"n_minibatches": 2, **case.options, **more}
        agent = agent_for(obs_space, case.action_space, network, device=device, **options)
        agent.model.policy_head.weight.data.mul_(100.0)  # the actions now differ in probability
        if isinstance(case.action_space, spaces.Box):
            agent.distribution.log_std.data.copy_(torch.tensor([-0.3, 0.1, 0.0]))
        agent.learn_moments(self.obs.unsqueeze(0))
        return agent

    def epochs(self, rollout: Minibatch) -> tuple[UpdateResult, UpdateResult]:
        """The results of one epoch of the fast agent and one of the plain agent."""
        agents = self.fast, self.plain
        ours, theirs = (agent.epoch(rollout, self.order, self.rates) for agent in agents)
        return UpdateResult(*ours.unbind(1)), UpdateResult(*theirs.unbind(1))  # type: ignore[arg-type]


def _unexpected(line: str) -> None:
    raise AssertionError(line)


def differences(
    case: Case, backend: str, device: torch.device, precision: str = "float32"
) -> dict[str, float]:
    """Differences in acting, scoring and one epoch."""
    pair = Pair(case, backend, device, precision)
    plain, fast, inputs = pair.plain, pair.fast, pair.inputs
    out = torch.full_like(pair.action, 77)
    drawn = fast.sample_batch(inputs, pair.noise, out=out).action
    found = {"sample(out=)": _flag(torch.equal(drawn, out))}
    if drawn.dtype == torch.int64:
        found["sample"] = (drawn != pair.action).float().mean().item()
    else:
        found["sample"] = _apart(drawn, pair.action)
    ours, theirs = (each.score_batch(inputs, pair.action) for each in (fast, plain))
    found["log_prob"], found["value"] = (_apart(*each) for each in zip(ours, theirs, strict=True))
    found["value_batch"] = _apart(fast.value_batch(inputs), theirs[1])
    wanted = torch.zeros(len(pair.obs), dtype=torch.bool, device=device)
    wanted[[1, -1]] = True
    value = fast.value_batch(inputs, wanted=wanted)
    found["value_batch(wanted=)"] = _apart(value[wanted], theirs[1][wanted])
    found["unwanted is finite"] = _flag(bool(torch.isfinite(value).all()))
    with torch.no_grad():
        outputs = [each.backend.outputs(inputs)[0] for each in (fast, plain)]
    found["outputs"] = _apart(*outputs)
    result, expected = pair.epochs(pair.rollout)
    found |= {name: _apart(getattr(result, name), getattr(expected, name)) for name in COLUMNS[:-1]}
    found["finite"] = _flag(_bools(result) == _bools(expected) == [True, True])
    # NumPy clips gradients in place, torch does not; grad_norm compares their lengths.
    found["gradient"] = _relative(
        *(each.adam.grad / each.adam.grad.norm() for each in (fast, plain))
    )
    found["weights"] = _relative(fast.adam.values, plain.adam.values)
    for number, moments in enumerate(zip(fast.adam.moments, plain.adam.moments, strict=True)):
        found[f"moment {number}"] = _relative(*moments)
    found["steps"] = abs(fast.adam.n_steps.item() - plain.adam.n_steps.item())
    return found


def broken_differences(
    case: Case, backend: str, device: torch.device, field: str
) -> dict[str, float]:
    """Differences in an epoch with a NaN in its first minibatch.

    Then in an epoch of NaNs, which must change nothing.
    """
    skipping = case._replace(options={**case.options, "on_nonfinite": "skip"})
    pair = Pair(skipping, backend, device, "float32")
    plain, fast, row = pair.plain, pair.fast, pair.order[0, 3]
    broken = pair.rollout
    if field == "obs":
        pair.obs[row] = torch.nan
    else:
        numbers = getattr(pair.rollout, field).clone()
        numbers[row] = torch.nan
        broken = pair.rollout._replace(**{field: numbers})
    result, expected = pair.epochs(broken)
    found = {"finite": _flag(_bools(result) == _bools(expected) == [False, True])}
    found["policy_loss"] = _apart(result.policy_loss[1], expected.policy_loss[1])
    found["value_loss"] = _apart(result.value_loss[1], expected.value_loss[1])
    found["weights"] = _relative(fast.adam.values, plain.adam.values)
    found["steps"] = abs(fast.adam.n_steps.item() - 1.0)
    kept = [fast.adam.values, *fast.adam.moments, fast.adam.n_steps]
    before = [each.clone() for each in kept]
    hopeless = pair.rollout._replace(advantage=torch.full_like(pair.rollout.advantage, torch.nan))
    flags = fast.epoch(hopeless, pair.order, pair.rates)[:, -1]
    same = all(torch.equal(old, new) for old, new in zip(before, kept, strict=True))
    found["unchanged"] = _flag(same and not flags.any())
    return found


def infinite_differences(device: torch.device, precision: str) -> dict[str, float]:
    """Differences in scores of rows with an infinite observation."""
    pair = Pair(CASES["discrete"], "triton", device, precision)
    pair.obs[::3, 1] = torch.inf
    pair.obs[1::3, 2] = -torch.inf
    agents = pair.fast, pair.plain
    pairs = zip(*(agent.score_batch(pair.inputs, pair.action) for agent in agents), strict=True)
    return {name: _apart(*each) for name, each in zip(("log_prob", "value"), pairs, strict=True)}


def product_differences(device: torch.device) -> dict[str, float]:
    """Differences between single products in float32 and in float64, times 100: they are small."""
    from product_kernels import product_kernel

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(32, 32, generator=generator).to(device) for _ in range(2))
    found = {}
    for transposed in ("", "a", "b"):
        out = torch.zeros_like(a)
        product_kernel[(1,)](a, b, out, N=32, TRANSPOSED=transposed)
        left, right = a.T if transposed == "a" else a, b.T if transposed == "b" else b
        exact = left.double() @ right.double()
        found[f"product {transposed}"] = 100.0 * _apart(out.double(), exact)
    return found


def random_outcome(n_steps: int, n_envs: int, seed: int, device: Any = "cpu") -> RolloutOutcome:
    """A quarter of the steps terminate, a quarter are truncated, some do both."""
    generator = torch.Generator().manual_seed(seed)
    grid = (n_steps, n_envs)
    reward, value, final_value = (torch.randn(grid, generator=generator) for _ in range(3))
    last_value = torch.randn(n_envs, generator=generator)
    terminated, truncated = (torch.rand(grid, generator=generator) < 0.25 for _ in range(2))
    made = RolloutOutcome(reward, value, last_value, final_value, terminated, truncated)
    return RolloutOutcome(*(each.to(device) for each in made))


def gae_differences(n_steps: int, n_envs: int, device: torch.device) -> dict[str, float]:
    """Differences between the kernel and the loop over time."""
    from ml_pipeline.training.gae_kernel import gae_in_one_kernel

    outcome = random_outcome(n_steps, n_envs, 1, device)
    ours = gae_in_one_kernel(*outcome, gamma=0.99, lam=0.95)
    theirs, _ = outcome.estimate(gae, gamma=0.99, lam=0.95)
    return {"advantage": _apart(ours, theirs)}


CHAINS: dict[str, tuple[list[int], list[int], str]] = {  # layers, outputs of each tower
    "two towers": ([4, 130, 72], [2, 1], "tanh"),
    "one tower": ([40, 17], [5], "relu"),
    "three layers": ([3, 20, 256, 16], [18, 1], "tanh"),
    "wide": ([5, 300, 520], [2, 1], "tanh"),
    "equal layers": ([70, 64, 64], [3, 3], "relu"),
}


def chain_differences(name: str, kind: torch.dtype, device: torch.device) -> dict[str, float]:
    """Relative differences of outputs and gradients to float64."""
    from ml_pipeline.policy.dense_chains import Sizes, largest_error

    layers, n_out, activation = CHAINS[name]
    return {"largest": largest_error(Sizes(layers, n_out), activation, kind, device)}


def linear_differences(n_steps: int, n_columns: int, device: torch.device) -> dict[str, float]:
    """Differences between the kernel and the rounds of ``linear_steps``, with a NaN to stop."""
    from ml_pipeline.policy.steps_kernel import linear_steps_in_one_kernel

    generator = torch.Generator().manual_seed(1)
    kept = torch.rand(n_steps, n_columns, generator=generator)
    kept[torch.rand(n_steps, n_columns, generator=generator) < 0.25] = 0.0
    new = torch.randn(n_steps + 1, n_columns, generator=generator)
    found = {}
    for name, end, backwards in (("states", 0, False), ("states backwards", -1, True)):
        broken = new.clone()
        broken[end, 0], kept[end, 0] = torch.nan, 0.0
        steps = kept.to(device), broken.to(device), backwards
        ours, theirs = linear_steps_in_one_kernel(*steps), linear_steps(*steps)
        found[name] = _apart(ours.nan_to_num(99.0), theirs.nan_to_num(99.0))
        found[f"{name} that are not finite"] = float(abs(int((~ours.isfinite()).sum()) - 1))
    return found


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference; relative for numbers above 1."""
    return float(((ours - theirs).abs() / theirs.abs().clamp(min=1.0)).max())


def _relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def _bools(result: UpdateResult) -> list[bool]:
    return [bool(each) for each in result.finite]


def _flag(is_right: bool) -> float:
    return 0.0 if is_right else 1.0


def _prepare_interpreter() -> None:
    from triton.runtime import interpreter

    class NoGPU:
        multi_processor_count = 2
        shared_memory_per_block_optin = 2**18

    torch.cuda.get_device_properties = lambda _: NoGPU  # type: ignore[assignment]
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        # Triton 3.6 calls int() on an array of one number, which NumPy 2.4 forbids.
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def main(names: list[str]) -> None:
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if is_interpreted:
        _prepare_interpreter()
    device = torch.device("cpu" if is_interpreted else "cuda")
    found: dict[str, dict[str, float]] = {}
    for name in names:
        kind, _, rest = name.partition(" ")
        if kind == "gae":
            n_steps, n_envs = map(int, rest.split("x"))
            found[name] = gae_differences(n_steps, n_envs, device)
        elif kind == "linear":
            n_steps, n_columns = map(int, rest.split("x"))
            found[name] = linear_differences(n_steps, n_columns, device)
        elif kind == "broken":
            found[name] = broken_differences(CASES["box"], "triton", device, rest)
        elif kind == "tf32":
            # The interpreter multiplies in float32, but reorders the units as for tf32.
            found[name] = differences(CASES[rest], "triton", device, "tf32")
        elif kind == "product":
            found[name] = product_differences(device)
        elif kind == "infinite":
            found[name] = infinite_differences(device, rest)
        elif kind == "chain":
            # The interpreter has no bfloat16. It rounds float16 as a GPU does.
            errors = chain_differences(rest, torch.float16, device)
            found[name] = {key: error / 300.0 for key, error in errors.items()}  # 3e-2 is allowed
        else:
            found[name] = differences(CASES[name], "triton", device)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])

"""What ``TritonPPO`` and ``gae_in_one_kernel`` differ by from plain torch, as numbers.

In a process of its own it is told cases, and prints a JSON object of what it has found. With
TRITON_INTERPRET=1 the kernels are run by Triton's interpreter, which needs no GPU.
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
from torch import Tensor

from ml_pipeline.agents.networks import MLP
from ml_pipeline.agents.ppo import PPOAgent, Rates
from ml_pipeline.config.ppo import PPOConfig
from ml_pipeline.protocols import Minibatch, PolicyInput

TWO, FIVE = spaces.Discrete(2), spaces.Discrete(5)
BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)


class Case(NamedTuple):
    action_space: spaces.Space[Any]
    n_obs: int
    hidden_sizes: tuple[int, int]
    activation: str
    options: dict[str, Any]
    n_rows: int = 70  # in two minibatches: neither is a whole number of tiles


CASES = {
    "discrete": Case(TWO, 4, (20, 32), "tanh", {}),
    "box": Case(BOX, 11, (32, 20), "relu", {"clip_value_loss": True}),
    "relu": Case(FIVE, 17, (20, 20), "relu", {"dual_clip": 1.5, "normalize_advantage": False}),
    "normalised": Case(FIVE, 3, (20, 32), "tanh", {"normalize_obs": True, "clip_obs": 1.5}),
    "box, all at once": Case(
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
    "wide": Case(TWO, 64, (64, 64), "tanh", {"clip_value_loss": True}, 300),
    "one minibatch of few": Case(TWO, 1, (16, 16), "tanh", {}, 6),
    "many rows": Case(BOX, 8, (64, 64), "tanh", {"normalize_obs": True}, 20_000),
}
RATES = Rates(1e-3, 0.2, 0.02)


class Pair:
    """Two agents of the same weights; the work of one is done by the kernels."""

    def __init__(self, case: Case, device: torch.device, precision: str) -> None:
        from ml_pipeline.agents.fast.triton_ppo import TritonPPO

        self.config = PPOConfig(n_minibatches=2, **case.options)
        obs_space = spaces.Box(-np.inf, np.inf, (case.n_obs,), np.float32)
        network = partial(MLP, hidden_sizes=case.hidden_sizes, activation=case.activation)
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        self.obs = 2.0 * drawn(case.n_rows, case.n_obs) + 1.0
        self.agents = [
            PPOAgent(
                obs_space,
                case.action_space,
                network,
                self.config,
                device=device,
                seed=1,
                by_hand=False,
            )
            for _ in range(2)
        ]
        for agent in self.agents:
            agent.model.policy_head.weight.data.mul_(100.0)  # else all choices are nearly alike
            if isinstance(case.action_space, spaces.Box):
                agent.distribution.log_std.data.copy_(torch.tensor([-0.3, 0.1, 0.0]))
            agent.learn_moments(self.obs.unsqueeze(0))
        self.plain, fused = self.agents
        assert TritonPPO.fits(fused.model)
        fused.fused = TritonPPO(fused.model, fused.adam, self.config, precision=precision)
        self.fused = fused
        self.inputs = PolicyInput(self.obs, None, None, None)
        self.noise = self.plain.draw_noise(1, case.n_rows, generator)[0]
        self.action = self.plain.sample_batch(self.inputs, self.noise).action
        log_prob, value = self.plain.score_batch(self.inputs, self.action)
        rows = case.n_rows

        def chosen(*steps: float) -> Tensor:
            """None of them near a clip of 0.2: rounding must not decide on which side it lies."""
            numbers = torch.randint(len(steps), (rows,), generator=generator)
            return torch.tensor(steps)[numbers].to(device)

        self.rollout = Minibatch(
            self.inputs,
            self.action,
            log_prob + chosen(-0.3, -0.1, 0.1, 0.3),
            value + chosen(-0.5, -0.1, 0.1, 0.5),
            3.0 * drawn(rows) + 1.0,
            drawn(rows),
        )
        self.order = torch.randperm(rows, generator=generator).to(device)
        self.rates = torch.tensor(RATES, device=device)


def differences(case: Case, device: torch.device, precision: str = "float32") -> dict[str, float]:
    """How far acting, scoring and one epoch are apart."""
    pair = Pair(case, device, precision)
    plain, fused, inputs = pair.plain, pair.fused, pair.inputs
    out = torch.full_like(pair.action, 77)
    drawn = fused.sample_batch(inputs, pair.noise, out=out).action
    found = {"sample(out=)": 0.0 if drawn is out else 1.0}
    if drawn.dtype == torch.int64:
        found["sample"] = (drawn != pair.action).float().mean().item()
    else:
        found["sample"] = _apart(drawn, pair.action)
    ours, theirs = (each.score_batch(inputs, pair.action) for each in (fused, plain))
    found["log_prob"], found["value"] = (_apart(*each) for each in zip(ours, theirs, strict=True))
    found["value_batch"] = _apart(fused.value_batch(inputs), theirs[1])
    wanted = torch.zeros(len(pair.obs), dtype=torch.bool, device=device)
    wanted[[1, -1]] = True
    value = fused.value_batch(inputs, wanted=wanted)
    found["value_batch(wanted=)"] = _apart(value[wanted], theirs[1][wanted])
    found["unwanted is finite"] = 0.0 if torch.isfinite(value).all() else 1.0
    ours, theirs = (each.epoch(pair.rollout, pair.order, pair.rates) for each in (fused, plain))
    found["metrics"] = _apart(ours.metrics, theirs.metrics)
    found["finite"] = 0.0 if ours.finite.tolist() == theirs.finite.tolist() == [True] * 2 else 1.0
    found["gradient"] = _relative(fused.adam.grad, plain.adam.grad)
    found["weights"] = _relative(fused.adam.values, plain.adam.values)
    for number, each in enumerate(zip(fused.adam.moments, plain.adam.moments, strict=True)):
        found[f"moment {number}"] = _relative(*each)
    found["steps"] = abs(fused.adam.n_steps.item() - plain.adam.n_steps.item())
    return found


def broken_differences(case: Case, device: torch.device, field: str) -> dict[str, float]:
    """The same of an epoch whose first minibatch has a number that is none, and of one more
    in which no minibatch is finite: nothing may change then."""
    pair = Pair(case, device, "float32")
    plain, fused = pair.plain, pair.fused
    if field == "obs":
        pair.obs[pair.order[3]] = torch.nan
        broken = pair.rollout
    else:
        numbers = getattr(pair.rollout, field).clone()
        numbers[pair.order[3]] = torch.nan
        broken = pair.rollout._replace(**{field: numbers})
    ours, theirs = (each.epoch(broken, pair.order, pair.rates) for each in (fused, plain))
    flags = ours.finite.tolist() == theirs.finite.tolist() == [False, True]
    found = {"finite": 0.0 if flags else 1.0, "metrics": _apart(ours.metrics[1], theirs.metrics[1])}
    found["weights"] = _relative(fused.adam.values, plain.adam.values)
    found["steps"] = abs(fused.adam.n_steps.item() - 1.0)
    kept = [fused.adam.values, *fused.adam.moments, fused.adam.n_steps]
    before = [each.clone() for each in kept]
    hopeless = pair.rollout._replace(advantage=torch.full_like(pair.rollout.advantage, torch.nan))
    finite = fused.epoch(hopeless, pair.order, pair.rates).finite
    same = all(torch.equal(old, new) for old, new in zip(before, kept, strict=True))
    found["unchanged"] = 0.0 if same and not finite.any() else 1.0
    return found


def gae_differences(device: torch.device) -> dict[str, float]:
    from test_device_returns import outcomes

    from ml_pipeline.training.tensor.gae_kernel import gae_in_one_kernel
    from ml_pipeline.training.tensor.returns import gae_step_by_step

    found = {}
    for n_steps, n_envs in ((1, 1), (9, 5), (4, 130)):
        given = outcomes(n_steps, n_envs, 1, device=str(device))
        ours = gae_in_one_kernel(*given, gamma=0.99, lam=0.95)
        theirs = gae_step_by_step(given, gamma=0.99, lam=0.95)
        pairs = zip(("advantage", "target"), ours, theirs, strict=True)
        found |= {f"{name} {n_steps} x {n_envs}": _apart(*pair) for name, *pair in pairs}
    return found


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference; of numbers above 1, in parts of them."""
    return float(((ours - theirs).abs() / theirs.abs().clamp(min=1.0)).max())


def _relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def _prepare_interpreter() -> None:
    from triton.runtime import interpreter

    class OfNoGPU:
        multi_processor_count = 2

    torch.cuda.get_device_properties = lambda _: OfNoGPU  # type: ignore[assignment]
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        # Triton 3.6 makes an int of an array of one number, which NumPy 2.4 forbids.
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
        if name == "gae":
            found[name] = gae_differences(device)
        elif name.startswith("broken "):
            found[name] = broken_differences(CASES["box"], device, name.removeprefix("broken "))
        else:
            found[name] = differences(CASES[name], device)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])

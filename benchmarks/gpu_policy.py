"""CPU envs with the policy on a GPU, compared with a plain loop like those of single-file PPOs.

    python benchmarks/gpu_policy.py                                # all cases
    python benchmarks/gpu_policy.py --cases cartpole --rounds 2

The benchmark measures env steps per second over whole iterations, including learning. All variants
use the same games, settings and networks, and run in turns. Results are medians over the iterations
of all rounds, without the first three of each round, which capture graphs.

``plain`` is our own loop in the style of CleanRL's scripts: a SyncVectorEnv with Gymnasium's
wrappers, torch.distributions, torch's Adam, minibatches in sequence, and a few reads from the
device. ``off`` is ours with compile=off, ``graph`` is the default, and ``double`` adds
collector=double where envs run in workers. The scaling over the number of envs uses CartPole.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import statistics
import tempfile
import time
from contextlib import redirect_stdout
from datetime import date
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn

from ml_pipeline.assembly import run as build

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


class Case(NamedTuple):
    """Settings of one comparison; ``overrides`` are the same settings for train_ppo.py."""

    n_envs: int
    n_steps: int
    n_epochs: int
    n_minibatches: int
    n_iterations: int
    overrides: tuple[str, ...]


CASES = {
    # tf32 because torch uses it for convolutions by default, and so does the plain loop.
    "pong": Case(8, 128, 4, 4, 12, ("experiment=pong", "vec_env=parallel", "precision=tf32")),
    "half_cheetah": Case(1, 2048, 10, 32, 6, ("experiment=half_cheetah", "vec_env=serial")),
    "cartpole": Case(8, 128, 4, 4, 16, ("env=cartpole", "vec_env=serial")),
}


def make_env(name: str) -> gym.Env[Any, Any]:
    """One env with the wrappers of the case."""
    if name == "cartpole":
        return gym.make("CartPole-v1")
    if name == "pong":
        env = gym.make("ale_py:PongNoFrameskip-v4")
        env = gym.wrappers.AtariPreprocessing(env)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        env = gym.wrappers.TransformReward(env, lambda reward: float(np.sign(float(reward))))
        return gym.wrappers.FrameStackObservation(env, 4)
    env = gym.make("HalfCheetah-v5")
    env = gym.wrappers.ClipAction(env)
    env = gym.wrappers.NormalizeObservation(env)
    clipped = gym.spaces.Box(-10.0, 10.0, env.observation_space.shape)
    env = gym.wrappers.TransformObservation(env, lambda obs: np.clip(obs, -10, 10), clipped)
    env = gym.wrappers.NormalizeReward(env)
    return gym.wrappers.TransformReward(env, lambda reward: min(max(float(reward), -10.0), 10.0))


class PlainAgent(nn.Module):
    """Networks of the single-file scripts: two MLPs, or one CNN with two heads."""

    def __init__(self, env: SyncVectorEnv) -> None:
        super().__init__()
        obs_shape, space = env.single_observation_space.shape or (), env.single_action_space
        self.discrete = isinstance(space, gym.spaces.Discrete)
        n_out = int(space.n) if isinstance(space, gym.spaces.Discrete) else (space.shape or ())[0]
        self.is_image = len(obs_shape) == 3
        if self.is_image:
            layers = [nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU()]
            layers += [nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten()]
            self.trunk: nn.Module = nn.Sequential(*layers, nn.Linear(3136, 512), nn.ReLU())
            self.actor: nn.Module = nn.Linear(512, n_out)
            self.critic: nn.Module = nn.Linear(512, 1)
        else:
            self.trunk = nn.Identity()
            self.actor, self.critic = (_tower(obs_shape[0], size) for size in (n_out, 1))
        self.log_std = nn.Parameter(torch.zeros(1, n_out))

    def forward(self, obs: Tensor, action: Tensor | None = None) -> tuple[Tensor, ...]:
        features = self.trunk(obs / 255.0 if self.is_image else obs)
        outputs, value = self.actor(features), self.critic(features)
        chosen: Any
        if self.discrete:
            chosen = torch.distributions.Categorical(logits=outputs)
            action = chosen.sample() if action is None else action
            return action, chosen.log_prob(action), chosen.entropy(), value
        chosen = torch.distributions.Normal(outputs, self.log_std.expand_as(outputs).exp())
        action = chosen.sample() if action is None else action
        return action, chosen.log_prob(action).sum(1), chosen.entropy().sum(1), value


def _tower(n_in: int, n_out: int) -> nn.Module:
    layers = [nn.Linear(n_in, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, n_out)]
    return nn.Sequential(*layers)


def plain(name: str, case: Case, device: torch.device) -> list[float]:
    """Run the plain loop; returns steps per second of each iteration."""
    modes = AutoresetMode.SAME_STEP
    env = SyncVectorEnv([lambda: make_env(name)] * case.n_envs, autoreset_mode=modes)
    torch.manual_seed(1)
    agent = PlainAgent(env).to(device)
    optimiser = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5)
    grid, obs_shape = (case.n_steps, case.n_envs), env.single_observation_space.shape or ()
    observations = torch.zeros(*grid, *obs_shape, device=device)
    actions = torch.zeros(*grid, *(env.single_action_space.shape or ()), device=device)
    log_probs, rewards, dones, values = (torch.zeros(grid, device=device) for _ in range(4))
    obs = torch.as_tensor(env.reset(seed=1)[0], dtype=torch.float32, device=device)
    done = torch.zeros(case.n_envs, device=device)
    speeds = []
    for _ in range(case.n_iterations):
        begin = time.perf_counter()
        for t in range(case.n_steps):
            observations[t], dones[t] = obs, done
            with torch.no_grad():
                action, log_prob, _, value = agent(obs)
            actions[t], log_probs[t], values[t] = action, log_prob, value.flatten()
            seen, reward, terminated, truncated, _ = env.step(action.cpu().numpy())
            rewards[t] = torch.as_tensor(reward, dtype=torch.float32, device=device)
            obs = torch.as_tensor(seen, dtype=torch.float32, device=device)
            ended = np.logical_or(terminated, truncated)
            done = torch.as_tensor(ended, dtype=torch.float32, device=device)
        advantages = plain_gae(agent, obs, done, rewards, values, dones)
        rollout = (observations, actions, log_probs, advantages, advantages + values)
        plain_update(agent, optimiser, case, [each.flatten(0, 1) for each in rollout])
        speeds.append(case.n_steps * case.n_envs / (time.perf_counter() - begin))
    env.close()
    return speeds


def plain_gae(
    agent: PlainAgent, obs: Tensor, done: Tensor, rewards: Tensor, values: Tensor, dones: Tensor
) -> Tensor:
    with torch.no_grad():
        next_value, running = agent(obs)[3].flatten(), torch.zeros_like(done)
        advantages, not_done = torch.zeros_like(rewards), 1.0 - done
        for t in reversed(range(len(rewards))):
            delta = rewards[t] + 0.99 * next_value * not_done - values[t]
            advantages[t] = running = delta + 0.99 * 0.95 * not_done * running
            next_value, not_done = values[t], 1.0 - dones[t]
    return advantages


def plain_update(
    agent: PlainAgent, optimiser: torch.optim.Optimizer, case: Case, rollout: list[Tensor]
) -> None:
    obs, action, old_log_prob, advantage, target = rollout
    size, clip_fractions = len(obs) // case.n_minibatches, []
    for _ in range(case.n_epochs):
        order = np.random.permutation(len(obs))
        for first in range(0, len(obs), size):
            rows = order[first : first + size]
            _, log_prob, entropy, value = agent(obs[rows], action[rows])
            ratio = (log_prob - old_log_prob[rows]).exp()
            with torch.no_grad():
                clip_fractions.append(((ratio - 1.0).abs() > 0.2).float().mean().item())
            gain = advantage[rows]
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            policy_loss = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
            value_loss = 0.5 * (value.flatten() - target[rows]).square().mean()
            loss = policy_loss + 0.5 * value_loss - 0.01 * entropy.mean()
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimiser.step()


def ours(case: Case, device: str, compile_mode: str, *more: str) -> list[float]:
    """Train with our package; returns steps per second of each iteration from metrics.csv."""
    overrides = [
        *case.overrides,
        *(f"device={device}", f"compile={compile_mode}", "logger=none", "callbacks={}"),
        *(f"n_envs={case.n_envs}", f"num_episodes={case.n_iterations}"),
        *(f"agent.{name}={getattr(case, name)}" for name in ("n_steps", "n_epochs")),
        f"agent.n_minibatches={case.n_minibatches}",
        *more,
    ]
    with redirect_stdout(StringIO()):
        result = build.train(overrides)
    with (result.run_dir / "metrics.csv").open(newline="") as file:
        return [float(row["time/env_steps_per_second"]) for row in csv.DictReader(file)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS, help="output folder")
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        raise SystemExit("torch found no GPU; use --device cpu for a test run")
    out = args.out.resolve()
    os.chdir(tempfile.mkdtemp())
    found: dict[str, Any] = {
        "date": str(date.today()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "device": torch.cuda.get_device_name() if args.device != "cpu" else "cpu",
        "cases": {},
    }
    print("| case | plain | ours, off | ours, graph | ours, double | best over plain |")
    print("|---|---|---|---|---|---|")
    kinds = {"off": ("off", ""), "graph": ("auto", ""), "double": ("auto", "collector=double")}
    for name in args.cases:
        case = CASES[name]
        speeds: dict[str, list[float]] = {"plain": []}
        for _ in range(args.rounds):
            speeds["plain"] += plain(name, case, torch.device(args.device))[3:]
            for kind, (mode, more) in kinds.items():
                if not more or "vec_env=parallel" in case.overrides:
                    found_speeds = ours(case, args.device, mode, *more.split())[3:]
                    speeds[kind] = speeds.get(kind, []) + found_speeds
        typical = {kind: statistics.median(each) for kind, each in speeds.items()}
        found["cases"][name] = typical
        ratio = max(typical.values()) / typical["plain"]
        cells = " | ".join(
            f"{typical[kind]:,.0f}" if kind in typical else "-" for kind in ("plain", *kinds)
        )
        print(f"| {name} | {cells} | {ratio:.2f} |", flush=True)
        (out / "gpu_policy.json").write_text(json.dumps(found, indent=1) + "\n")
    found["cartpole_by_n_envs"] = by_n_envs(args.device, args.rounds)
    (out / "gpu_policy.json").write_text(json.dumps(found, indent=1) + "\n")


def by_n_envs(device: str, rounds: int) -> dict[str, float]:
    """Steps per second with 1, 4 and 8 CartPole envs."""
    speeds: dict[int, list[float]] = {1: [], 4: [], 8: []}
    for _ in range(rounds):
        for n_envs, found in speeds.items():
            case = CASES["cartpole"]._replace(n_envs=n_envs, n_iterations=10)
            found += ours(case, device, "auto")[3:]
    typical = {str(n_envs): statistics.median(found) for n_envs, found in speeds.items()}
    speeds_text = ", ".join(
        f"{n}: {each:,.0f} ({each / typical['1']:.2f}x)" for n, each in typical.items()
    )
    print(f"CartPole steps/s by n_envs: {speeds_text}")
    return typical


if __name__ == "__main__":
    main()

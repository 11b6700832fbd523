"""What our collection of transitions costs in EnvPool's envs, beside a bare loop.

    python benchmarks/other_envs.py --json benchmarks/results/other_envs.json
    python benchmarks/other_envs.py --tasks CartPole-v1 --n-envs 8 --rounds 2 --seconds 1

The benchmark measures CPU seconds of the process per env step; they include the threads of EnvPool.
``ours`` is the collector of PPO: it acts, steps, resets, counts episodes and fills the rollout
buffer. ``bare`` steps EnvPool and calls the same policy, and keeps nothing. ``torch`` does the same
with the policy in plain torch. All use one thread of torch, and run in turns. A figure is the
median over the rounds, a ratio the median of the ratios within a round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from raw_file import add_json_option, write_raw

from ml_pipeline.algorithms.ppo.agent import PPOAgent
from ml_pipeline.algorithms.ppo.collect import Collector
from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.envs.env_pool import EnvPool
from ml_pipeline.envs.foreign_vector_env import ForeignVectorEnv
from ml_pipeline.extras import import_extra
from ml_pipeline.policy.contracts import PolicyInput, Spaces
from ml_pipeline.policy.image_networks import CNN
from ml_pipeline.policy.networks import MLP
from ml_pipeline.training.contracts import RunContext

N_STEPS = 128  # per env and rollout
GAME = {"episodic_life": True, "reward_clip": True}
Collect = Callable[[], object]  # one rollout


def agent_for(env: Any, *, fast: str) -> PPOAgent:
    """With the networks of the presets, and the same weights."""
    spaces = Spaces(env.single_observation_space, env.single_action_space)
    is_image = len(env.single_observation_space.shape) == 3
    network = CNN if is_image else MLP
    config = PPOConfig(n_steps=N_STEPS, shared_trunk=is_image, fast=fast)
    return PPOAgent(spaces, network, config, RunContext.alone("cpu", seed=1))


def ours(task: str, n_envs: int, settings: dict[str, Any]) -> Collect:
    pool = EnvPool(n_envs, task, **settings)
    env = ForeignVectorEnv(pool, task, n_envs)
    agent = agent_for(env, fast="auto")
    collector = Collector(
        [env],
        env_seed=1,
        noise_seed=1,
        infos_have_episodes=pool.counts_own_episodes,
    )
    buffer = collector.new_buffer(N_STEPS, agent)

    def collect() -> None:
        collector.collect(agent, buffer)
        collector.commit(N_STEPS)

    return collect


def bare(task: str, n_envs: int, settings: dict[str, Any], *, fast: str = "auto") -> Collect:
    agent = agent_for(EnvPool(1, task, **settings), fast=fast)
    seeds = list(range(1, 1 + n_envs))
    library = import_extra("envpool", needed_by="benchmarks/other_envs.py")
    # EnvPool and the adapter choose their threads in the same way.
    settings = {"num_threads": EnvPool(n_envs, task).num_threads, **settings}
    pool = library.make_gymnasium(task, num_envs=n_envs, env_seed=seeds, **settings)
    generator = torch.Generator().manual_seed(1)
    obs, _ = pool.reset()

    @torch.no_grad()
    def collect() -> None:
        nonlocal obs
        noise: Any = agent.draw_noise(N_STEPS, n_envs, generator)
        if agent.takes_arrays:
            noise = noise.numpy()
        for t in range(N_STEPS):
            if agent.takes_arrays:
                inputs = PolicyInput(obs, None, None, None)
            else:
                inputs = agent.inputs({"": obs})
            action: Any = agent.sample_batch(inputs, noise[t]).action
            action = action if agent.takes_arrays else action.numpy()
            obs, *_ = pool.step(agent.distribution.to_env(action))

    return collect


def measured(collect: Collect, n_envs: int, seconds: float) -> float:
    """CPU microseconds per env step, over at least ``seconds``."""
    n_rollouts, begin, deadline = 0, time.process_time(), time.perf_counter() + seconds
    while n_rollouts == 0 or time.perf_counter() < deadline:
        collect()
        n_rollouts += 1
    return 1e6 * (time.process_time() - begin) / (n_rollouts * N_STEPS * n_envs)


def compare(task: str, n_envs: int, rounds: int, seconds: float) -> dict[str, Any]:
    settings = {} if task.startswith("CartPole") else GAME
    ways = {
        "ours": ours(task, n_envs, settings),
        "bare": bare(task, n_envs, settings),
        "torch": bare(task, n_envs, settings, fast="off"),
    }
    for collect in ways.values():  # first calls are slow
        collect()
    figures: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, collect in ways.items():
            figures[name].append(measured(collect, n_envs, seconds))
    ratios = {
        name: median(np.divide(figures["ours"], figures[name]).tolist())
        for name in ("bare", "torch")
    }
    shown = "  ".join(f"{name} {median(each):8.2f}" for name, each in figures.items())
    print(
        f"{task:12} n={n_envs:<4} CPU us per env step: {shown}   "
        f"ours / bare {ratios['bare']:.3f}   ours / torch {ratios['torch']:.3f}",
        flush=True,
    )
    return {"task": task, "n_envs": n_envs, "cpu_us_per_env_step": figures, "ours_over": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", default=["CartPole-v1", "Pong-v5"])
    parser.add_argument("--n-envs", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=5.0, help="per round and way")
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [
        compare(task, n_envs, options.rounds, options.seconds)
        for task in options.tasks
        for n_envs in options.n_envs
    ]
    write_raw(options.json, results)


if __name__ == "__main__":
    main()

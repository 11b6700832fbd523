"""Speed of envs in JAX through the bridge: env steps per second, alone and with PPO.

    python benchmarks/jax_envs.py                                     # gymnax CartPole on the CPU
    python benchmarks/jax_envs.py --device cuda --sizes 2048x32 8192x32 32768x32 131072x16
    python benchmarks/jax_envs.py --env craftax --task Craftax-Symbolic-v1 --sizes 1024x64

"bridge" steps the envs with actions of torch and reads nothing on the host. "ppo" is a whole
iteration at the settings of gpu.py, whose metrics the host reads. gpu_jax.py has the same PPO in
JAX alone, in the style of PureJaxRL: run both in one sitting.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from raw_file import add_json_option, write_raw

from ml_pipeline.algorithms.ppo.agent import PPOAgent
from ml_pipeline.algorithms.ppo.collect import Collector
from ml_pipeline.algorithms.ppo.config import PPOConfig
from ml_pipeline.algorithms.ppo.trainer import PPOTrainer
from ml_pipeline.device import precision_of_products, program_mode
from ml_pipeline.envs.jax_env import JaxVectorEnv
from ml_pipeline.envs.jax_libraries import Brax, Craftax, Gymnax
from ml_pipeline.policy.contracts import Spaces
from ml_pipeline.policy.networks import MLP
from ml_pipeline.ranks.world import World
from ml_pipeline.training.contracts import RunContext
from ml_pipeline.training.graphs import Programs

ENVS: dict[str, type[JaxVectorEnv]] = {"gymnax": Gymnax, "craftax": Craftax, "brax": Brax}


def bridge_steps(env: JaxVectorEnv, n_steps: int) -> None:
    action = torch.as_tensor(env.action_space.sample(), device=env.device)
    for _ in range(n_steps):
        env.transition(env.position, action)


def new_trainer(env: JaxVectorEnv, n_steps: int, precision: str) -> PPOTrainer:
    """Two 64-64 tanh networks, 4 epochs of 4 minibatches."""
    config = PPOConfig(n_steps=n_steps, n_epochs=4, n_minibatches=4, entropy_coef=0.01)
    programs = Programs(env.device, program_mode("auto", env.device))
    context = RunContext(env.device, 1, precision, programs, World())
    spaces = Spaces(env.single_observation_space, env.single_action_space)
    agent = PPOAgent(spaces, MLP, config, context)
    collector = Collector([env], env_seed=1, noise_seed=2, programs=programs)
    return PPOTrainer(agent, collector, context)


def seconds_of(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """The median after two rounds, which compile."""
    seconds = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", default="gymnax", choices=ENVS)
    parser.add_argument("--task", default="CartPole-v1")
    parser.add_argument("--sizes", nargs="+", default=["2048x32"], metavar="ENVSxSTEPS")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="tf32", choices=["tf32", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    add_json_option(parser)
    args = parser.parse_args()
    device, figures = torch.device(args.device), []
    print(f"{args.env} {args.task} on {device}, million env steps per second")
    print("| size | bridge | ppo |")
    print("|---|---|---|")
    with precision_of_products(args.precision, device):
        for size in args.sizes:
            n_envs, n_steps = map(int, size.split("x"))
            make: Any = ENVS[args.env]
            env: JaxVectorEnv = make(n_envs, device=device, seed=1, task_id=args.task)
            env.reset()
            steps = seconds_of(partial(bridge_steps, env, n_steps), device, args.rounds)
            trainer = new_trainer(env, n_steps, args.precision)
            iteration = seconds_of(trainer.train_episode_vectorized, device, args.rounds)
            speeds = [n_envs * n_steps / each / 1e6 for each in (steps, iteration)]
            print(f"| {size} | {speeds[0]:.3f} | {speeds[1]:.3f} |", flush=True)
            figures.append({"size": size, "bridge": speeds[0], "ppo": speeds[1]})
    facts = {"env": args.env, "task": args.task, "device": str(device)}
    write_raw(
        args.json, {**facts, "precision": args.precision, "million_steps_per_second": figures}
    )


if __name__ == "__main__":
    main()

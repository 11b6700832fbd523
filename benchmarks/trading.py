"""The trading envs: env steps per second on one core, in workers and on a device, and memory.

    python benchmarks/trading.py single                           # one env, per second of CPU time
    python benchmarks/trading.py workers --n-workers 1 2 4 8      # ParallelEnv, memory per worker
    python benchmarks/trading.py tensor --device cuda --n-envs 4096 16384 65536

All three trade a synthetic market with random actions, or with the actions of an untrained policy
(``tensor``: two 64-64 networks, as in benchmarks/gpu.py). ``rollout`` counts the policy and the
envs; ``iteration`` adds PPO's update of 4 epochs. Figures are medians over the rounds, except those
of ``single``: the best round, because other processes disturb it. The memory of a worker that no
other process shares (``private``) shows whether workers map one copy of the market.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym

from ml_pipeline.envs.vec_env import ParallelEnv
from ml_pipeline.envs.workers.cores import available_cores
from ml_pipeline.worlds.trading.env import Trading

BARS_PER_ACTION = 8  # of "hold"


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    market = {"market": "random_walk", "n_symbols": options.symbols, "n_bars": options.bars}
    return {"data": market}


def single(options: argparse.Namespace) -> None:
    """Steps per second of CPU time; CartPole tells how fast this core is."""
    settings = settings_of(options)
    cases: dict[str, Any] = {
        "CartPole-v1": gym.make("CartPole-v1").unwrapped,
        "random positions": Trading(**settings),
        f"a position for {BARS_PER_ACTION} bars": Trading(**settings),
        "continuous": Trading(**settings, positions=None),
        "window of 16": Trading(**settings, window=16),
        f"portfolio of {options.symbols}": Trading(**settings, portfolio=True),
    }
    for label, env in cases.items():
        env.action_space.seed(0)
        actions = [env.action_space.sample() for _ in range(1_000)]
        if label.startswith("a position"):
            actions = [actions[i // BARS_PER_ACTION] for i in range(len(actions))]
        env.reset(seed=0)
        rates = []
        for _ in range(options.rounds):
            begin = time.process_time()
            for action in actions * 5:
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
            rates.append(5 * len(actions) / (time.process_time() - begin))
        print(f"{label:<24}{max(rates):>12,.0f} steps/s", flush=True)


def workers(options: argparse.Namespace) -> None:
    """Steps per second by the wall clock, and the memory of the workers."""
    make_env = partial(Trading, **settings_of(options))
    market = make_env().task.market
    size = sum(each.nbytes for each in market[2:]) / 1e6
    print(f"market: {len(market.time):,} bars of {len(market.symbols)} symbols, {size:,.0f} MB")
    for n_workers in options.n_workers:
        n_envs = n_workers * options.envs_per_worker
        env = ParallelEnv(
            [make_env] * n_envs, seed=1, n_workers=n_workers, infos="final", start_method="spawn"
        )
        env.action_space.seed(0)
        actions = [env.action_space.sample() for _ in range(200)]
        env.reset()
        rates = []
        for _ in range(options.rounds):
            begin = time.perf_counter()
            for action in actions:
                env.step(action)
            rates.append(n_envs * len(actions) / (time.perf_counter() - begin))
        memory = [memory_of(pid) for pid in env.worker_pids]
        env.close()
        resident, private = (max(each) for each in zip(*memory, strict=True))
        print(
            f"{n_workers} workers, {n_envs} envs: {statistics.median(rates):,.0f} steps/s; "
            f"at most {resident:.0f} MB each, {private:.0f} MB private",
            flush=True,
        )


def memory_of(pid: int) -> tuple[float, float]:
    """Resident and private megabytes of a process, from Linux's /proc."""
    found = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, size = line.split()[:2]
        found[name.rstrip(":")] = int(size) / 1e3
    return found["Rss"], found["Private_Clean"] + found["Private_Dirty"]


def tensor(options: argparse.Namespace) -> None:
    """Accounts on a device, with the policy in the loop."""
    import torch

    from ml_pipeline.device import precision_of_products
    from ml_pipeline.worlds.trading.tensor_env import TorchTrading

    device = torch.device(options.device)
    print(
        f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'}, {torch.__version__}"
    )
    print("| accounts | rollout M steps/s | iteration M steps/s | market MB | bytes per account |")
    print("|---|---|---|---|---|")
    for n_envs in options.n_envs:
        env = TorchTrading(n_envs, device=device, seed=1, **settings_of(options))
        trainer = new_trainer(env, options)
        with precision_of_products(options.precision, device):
            seconds = timed(trainer, options.rounds, device)
        n_steps = n_envs * options.n_steps / 1e6
        state = (*env.position.state, *env.position[1:])
        cells = [
            f"{n_envs:,}",
            *(f"{n_steps / each:.2f}" for each in seconds),
            f"{(env._bars.nbytes + env._features.nbytes) / 1e6:.0f}",
            f"{sum(part.nbytes for part in state) / n_envs:.0f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def new_trainer(env: Any, options: argparse.Namespace) -> Any:
    from ml_pipeline.algorithms.ppo.agent import PPOAgent
    from ml_pipeline.algorithms.ppo.collect import Collector
    from ml_pipeline.algorithms.ppo.config import PPOConfig
    from ml_pipeline.algorithms.ppo.trainer import PPOTrainer
    from ml_pipeline.policy.contracts import Spaces
    from ml_pipeline.policy.networks import MLP
    from ml_pipeline.ranks.world import World
    from ml_pipeline.seeding import stream_seed
    from ml_pipeline.training.contracts import RunContext
    from ml_pipeline.training.graphs import Programs

    config = PPOConfig(n_steps=options.n_steps, n_epochs=4, n_minibatches=4)
    spaces = Spaces(env.single_observation_space, env.single_action_space)
    programs = Programs(env.device, "graph" if env.device.type == "cuda" else "eager")
    context = RunContext(env.device, 1, options.precision, programs, World())
    agent = PPOAgent(spaces, MLP, config, context)
    noise_seed = stream_seed(1, "actions")
    collector = Collector([env], env_seed=1, noise_seed=noise_seed, programs=programs)
    return PPOTrainer(agent, collector, context)


def timed(trainer: Any, rounds: int, device: Any) -> tuple[float, float]:
    """Seconds of a rollout and of a whole iteration."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(4):  # compiles and captures
        trainer.train_episode_vectorized()
    rollouts, iterations = [], []
    for _ in range(rounds):
        wait()
        begin = time.perf_counter()
        trainer.collector.collect(trainer.agent, trainer.buffer)
        wait()
        rollouts.append(time.perf_counter() - begin)
        trainer.collector.commit(trainer.buffer.n_steps)
        begin = time.perf_counter()
        trainer.train_episode_vectorized()
        wait()
        iterations.append(time.perf_counter() - begin)
    return statistics.median(rollouts), statistics.median(iterations)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {"single": single, "workers": workers, "tensor": tensor}
    parser.add_argument("what", choices=list(parts))
    parser.add_argument("--symbols", type=int, default=4)
    parser.add_argument("--bars", type=int, default=100_000, help="per symbol")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--n-workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--envs-per-worker", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--n-envs", nargs="+", type=int, default=[4_096])
    parser.add_argument("--n-steps", type=int, default=32, help="of a rollout")
    parser.add_argument("--precision", default="tf32")
    options = parser.parse_args()
    python = platform.python_version()
    print(f"{date.today()}, {platform.machine()}, {available_cores()} cores, Python {python}")
    parts[options.what](options)


if __name__ == "__main__":
    main()

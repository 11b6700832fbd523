"""PPO training speed compared with Stable-Baselines3 and CleanRL's script, with the same settings.

    python benchmarks/ppo.py --envs CartPole-v1 LunarLander-v3 HalfCheetah-v5 --seeds 1 2 3
    python benchmarks/ppo.py --envs CartPole-v1 --cleanrl path/to/cleanrl/ppo.py
    python benchmarks/ppo.py --envs LunarLander-v3 --peers ours-parallel ours-double
    python benchmarks/ppo.py --network lstm   # SB3: sb3-contrib's RecurrentPPO; also gru, wide
    python benchmarks/ppo.py --parts          # times an update, in NumPy and with autograd

Each training is a separate process with one torch thread; Breakout learns from images and has one
thread per core. The libraries take turns, seed by seed, so a slow phase of the machine affects all
of them. ``steps/s`` is the speed of the training loop. It includes records and checkpoints, but not
imports and setup. ``cpu`` is env steps per second of CPU time of the process and its workers. The
return is the mean of the last 20 training episodes; it shows that all of them learn equally well,
except in Breakout, whose training is too short to learn. Compare figures within one run only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from raw_file import add_json_option, write_raw

# Settings published by rl-baselines3-zoo and, for HalfCheetah, by CleanRL.
SETTINGS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {
        "steps": 100_000, "n_envs": 8, "n_steps": 32, "minibatches": 1, "epochs": 20, "lr": 1e-3,
        "anneal_lr": True, "gamma": 0.98, "lam": 0.8, "clip": 0.2, "anneal_clip": True,
        "entropy": 0.0, "normalize": False,
    },
    "LunarLander-v3": {
        "steps": 98_304, "n_envs": 16, "n_steps": 1024, "minibatches": 256, "epochs": 4, "lr": 3e-4,
        "anneal_lr": False, "gamma": 0.999, "lam": 0.98, "clip": 0.2, "anneal_clip": False,
        "entropy": 0.01, "normalize": False,
    },
    "HalfCheetah-v5": {
        "steps": 51_200, "n_envs": 1, "n_steps": 2048, "minibatches": 32, "epochs": 10, "lr": 3e-4,
        "anneal_lr": True, "gamma": 0.99, "lam": 0.95, "clip": 0.2, "anneal_clip": False,
        "entropy": 0.0, "normalize": True,
    },
    "Walker2d-v5": {
        "steps": 81_920, "n_envs": 8, "n_steps": 512, "minibatches": 64, "epochs": 10, "lr": 3e-4,
        "anneal_lr": True, "gamma": 0.99, "lam": 0.95, "clip": 0.2, "anneal_clip": False,
        "entropy": 0.0, "normalize": True,
    },
    "BreakoutNoFrameskip-v4": {
        "steps": 5_120, "n_envs": 8, "n_steps": 128, "minibatches": 4, "epochs": 4, "lr": 2.5e-4,
        "anneal_lr": True, "gamma": 0.99, "lam": 0.95, "clip": 0.1, "anneal_clip": True,
        "entropy": 0.01, "normalize": False,
    },
}  # fmt: skip
# Ours; ``train_sb3`` has the same layers. SB3 has no GRU, so ``gru`` is compared with its LSTM.
NETWORKS = {
    "mlp": [],
    "wide": ["network=mlp", "network.hidden_sizes=[256,256]"],
    "lstm": ["network=lstm"],
    "gru": ["network=lstm", "network.cell=gru"],
}
IMAGES = ["BreakoutNoFrameskip-v4"]


PEERS = [
    *("sb3-dummy", "sb3-subproc", "cleanrl"),
    *("ours-serial", "ours-auto", "ours-parallel", "ours-shared", "ours-double"),
]


def train_ours(env_id: str, setting: dict[str, Any], seed: int, mode: str) -> dict[str, Any]:
    from ml_pipeline.assembly.run import train
    from ml_pipeline.runs.loggers import read_metrics

    def schedule(name: str) -> str:
        return "linear" if setting[name] else "constant"

    env = [f"env.id={env_id}"]
    if env_id in IMAGES:
        env = ["env=breakout", "network=cnn", "agent.shared_trunk=true"]
    result = train(
        [
            *env,
            *NETWORKS[setting.get("network", "mlp")],
            f"seed={seed}",
            f"n_envs={setting['n_envs']}",
            f"total_steps={setting['steps']}",
            f"agent.n_steps={setting['n_steps']}",
            f"agent.n_minibatches={setting['minibatches']}",
            f"agent.n_epochs={setting['epochs']}",
            f"agent.learning_rate={setting['lr']}",
            f"agent.learning_rate_schedule={schedule('anneal_lr')}",
            f"agent.clip_range={setting['clip']}",
            f"agent.clip_range_schedule={schedule('anneal_clip')}",
            f"agent.gamma={setting['gamma']}",
            f"agent.gae_lambda={setting['lam']}",
            f"agent.entropy_coef={setting['entropy']}",
            "agent.value_coef=1.0",  # ours scales half the squared error, SB3's 0.5 the whole
            f"agent.normalize_obs={setting['normalize']}",
            f"agent.scale_reward={setting['normalize']}",
            f"vec_env={'parallel' if mode == 'double' else mode}",
            f"collector={'double' if mode == 'double' else 'sync'}",
            "device=cpu",
            "logger=none",
            "~callbacks.evaluation",
        ]
    )
    rows = read_metrics(result.run_dir / "metrics.csv")
    seconds = [float(row["time/iteration_seconds"]) for row in rows]
    collecting = [float(row["time/collect_seconds"]) for row in rows]
    summary = json.loads((result.run_dir / "summary.json").read_text())
    returns = [float(row["rollout/episode_return"] or "nan") for row in rows[-20:]]
    known = [value for value in returns if value == value]
    return {
        "steps_per_second": result.env_steps / summary["train_seconds"],
        "collect_share": sum(collecting) / sum(seconds),
        "final_return": statistics.mean(known) if known else float("nan"),
    }


def train_sb3(env_id: str, setting: dict[str, Any], seed: int, mode: str) -> dict[str, Any]:
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import (
        DummyVecEnv,
        SubprocVecEnv,
        VecFrameStack,
        VecNormalize,
    )

    kind = SubprocVecEnv if mode == "subproc" else DummyVecEnv
    if env_id in IMAGES:
        name = f"ale_py:{env_id}"  # the module registers it
        atari = make_atari_env(name, n_envs=setting["n_envs"], seed=seed, vec_env_cls=kind)
        env: Any = VecFrameStack(atari, 4)
    else:
        torch.set_num_threads(1)
        env = make_vec_env(env_id, n_envs=setting["n_envs"], seed=seed, vec_env_cls=kind)
    if setting["normalize"]:
        env = VecNormalize(env, gamma=setting["gamma"])

    def schedule(value: float, anneal: bool) -> Any:
        return (lambda left: left * value) if anneal else value

    algorithm: Any = PPO
    policy = "CnnPolicy" if env_id in IMAGES else "MlpPolicy"
    layers: dict[str, Any] = {}
    network = setting.get("network", "mlp")
    if network == "wide":
        layers = {"net_arch": [256, 256]}
    elif network != "mlp":
        from sb3_contrib import RecurrentPPO

        algorithm, policy = RecurrentPPO, "MlpLstmPolicy"
        layers = {"lstm_hidden_size": 64, "net_arch": [64], "enable_critic_lstm": True}
    model = algorithm(
        policy,
        env,
        policy_kwargs=layers,
        device="cpu",
        seed=seed,
        n_steps=setting["n_steps"],
        batch_size=setting["n_envs"] * setting["n_steps"] // setting["minibatches"],
        n_epochs=setting["epochs"],
        learning_rate=schedule(setting["lr"], setting["anneal_lr"]),
        clip_range=schedule(setting["clip"], setting["anneal_clip"]),
        gamma=setting["gamma"],
        gae_lambda=setting["lam"],
        ent_coef=setting["entropy"],
    )
    begin = time.perf_counter()
    model.learn(setting["steps"])
    seconds = time.perf_counter() - begin
    episodes = list(model.ep_info_buffer or [])[-20:]
    env.close()
    return {
        "steps_per_second": model.num_timesteps / seconds,
        "final_return": statistics.mean(episode["r"] for episode in episodes),
    }


def cleanrl_command(script: str, env_id: str, setting: dict[str, Any], seed: int) -> list[str]:
    flags = {
        "env-id": env_id, "seed": seed, "total-timesteps": setting["steps"],
        "num-envs": setting["n_envs"], "num-steps": setting["n_steps"],
        "num-minibatches": setting["minibatches"], "update-epochs": setting["epochs"],
        "learning-rate": setting["lr"], "gamma": setting["gamma"], "gae-lambda": setting["lam"],
        "clip-coef": setting["clip"], "ent-coef": setting["entropy"], "vf-coef": 0.5,
    }  # fmt: skip
    return [sys.executable, script, *(f"--{name}={value}" for name, value in flags.items())]


def run_once(peer: str, env_id: str, setting: dict[str, Any], seed: int, cleanrl: str) -> Any:
    """Run one training in a separate process."""
    name, _, mode = peer.partition("-")
    if name == "cleanrl":
        command = cleanrl_command(str(Path(cleanrl).resolve()), env_id, setting, seed)
    else:
        task = json.dumps([name, env_id, setting, seed, mode])
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", task]
    environment = dict(os.environ)
    if env_id not in IMAGES:
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    repository = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([repository, environment.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
        )
        output = process.stdout.read() if process.stdout else ""
        _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{peer} failed:\n{output}")
    if name == "cleanrl":
        lines = [line.split() for line in output.splitlines()]
        speeds = [float(words[1]) for words in lines if words[:1] == ["SPS:"]]
        returns = [float(w[1].partition("=")[2].strip("[]")) for w in lines if "episodic" in str(w)]
        result = {"steps_per_second": speeds[-1], "final_return": statistics.mean(returns[-20:])}
    else:
        result = json.loads(output.splitlines()[-1])
    return {**result, "cpu": setting["steps"] / (usage.ru_utime + usage.ru_stime)}


def compare(args: argparse.Namespace) -> None:
    print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, seeds {args.seeds}")
    raw = {}
    for env_id in args.envs:
        setting = dict(SETTINGS[env_id])
        setting["steps"] = args.steps or setting["steps"]
        setting["network"] = args.network
        peers = ["sb3-dummy", *(["sb3-subproc"] if setting["n_envs"] > 1 else [])]
        is_plain = env_id not in IMAGES and not setting["normalize"]
        peers += ["cleanrl"] if args.cleanrl and is_plain and args.network == "mlp" else []
        peers += ["ours-serial", *(["ours-auto"] if setting["n_envs"] > 1 else [])]
        peers = args.peers or peers
        results: dict[str, list[dict[str, float]]] = {peer: [] for peer in peers}
        for seed in args.seeds:
            for peer in peers:
                results[peer].append(run_once(peer, env_id, setting, seed, args.cleanrl))
        print(f"\n{env_id}, {setting['steps']:,} steps, network {args.network}")
        print(f"| | steps/s | over {peers[0]} | cpu | over {peers[0]} | return |")
        print("|---|---|---|---|---|---|")
        base = results[peers[0]]
        for peer, runs in results.items():
            cells = []
            for name in ("steps_per_second", "cpu"):
                ratios = [a[name] / b[name] for a, b in zip(runs, base, strict=True)]
                cells.append(f"{statistics.median(run[name] for run in runs):,.0f}")
                cells.append(
                    f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})"
                )
            reached = statistics.median(run["final_return"] for run in runs)
            print(f"| {peer} | {' | '.join(cells)} | {reached:.1f} |", flush=True)
        raw[env_id] = {"steps": setting["steps"], "seeds": args.seeds, "trainings": results}
    write_raw(args.json, raw)


def micros(work: Callable[[], object]) -> float:
    """Median microseconds of a call."""
    durations = []
    for _ in range(400):
        begin = time.perf_counter()
        work()
        durations.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(durations)


def parts() -> None:
    """Time an update and acting in 8 envs, in NumPy and torch; then time a dense layer."""
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(1)
    threadpool_limits(limits=1)
    print("| | batch | update in NumPy | in torch | act in 8 envs in NumPy | in torch |")
    print("|---|---|---|---|---|---|")
    for name in ("CartPole", "HalfCheetah"):
        for size in (64, 256):
            (update, act), (plain_update, plain_act) = (
                update_and_act(name, size, fast=fast) for fast in (True, False)
            )
            times = " | ".join(f"{t:.0f} µs" for t in (update, plain_update, act, plain_act))
            print(f"| {name} | {size} | {times} |", flush=True)
    print("\n| dense layer 64 x 64, batch | one thread | without oneDNN | all threads |")
    print("|---|---|---|---|")
    for size in (64, 256):
        x, layer = torch.randn(size, 64), torch.nn.Linear(64, 64)
        with torch.no_grad():
            one = micros(lambda: layer(x))  # noqa: B023
            with torch.backends.mkldnn.flags(enabled=False):
                without = micros(lambda: layer(x))  # noqa: B023
            torch.set_num_threads(os.cpu_count() or 1)
            every = micros(lambda: layer(x))  # noqa: B023
            torch.set_num_threads(1)
        print(f"| {size} | {one:.0f} µs | {without:.0f} µs | {every:.0f} µs |", flush=True)


def update_and_act(name: str, size: int, *, fast: bool) -> tuple[float, float]:
    """Microseconds of an update on ``size`` transitions, and of acting in 8 envs."""
    import numpy as np
    import torch
    from gymnasium import spaces

    from ml_pipeline.algorithms.ppo.agent import PPOAgent
    from ml_pipeline.algorithms.ppo.config import PPOConfig
    from ml_pipeline.algorithms.ppo.loss import Minibatch, Rates
    from ml_pipeline.policy.contracts import PolicyInput, Spaces
    from ml_pipeline.policy.networks import MLP
    from ml_pipeline.training.contracts import RunContext

    n_obs, action_space = {
        "CartPole": (4, spaces.Discrete(2)),
        "HalfCheetah": (17, spaces.Box(-1, 1, (6,), np.float32)),
    }[name]
    space = spaces.Box(-1, 1, (n_obs,), np.float32)
    config = PPOConfig(fast="auto" if fast else "off")
    agent = PPOAgent(Spaces(space, action_space), MLP, config, RunContext.alone())
    generator = torch.Generator().manual_seed(1)
    obs, advantage = (torch.randn(size, n, generator=generator) for n in (n_obs, 1))
    inputs = PolicyInput(obs, None, None, None)
    noise = agent.draw_noise(1, size, generator)[0]
    action = agent.sample_batch(inputs, noise).action
    scores = agent.score_batch(inputs, action)
    batch = Minibatch(inputs, action, *scores, advantage[:, 0], advantage[:, 0])
    rates = Rates(learning_rate=1e-6, clip_range=0.2, entropy_coef=0.01)
    update = micros(lambda: agent.update(batch, rates))
    few: Any = obs[:8]
    few_noise: Any = noise[:8]
    if agent.takes_arrays:  # as in a rollout
        few, few_noise = few.numpy(), few_noise.numpy()
    few_inputs = PolicyInput(few, None, None, None)
    return update, micros(lambda: agent.sample_batch(few_inputs, few_noise))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--envs", nargs="+", choices=list(SETTINGS), default=["CartPole-v1"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="env steps per training; overrides the settings")
    parser.add_argument("--network", choices=list(NETWORKS), default="mlp")
    parser.add_argument("--cleanrl", default="", help="CleanRL's ppo.py, for Discrete actions")
    parser.add_argument("--peers", nargs="+", metavar="PEER", choices=PEERS)
    parser.add_argument("--parts", action="store_true")
    add_json_option(parser)
    args = parser.parse_args()
    if args.worker:
        name, *task = json.loads(args.worker)
        print(json.dumps((train_ours if name == "ours" else train_sb3)(*task)))
    elif args.parts:
        parts()
    else:
        compare(args)


if __name__ == "__main__":
    main()

"""Returns of our PPO and of Stable-Baselines3's over seeds, at the same settings.

    pip install -e ".[peers]"
    python benchmarks/sb3_returns.py --task taxi --seeds 1 2 3 4 5
    python benchmarks/sb3_returns.py --task lunar_lander --peers ours --seeds 1
    python benchmarks/sb3_returns.py --table      # only prints the known results

``taxi``: Taxi-v4 with action masks against MaskablePPO. Its transitions are known, so both returns
are exact means over the 300 starts. ``lunar_lander``: LunarLander-v3 with continuous actions, SB3's
default settings, observations and rewards normalised; 50 episodes with seeds that training never
used. Each training is a separate process with one torch thread. The results are in
benchmarks/results/sb3_returns.json; known ones do not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results" / "sb3_returns.json"
N_EPISODES, EVAL_SEED = 50, 10**6
LIMIT = 200  # steps of a Taxi episode
Array = NDArray[Any]
Result = dict[str, Any]

# As SB3 names them; lunar_lander leaves all at SB3's defaults.
SETTINGS: dict[str, dict[str, Any]] = {
    "taxi": {
        "steps": 100_352, "n_envs": 8, "n_steps": 128, "batch_size": 256, "n_epochs": 10,
        "learning_rate": 1e-3, "gamma": 0.99, "gae_lambda": 0.95, "ent_coef": 0.01,
    },
    "lunar_lander": {
        "steps": 301_056, "n_envs": 1, "n_steps": 2048, "batch_size": 64, "n_epochs": 10,
        "learning_rate": 3e-4, "gamma": 0.99, "gae_lambda": 0.95, "ent_coef": 0.0,
    },
}  # fmt: skip


def train_ours(task: str, seed: int) -> Result:
    import torch

    from ml_pipeline.analysis.evaluate import evaluate
    from ml_pipeline.assembly.run import train
    from ml_pipeline.training.contracts import Callback

    taxi = ExactTaxi()

    class Curve(Callback):
        def on_iteration_end(self, loop: Any, metrics: Any) -> None:
            if task == "taxi":
                taxi.add(partial(probabilities, loop.trainer.agent))

    def probabilities(agent: Any, states: Array, masks: Array) -> Array:
        inputs = agent.inputs(agent.reader.read(states), masks)
        with torch.no_grad():
            outputs, _ = agent.backend.outputs(inputs)
        return torch.softmax(outputs, dim=-1).numpy()

    setting = SETTINGS[task]
    size = setting["n_steps"] * setting["n_envs"]
    own = {
        "taxi": ["env.id=Taxi-v4", "agent.action_mask=info"],
        "lunar_lander": [
            "env.id=LunarLander-v3", "+env.kwargs.continuous=true",
            "agent.normalize_obs=true", "agent.scale_reward=true",
        ],
    }[task]  # fmt: skip
    result = train(
        [
            *own,
            f"seed={seed}",
            f"total_steps={setting['steps']}",
            f"n_envs={setting['n_envs']}",
            f"agent.n_steps={setting['n_steps']}",
            f"agent.n_minibatches={size // setting['batch_size']}",
            f"agent.n_epochs={setting['n_epochs']}",
            f"agent.learning_rate={setting['learning_rate']}",
            "agent.learning_rate_schedule=constant",
            f"agent.gamma={setting['gamma']}",
            f"agent.gae_lambda={setting['gae_lambda']}",
            f"agent.entropy_coef={setting['ent_coef']}",
            "agent.value_coef=1.0",  # ours scales half the squared error, SB3's 0.5 the whole
            "device=cpu",
            "vec_env=serial",
            "logger=none",
            "~callbacks.evaluation",
        ],
        callbacks={"curve": Curve()},
    )
    if task == "taxi":
        return {"train": result.mean_reward, **taxi.summary()}
    agent: Any = result.agent
    returns = {
        name: evaluate(
            agent, lander(), n_episodes=N_EPISODES, seed=EVAL_SEED, deterministic=is_greedy
        ).mean
        for name, is_greedy in (("greedy", True), ("sampled", False))
    }
    log_std = float(agent.distribution.log_std.detach().mean())
    return {"train": result.mean_reward, **returns, "log_std": log_std}


def train_sb3(task: str, seed: int) -> Result:
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    taxi = ExactTaxi()

    def at_step(local: dict[str, Any], _: Any) -> bool:
        is_first_rollout = local["self"].num_timesteps == n_envs
        if task == "taxi" and local["n_steps"] == 0 and not is_first_rollout:
            taxi.add(partial(probabilities, local["self"]))
        return True  # continue

    def probabilities(model: Any, states: Array, masks: Array) -> Array:
        with torch.no_grad():
            policy = model.policy.get_distribution(torch.from_numpy(states), masks)
        return np.asarray(policy.distribution.probs)

    torch.set_num_threads(1)
    setting = dict(SETTINGS[task])
    steps, n_envs = setting.pop("steps"), setting.pop("n_envs")
    if task == "taxi":
        from sb3_contrib import MaskablePPO
        from sb3_contrib.common.wrappers import ActionMasker

        def make() -> Any:
            return Monitor(ActionMasker(gym.make("Taxi-v4"), taxi_mask))

        venv: Any = DummyVecEnv([make] * n_envs)
        learner: Any = MaskablePPO
    else:
        venv = VecNormalize(DummyVecEnv([lambda: Monitor(lander())]), gamma=setting["gamma"])
        learner = PPO
    venv.seed(seed)
    model = learner("MlpPolicy", venv, seed=seed, device="cpu", **setting)
    model.learn(steps, callback=at_step)
    train = statistics.mean(episode["r"] for episode in model.ep_info_buffer)
    if task == "taxi":
        taxi.add(partial(probabilities, model))
        return {"train": train, **taxi.summary()}
    returns = {
        name: statistics.mean(sb3_episodes(model, venv, deterministic=is_greedy))
        for name, is_greedy in (("greedy", True), ("sampled", False))
    }
    return {"train": train, **returns, "log_std": float(model.policy.log_std.detach().mean())}


def lander() -> gym.Env[Any, Any]:
    return gym.make("LunarLander-v3", continuous=True)


def sb3_episodes(model: Any, normaliser: Any, *, deterministic: bool) -> list[float]:
    """Episode k starts from EVAL_SEED + k, as in our evaluation."""
    returns, env = [], lander()
    for episode in range(N_EPISODES):
        obs, _ = env.reset(seed=EVAL_SEED + episode)
        total, done = 0.0, False
        while not done:
            seen = normaliser.normalize_obs(obs)
            action, _ = model.predict(seen, deterministic=deterministic)
            obs, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            done = terminated or truncated
        returns.append(total)
    return returns


def taxi_mask(env: gym.Env[Any, Any]) -> Array:
    taxi: Any = env.unwrapped
    return np.asarray(taxi.action_mask(taxi.s), dtype=bool)


class ExactTaxi:
    """Exact returns of a policy over all starts, after each iteration."""

    def __init__(self) -> None:
        taxi: Any = gym.make("Taxi-v4").unwrapped
        self.states = np.arange(500)
        self.masks = np.array([taxi.action_mask(state) for state in self.states], dtype=bool)
        moves = np.array([[taxi.P[s][a][0] for a in range(6)] for s in self.states])
        self._successor = moves[..., 1].astype(int)
        self._reward, self._continues = moves[..., 2], 1.0 - moves[..., 3]
        places = [tuple(taxi.decode(state)) for state in self.states]
        self._starts = [s for s, (_, _, who, goal) in enumerate(places) if who not in (4, goal)]
        self._policy = np.zeros((500, 6))
        self.greedy: list[float] = []
        self.sampled: list[float] = []

    def add(self, probabilities: Callable[[Array, Array], Array]) -> None:
        """``probabilities`` takes states [500] and masks [500, 6], and returns [500, 6]."""
        self._policy = probabilities(self.states, self.masks).astype(np.float64)
        self.greedy.append(float(self._returns(self._best()).mean()))
        self.sampled.append(float(self._returns(self._policy).mean()))

    def summary(self) -> Result:
        """Of the last policy, and both curves."""
        best = self._policy.argmax(axis=1)
        stuck = np.flatnonzero(self._returns(self._best()) <= -LIMIT)
        loops = {self._loop(self._starts[i], best) for i in stuck}
        # How likely a sampled action differs, at the state of the loop where it is likeliest.
        leaving = [max(1.0 - self._policy[state].max() for state in loop) for loop in loops]
        return {
            "greedy": self.greedy[-1],
            "sampled": self.sampled[-1],
            "stuck_starts": len(stuck),
            "loops": len(loops),
            "longest_loop": max(map(len, loops), default=0),
            "leaving": statistics.median(leaving) if leaving else None,
            "greedy_curve": [round(each, 1) for each in self.greedy],
            "sampled_curve": [round(each, 1) for each in self.sampled],
        }

    def _best(self) -> Array:
        """The greedy policy."""
        return np.asarray(np.eye(6)[self._policy.argmax(axis=1)])

    def _returns(self, policy: Array) -> Array:
        """The expected return from each start, [300]."""
        value = np.zeros(500)
        for _ in range(LIMIT):
            later = self._continues * value[self._successor]
            value = (policy * (self._reward + later)).sum(axis=1)
        return np.asarray(value[self._starts])

    def _loop(self, state: int, best: Array) -> frozenset[int]:
        """The states that the greedy policy visits again and again from ``state``."""
        for _ in range(LIMIT):
            state = int(self._successor[state, best[state]])
        loop: set[int] = set()
        while state not in loop:
            loop.add(state)
            state = int(self._successor[state, best[state]])
        return frozenset(loop)


def run(peer: str, task: str, seed: int) -> Result:
    """Train in a separate process; its run folder is temporary."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", peer, task, str(seed)]
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        output = subprocess.run(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    return {"task": task, "peer": peer, "seed": seed, **json.loads(output.splitlines()[-1])}


def known_results() -> list[Result]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def store(result: Result) -> None:
    """One line per result, because curves are long."""
    results = [*known_results(), result]
    results.sort(key=lambda each: (each["task"], each["peer"], each["seed"]))
    lines = ",\n".join(json.dumps(each) for each in results)
    RESULTS.write_text(f"[\n{lines}\n]\n")


def print_table() -> None:
    print("| task | | seeds | greedy, median (range) | sampled, median (range) |")
    print("|---|---|---|---|---|")
    results = known_results()
    for task, peer in sorted({(each["task"], each["peer"]) for each in results}):
        runs = [each for each in results if (each["task"], each["peer"]) == (task, peer)]
        cells = []
        for name in ("greedy", "sampled"):
            values = [each[name] for each in runs if each[name] is not None]
            middle = statistics.median(values)
            cells.append(f"{middle:.1f} ({min(values):.1f} to {max(values):.1f})")
        print(f"| {task} | {peer} | {len(runs)} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--task", choices=list(SETTINGS), default="taxi")
    parser.add_argument("--peers", nargs="+", choices=["ours", "sb3"], default=["ours", "sb3"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--table", action="store_true", help="print the table only")
    args = parser.parse_args()
    if args.worker:
        peer, task, seed = args.worker
        print(json.dumps((train_ours if peer == "ours" else train_sb3)(task, int(seed))))
        return
    if not args.table:
        for seed in args.seeds:
            for peer in args.peers:
                key = args.task, peer, seed
                if key not in {(r["task"], r["peer"], r["seed"]) for r in known_results()}:
                    store(result := run(peer, args.task, seed))
                    print(json.dumps(result), flush=True)
    print_table()


if __name__ == "__main__":
    main()

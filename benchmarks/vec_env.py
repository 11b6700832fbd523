"""ParallelEnv compared with its peers and the physical limit; its start-up, failures and pairs.

    python benchmarks/vec_env.py speed --envs CartPole-v1 synth:100us --n-envs 8 16 --plot speed.png
    python benchmarks/vec_env.py start        # seconds and memory of four workers
    python benchmarks/vec_env.py faults       # time until an error reaches the caller
    python benchmarks/vec_env.py pair         # two half-size envs in turn, compared with one
    python benchmarks/vec_env.py redraw --json speed.json --plot speed.png   # of an earlier run

``limit`` is one free-running process per core; these processes share nothing. For each cell the
benchmark builds all backends, then times them in short windows, in shuffled order, several times.
The figures are medians. Compare within a cell, not across runs, because machines are noisy. Peers
that are not installed are skipped. Envs: any Gymnasium id, ``pong`` (84x84x4, frame skip 4),
``hockey`` (both players), ``trading`` (a synthetic market), or ``synth:COST[:img]``, a loop with
this much CPU work per step (100us, 1ms).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import multiprocessing
import os
import platform
import random
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import date
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from raw_file import add_json_option, write_raw

from ml_pipeline.envs.vec_env import ParallelEnv, SerialEnv, WorkerError
from ml_pipeline.envs.workers.cores import available_cores
from ml_pipeline.worlds.hockey.env import Hockey
from ml_pipeline.worlds.trading.env import Trading

EnvFn = Callable[[], gym.Env[Any, Any]]
Step = Callable[[Any], Any]
OURS = ("serial", "parallel", "shared", "shared, final infos")
CORES = available_cores()


class SynthEnv(gym.Env[Any, Any]):
    """Runs an empty loop of ``n_turns`` per step; episodes last 200 steps."""

    def __init__(self, n_turns: int, image: bool) -> None:
        self.n_turns = n_turns
        self.observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
        if image:
            self.observation_space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
        self.action_space = gym.spaces.Discrete(4)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        for _ in range(self.n_turns):
            pass
        self._steps += 1
        return self._observe(), 1.0, False, self._steps >= 200, {}

    def _observe(self) -> Any:
        return np.ones(self.observation_space.shape or (), self.observation_space.dtype)


class BadEnv(SynthEnv):
    """Fails in its third step."""

    def __init__(self, fault: str) -> None:
        super().__init__(1, False)
        self.fault = fault

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._steps == 2 and self.fault == "raise":
            raise ValueError("on purpose")
        if self._steps == 2 and self.fault == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._steps == 2 and self.fault == "os._exit":
            os._exit(3)
        if self._steps == 2 and self.fault == "stuck, deadline 1 s":
            time.sleep(1000)
        return super().step(action)


def make_pong() -> gym.Env[Any, Any]:
    gym.register_envs(importlib.import_module("ale_py"))
    env = gym.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    env = gym.wrappers.AtariPreprocessing(env, frame_skip=4, screen_size=84, noop_max=30)
    return gym.wrappers.FrameStackObservation(env, 4)


def env_factory(name: str) -> EnvFn:
    if name == "pong":
        return make_pong
    if name == "hockey":
        return Hockey
    if name == "trading":
        return partial(Trading, data={"market": "random_walk", "n_symbols": 4})
    if not name.startswith("synth:"):
        return partial(gym.make, name)
    _, cost, *rest = name.split(":")
    seconds = float(cost[:-2]) * {"us": 1e-6, "ms": 1e-3}[cost[-2:]]
    return partial(SynthEnv, turns_for(seconds), "img" in rest)


def turns_for(seconds: float) -> int:
    """Turns of an empty loop that take ``seconds`` on this machine, by the best of seven tries."""
    tries = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(200_000):
            pass
        tries.append(time.perf_counter() - start)
    return max(1, round(seconds * 200_000 / min(tries)))


class Backend(NamedTuple):
    """Steps envs; ``run`` returns env steps per second over a window."""

    run: Callable[[float], float]
    close: Callable[[], Any]


def stepping(step: Step, actions: list[Any], n_envs: int) -> Callable[[float], float]:
    """A function that calls ``step`` for a window, with each batch of actions in turn."""
    turn = [0]

    def run(seconds: float) -> float:
        steps, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            turn[0] = (turn[0] + 1) % len(actions)
            step(actions[turn[0]])
            steps += n_envs
        return steps / elapsed

    return run


def vector_backend(env: Any, actions: list[Any], n_envs: int) -> Backend:
    env.reset()
    return Backend(stepping(env.step, actions, n_envs), env.close)


def plain_loop(env_fns: list[EnvFn], actions: list[Any]) -> Backend:
    envs = [env_fn() for env_fn in env_fns]
    for seed, env in enumerate(envs):
        env.reset(seed=seed)

    def step(action: Any) -> None:
        for env, each in zip(envs, action, strict=False):
            _, _, terminated, truncated, _ = env.step(each)
            if terminated or truncated:
                env.reset()

    def close() -> None:
        for env in envs:
            env.close()

    return Backend(stepping(step, actions, len(envs)), close)


def _free_runner(env_fns: list[EnvFn], actions: list[Any], line: Any) -> None:
    loop = plain_loop(env_fns, actions)
    loop.run(0.05)
    line.send(0.0)
    while (seconds := line.recv()) is not None:
        line.send(loop.run(seconds))


def free_runners(env_fns: list[EnvFn], actions: list[Any]) -> Backend:
    """The limit: one plain loop per core, in parallel, without communication."""
    context = multiprocessing.get_context("fork")
    share = env_fns[: max(1, len(env_fns) // CORES)]
    lines = []
    for _ in range(CORES):
        ours, theirs = context.Pipe()
        context.Process(target=_free_runner, args=(share, actions, theirs), daemon=True).start()
        lines.append(ours)
    for line in lines:
        line.recv()

    def run(seconds: float) -> float:
        for line in lines:
            line.send(seconds)
        return float(sum(line.recv() for line in lines))

    def close() -> None:
        for line in lines:
            line.send(None)

    return Backend(run, close)


def backends(env_fns: list[EnvFn], start_method: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names and factories of all available vector envs, ours first."""
    workers: dict[str, Any] = {"seed": 0, "start_method": start_method}
    yield "serial", partial(SerialEnv, env_fns, seed=0)
    yield "parallel", partial(ParallelEnv, env_fns, **workers)
    yield "shared", partial(ParallelEnv, env_fns, main_slice=True, **workers)
    final = partial(ParallelEnv, env_fns, main_slice=True, infos="final", **workers)
    yield "shared, final infos", final
    yield "Gymnasium Sync", partial(SyncVectorEnv, env_fns, autoreset_mode=AutoresetMode.SAME_STEP)
    yield (
        "Gymnasium Async",
        partial(
            AsyncVectorEnv, env_fns, context=start_method, autoreset_mode=AutoresetMode.SAME_STEP
        ),
    )
    if importlib.util.find_spec("stable_baselines3"):
        sb3 = importlib.import_module("stable_baselines3.common.vec_env")
        yield "SB3 Dummy", partial(sb3.DummyVecEnv, env_fns)
        yield "SB3 Subproc", partial(sb3.SubprocVecEnv, env_fns, start_method=start_method)
    if importlib.util.find_spec("pufferlib"):
        emulation = importlib.import_module("pufferlib.emulation")
        creator = partial(emulation.GymnasiumPufferEnv, env_creator=env_fns[0])
        yield (
            "PufferLib",
            partial(
                importlib.import_module("pufferlib.vector").make,
                creator,
                backend="Multiprocessing",
                num_envs=len(env_fns),
                num_workers=min(CORES, len(env_fns)),
            ),
        )


def speed(options: argparse.Namespace) -> None:
    cells = {}
    for name in options.envs:
        for n_envs in options.n_envs:
            cells[f"{name}, {n_envs} envs"] = measure(name, n_envs, options)
            show(f"{name}, {n_envs} envs", cells[f"{name}, {n_envs} envs"])
    write_raw(options.json, cells)
    if options.plot:
        draw(cells, options.plot, f"{platform.machine()}, {CORES} cores, {date.today()}")


def redraw(options: argparse.Namespace) -> None:
    """Draw the chart of a file that --json has written."""
    raw = json.loads(options.json.read_text())
    machine = raw["machine"]
    where = f"{machine['processor']}, {machine['cores']} cores, {raw['date']}"
    draw(raw["figures"], options.plot, where)


def measure(name: str, n_envs: int, options: argparse.Namespace) -> dict[str, float]:
    """Median env steps per second of each backend."""
    env_fns = [env_factory(name)] * n_envs
    env = env_fns[0]()
    space = gym.vector.utils.batch_space(env.action_space, n_envs)
    env.close()
    space.seed(0)
    actions = [space.sample() for _ in range(512)]
    made = {"limit": free_runners(env_fns, actions), "plain loop": plain_loop(env_fns, actions)}
    for label, make in backends(env_fns, options.start_method):
        try:
            made[label] = vector_backend(make(), actions, n_envs)
        except Exception as error:  # a peer may not support this env
            print(f"  {label}: {type(error).__name__}: {error}")
    speeds: dict[str, list[float]] = {label: [] for label in made}
    order, shuffle = list(made), random.Random(0).shuffle
    for _ in range(options.repeats):
        shuffle(order)
        for label in order:
            made[label].run(options.seconds / 4)
            speeds[label].append(made[label].run(options.seconds))
    for backend in made.values():
        with suppress(Exception):  # some peers raise in close()
            backend.close()
    return {label: statistics.median(each) for label, each in speeds.items()}


def best_peer(cell: dict[str, float]) -> float:
    return max(v for k, v in cell.items() if k not in (*OURS, "limit", "plain loop"))


def show(title: str, cell: dict[str, float]) -> None:
    print(f"\n{title}\n{'':<22}{'env steps/s':>12}{'of limit':>10}{'over best peer':>16}")
    for label, rate in sorted(cell.items(), key=lambda item: -item[1]):
        share, gain = rate / cell["limit"], rate / best_peer(cell)
        print(f"{label:<22}{rate:>12,.0f}{share:>10.2f}{gain:>15.2f}x", flush=True)


def draw(cells: dict[str, dict[str, float]], path: str, where: str) -> None:
    """Draw the share of the limit, a group of bars per cell: ours, then the best peer.

    ``where``: the machine and the date, for the title.
    """
    import matplotlib.pyplot as plt

    labels = ["parallel", "shared", "shared, final infos", "best peer"]
    figure, axes = plt.subplots(figsize=(2.0 + 1.1 * len(cells), 3.6))
    for i, label in enumerate(labels):
        heights = [
            (best_peer(cell) if label == "best peer" else cell[label]) / cell["limit"]
            for cell in cells.values()
        ]
        places = np.arange(len(cells)) + 0.2 * i
        axes.bar(places, heights, 0.18, label=label)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_title(f"Speed of vector envs, as a share of the limit ({where})", fontsize=9)
    axes.set_ylabel("share of the limit")
    axes.set_xticks(np.arange(len(cells)) + 0.3, [title.replace(", ", "\n") for title in cells])
    axes.tick_params(axis="x", labelsize=7)
    axes.legend(frameon=False, fontsize=8, ncols=len(labels), loc="upper center")
    axes.set_ylim(0, 1.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"saved {path}")


def start(options: argparse.Namespace) -> None:
    """Seconds until four workers have built their envs, and the memory of each worker."""
    for method in ("spawn", "fork"):
        seconds, megabytes = [], []
        for _ in range(options.repeats):
            begin = time.perf_counter()
            env = ParallelEnv([env_factory("CartPole-v1")] * 8, n_workers=4, start_method=method)
            seconds.append(time.perf_counter() - begin)
            env.reset(seed=1)
            megabytes += [load.rss_mb for load in env.worker_loads() if load.rss_mb is not None]
            env.close()
        size = f"{max(megabytes):.0f} MB" if megabytes else "unknown"
        print(f"4 {method} workers: {statistics.median(seconds):.2f} s, at most {size} each")


def faults(options: argparse.Namespace) -> None:
    """Milliseconds from the failing step to the error in the caller."""
    deadline = "stuck, deadline 1 s"
    for method in ("spawn", "fork"):
        for fault in ("raise", "SIGKILL", "os._exit", deadline):
            seconds: list[float] = []
            for _ in range(options.repeats):
                env = ParallelEnv(
                    [partial(BadEnv, fault)] * 4,
                    n_workers=2,
                    start_method=method,
                    step_timeout=1.0 if fault == deadline else 300.0,
                    seed=1,
                )
                env.reset()
                with timed(seconds), suppress(WorkerError):
                    for _ in range(3):
                        env.step(np.zeros(4, dtype=np.int64))
                env.close()
            median, worst = 1e3 * statistics.median(seconds), 1e3 * max(seconds)
            print(f"{method:>6} {fault:<20} median {median:7.1f} ms, worst {worst:7.1f} ms")
        restart(method, options.repeats)


def restart(method: Any, repeats: int) -> None:
    seconds: list[float] = []
    for _ in range(repeats):
        env = ParallelEnv(
            [partial(SynthEnv, 1, False)] * 4,
            n_workers=2,
            start_method=method,
            on_worker_death="restart",
            seed=1,
        )
        env.reset()
        os.kill(env.worker_pids[0], signal.SIGKILL)
        with timed(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            env.step(np.zeros(4, dtype=np.int64))
        env.close()
    print(f"{method:>6} restarted after SIGKILL: median {statistics.median(seconds) * 1e3:.0f} ms")


@contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - begin)


def pair(options: argparse.Namespace) -> None:
    """Two half-size envs with half the workers each, compared with one full-size env.

    "In turn": one steps while the caller handles the results of the other (double buffering).
    """
    for name in options.envs:
        for n_envs in options.n_envs:
            env_fns = [env_factory(name)] * n_envs
            one = ParallelEnv(env_fns, seed=0, start_method=options.start_method)
            half = n_envs // 2
            workers: dict[str, Any] = {
                "start_method": options.start_method,
                "n_workers": max(1, CORES // 2),
            }
            two = [
                ParallelEnv(env_fns[:half], seed=0, **workers),
                ParallelEnv(env_fns[half:], seed=half, **workers),
            ]
            for env in (one, *two):
                env.reset()
            rates: dict[str, list[float]] = {"one": [], "two in turn": []}
            for _ in range(options.repeats):
                for label, each in rates.items():
                    each.append(pair_window(label, one, two, n_envs, options.seconds))
            for env in (one, *two):
                env.close()
            medians = {label: statistics.median(each) for label, each in rates.items()}
            words = [f"{k} {v:,.0f} ({v / medians['one']:.2f})" for k, v in medians.items()]
            print(f"{name}, {n_envs} envs, env steps/s: {', '.join(words)}")


def pair_window(
    label: str, one: ParallelEnv, two: list[ParallelEnv], n_envs: int, seconds: float
) -> float:
    actions = [np.zeros(env.num_envs, dtype=np.int64) for env in (one, *two)]
    if label == "two in turn":
        for env, action in zip(two, actions[1:], strict=True):
            env.step_async(action)
    steps, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        if label == "one":
            one.step(actions[0])
        else:
            for env, action in zip(two, actions[1:], strict=True):
                env.step_wait()
                env.step_async(action)
        steps += n_envs
    if label == "two in turn":
        for env in two:
            env.step_wait()
    return steps / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = {"speed": speed, "start": start, "faults": faults, "pair": pair, "redraw": redraw}
    parser.add_argument("what", nargs="?", default="speed", choices=list(parts))
    parser.add_argument("--envs", nargs="+", default=["CartPole-v1", "synth:100us"])
    parser.add_argument("--n-envs", nargs="+", type=int, default=[8])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.15, help="length of one timed window")
    parser.add_argument("--start-method", default="fork", choices=["spawn", "fork", "forkserver"])
    parser.add_argument("--plot", help="save a chart of the shares of the limit to this file")
    add_json_option(parser)
    options = parser.parse_args()
    if options.what == "redraw" and not (options.json and options.plot):
        parser.error("redraw needs --json FILE, which it reads, and --plot FILE")
    warnings.filterwarnings("ignore", category=UserWarning)
    python = platform.python_version()
    print(f"{date.today()}, {platform.machine()}, {CORES} cores, Python {python}")
    parts[options.what](options)


if __name__ == "__main__":
    main()
